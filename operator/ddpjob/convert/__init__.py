"""Other manifests of distributed training, as DDPJobs: PyTorchJob, TrainJob and sbatch scripts.

A field of another format is declared once, in a table, with what becomes of it and why. Nothing is
run, and no file and no cluster is read. What a DDPJob has no place for becomes a remark.

May import `core.api` and `jobs`.
"""
