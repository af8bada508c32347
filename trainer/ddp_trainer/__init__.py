"""Training workloads for PyTorch DistributedDataParallel; knows torch, and not one word of Kubernetes."""

__version__ = "0.1.0"
