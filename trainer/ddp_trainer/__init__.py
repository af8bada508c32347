"""Training with PyTorch DistributedDataParallel that can be stopped and resumed anywhere.

The modules of this package are a library for training scripts. `cli` is the command line.
`workloads` has training scripts that use the library. The package works on one machine and on any
cluster.
"""

__version__ = "0.1.0"
