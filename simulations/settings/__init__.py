"""What an experiment file may say.

It owns the tables of the file (`tables`), how a table follows from a constructor
(`constructor`) and the words for settings (`wording`). It knows no data set, no
problem and no method, and imports nothing by itself: the command line needs its words at once.
"""
