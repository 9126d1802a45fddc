"""What starts a run, and carries it from an experiment to its results folder.

It owns the command line (`cli`), the engines (`host`), the Flower App (`apps`), the run itself
(`run`) and what joins after it (`newcomers`).
"""
