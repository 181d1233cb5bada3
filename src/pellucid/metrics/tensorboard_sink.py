"""TensorBoard's event files, written without torch: the orchestrator has none."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorboardSink:
    """A run that is resumed takes back the steps from the first that it logs on: TensorBoard hides them."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self._writer = EventFileWriter(str(folder))
        self._resumes = resume

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._resumes:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=step, wall_time=time.time(), session_log=start))
            self._resumes = False
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
        # The writer's thread flushes every two minutes, and only a flush raises what went wrong in it.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
