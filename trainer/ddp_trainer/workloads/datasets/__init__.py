"""Data sets as arrays in memory: one module each, with a function `load` that returns a training and a test set."""
