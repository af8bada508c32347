"""What a training loop calls beside the training: reports, evaluations, and the stop by a signal.

`progress` reports, `interrupt` stops all ranks after the same step, `evaluation` computes figures
over a test set, and `batch_norm` computes the statistics of BatchNorm over all ranks.

May import `errors`, `files`, `ranks`, `data` and `checkpoint`.
"""
