"""A client's samples.

`batches` understands the forms that batches and model outputs come in, `minibatches.Minibatches`
is a fast loader of data in memory, `holdout` sets samples aside, and `ratings.Ratings` holds the
ratings of matrix completion.
"""
