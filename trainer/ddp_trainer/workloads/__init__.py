"""One module per workload, with a function `train(options, runtime)`."""
