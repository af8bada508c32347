"""Other manifests of distributed training, as DDPJobs: PyTorchJob, TrainJob and sbatch scripts.

A field of another format is declared once, in a table, with its conversion and the reason. Nothing
is run, and no file and no cluster is read. A value without a place in a DDPJob becomes a remark.

May import `core.api` and `jobs`.
"""
