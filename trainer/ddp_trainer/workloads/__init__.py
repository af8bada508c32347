"""One module per workload: a training script that reads from top to bottom. Copy one to begin your own."""
