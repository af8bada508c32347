"""The data of a run: the samples of each rank and each step, and a DataLoader for them.

`sampler` does not import torch. May import `errors` and `ranks`.
"""
