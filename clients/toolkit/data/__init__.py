"""A client's samples: the forms of batches, minibatches, hold-out, ratings."""
