"""Sentences about the checkpoints of a job, for several commands."""

from ddpjob.jobs.user_job import DDPJob


def beginning(job: DDPJob) -> str:
    """Return the starting point of a job's next run."""
    return "its last checkpoint" if job.checkpoint else "the beginning: it has no spec.checkpoint"


def kept_checkpoints(job: DDPJob) -> str:
    return f"; its checkpoints stay: {job.checkpoint}" if job.checkpoint else ""


def from_checkpoints(job: DDPJob) -> str:
    return f", from the checkpoints in {job.checkpoint}" if job.checkpoint else ""
