"""Event files of TensorBoard."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_trainer.errors import UserError
from ddp_trainer.files import check_writable


class EventFile:
    """A new event file in `folder` for one attempt of a training.

    TensorBoard ignores what earlier attempts wrote about steps after `resumed_step`.

    Events are written at once. tensorboardX's SummaryWriter uses a queue and a thread. After an
    error, such as a full disk, its thread never empties the queue again.

    Raises UserError if tensorboardX is missing or the folder cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise UserError(
                "DDP_TENSORBOARD_DIR is set, but tensorboardX is not installed; "
                "run `pip install tensorboardX` or unset the variable"
            ) from error
        check_writable(folder)
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
            self._file.write_event(event)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write named values after `step`. Raises OSError."""
        entries = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
        ]
        summary = self._summary(value=entries)
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._file.flush()
