"""One module per workload, with a function `train(options, runtime)`.

`toy` contains a complete training loop: copy it to begin a new workload. `shared` has the loop and
the models of the image classifiers. `datasets` reads data sets into arrays.

May import `cli` for its options, and `errors`, `files`, `ranks`, `data`, `checkpoint` and `run`.
"""
