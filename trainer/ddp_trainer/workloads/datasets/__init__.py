"""Data sets as arrays in memory.

One module per data set. Its function `load` returns a training and a test set.
"""
