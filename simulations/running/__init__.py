"""What starts a run, and carries it from an experiment to its results folder.

It owns the command line (`cli`), the engines (`host`), the Flower App (`apps`), and the run itself
with what joins after it (`run`).
"""
