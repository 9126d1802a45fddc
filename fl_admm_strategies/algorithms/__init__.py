"""The methods, one file each; a file holds what its paper says.

`fpfc` is a folder, `shared` has what several methods need.
"""
