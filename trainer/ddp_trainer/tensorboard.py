"""TensorBoard's event files, for those who follow a training there."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_trainer.checkpoint import check_writable
from ddp_trainer.errors import UserError


class EventFile:
    """A new file in `folder` for one attempt of a training. What attempts before wrote of steps after `resumed_step` is void.

    Written at once: tensorboardX's SummaryWriter has a thread for it and a queue, which fills for ever once that thread has
    met a full disk. Raises UserError where tensorboardX is missing or the folder cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise UserError(
                "DDP_TENSORBOARD_DIR is set, but there is no tensorboardX: pip install it, or unset it"
            ) from error
        check_writable(folder)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.write_event(
                self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
            )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write down what each of these was after that step. Raises OSError."""
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        )
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()
