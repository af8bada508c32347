"""Data sets as arrays in memory.

One module per data set, with a function `load` that returns a training and a test set.
"""
