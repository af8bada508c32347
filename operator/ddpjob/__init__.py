"""Run PyTorch DistributedDataParallel jobs on Kubernetes, and the same manifest on a laptop."""

__version__ = "0.1.0"
