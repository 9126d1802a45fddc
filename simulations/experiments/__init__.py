"""The experiments, one TOML file each, and how a file becomes settings and data.

It owns the list of the files (`catalogue`), which of them a run is about (`experiment`) and
the reading of a file with its profile and changes (`loading`).
"""
