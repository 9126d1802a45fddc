"""Models as clients see them.

`arrays.ModelArrays` says which arrays of a model travel, `personalization` which layers are
personal, and `heads` has the models with two heads (`TwoHeaded`, `RoutedHeads`).
"""
