"""Training with PyTorch DistributedDataParallel that can be stopped and resumed anywhere.

The modules of this package are a library for training scripts. `cli` is the command line,
`workloads` are training scripts that use the library. The trainer has not one word of Kubernetes.
"""

__version__ = "0.1.0"
