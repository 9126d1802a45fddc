"""A run: the base strategy, and what it is made of. It knows no method by name."""
