"""Writes what the loss did with every token: one record per sequence with a trainable token.

Values come from the loss's own record and are never derived again here. A step is written under a hidden
name; its file appears (or, with one file for all steps, its records are appended) when the step is complete,
and `STABLE` beside it once every rank has written.

Encoding and writing are done beside training, one micro batch at a time: by a process of its own, or by a
thread. Training waits only when the next micro batch is there already, so an export never holds more than one
beyond what training holds.

An export never stops training: on a full disk, or when its folder vanishes, it ends with one warning, takes
back what it had of the step, and counts what it leaves out from then on.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import orjson

from pellucid.data import TokenTable
from pellucid.data.files import append_file, read_lines, replace_file
from pellucid.data.schema import FIELDS, Column
from pellucid.data.table import Values
from pellucid.errors import DataError
from pellucid.export.jsonl import SCHEMA_VERSION, JsonlRecords
from pellucid.export.parquet import ParquetSink, require
from pellucid.export.paths import ExportPaths, partial_of
from pellucid.export.summary import StepSummary

if TYPE_CHECKING:  # the process that writes needs neither, and starts in half the time
    from torch import Tensor

    from pellucid.config import ExportColumns, ExportFormat, TrainerPrecision
    from pellucid.data.tensors import HostCopy

logger = logging.getLogger(__name__)

_GRACE_S = 10.0


def micro_batch_columns(
    table: TokenTable,
    observed: "Mapping[str, Tensor | None]",
    *,
    step: int,
    rank: int,
    micro_step: int,
    denominator: int,
    num_written: int,
    precision: str,
) -> tuple[TokenTable, int]:
    """Returns the exported part of a micro batch, and the number of sequences without a trainable token.

    Adds what was observed to the table that trained, and selects the sequences with a trainable token.
    `observed` are the per-token values of forward and loss, None where the loss has none. Padding, the
    sequence without an environment, is neither exported nor counted.
    """
    is_due = table.trainable_lengths > 0
    num_skipped = int(sum(bool(env) for env in table["env_name"][~is_due]))
    constant = {"schema_version": SCHEMA_VERSION, "step": step, "rank": rank}
    constant |= {"micro_step": micro_step, "denominator": denominator}
    null = np.full(table.num_tokens, np.nan, np.float32)
    added: dict[str, Values] = {
        **{name: np.full(table.num_sequences, value, np.int64) for name, value in constant.items()},
        **{name: null if values is None else values.numpy() for name, values in observed.items()},
        "precision": np.full(table.num_sequences, precision, object),
        "micro_sequence_idx": np.arange(table.num_sequences),
        "export_sequence_idx": num_written + np.cumsum(is_due) - 1,
        "position_ids": table.positions(),
    }
    if "advantages" in table:
        added["advantage"] = np.full(table.num_sequences, np.nan, np.float32)
    columns = {
        field.name: added[field.name]
        if field.name in added
        else (table.dense(field.name) if field.per_token else table[field.name])
        for field in FIELDS
    }
    return TokenTable(table.lengths, columns).select(np.flatnonzero(is_due)), num_skipped


class StepWriter:
    """Encodes the records of one rank, step by step: under a hidden name until the step is complete."""

    def __init__(self, paths: ExportPaths, rank: int, fields: Sequence[Column]) -> None:
        self.paths = paths
        self.rank = rank
        self._fields = fields
        self._records: JsonlRecords | ParquetSink | None = None
        self._summary = StepSummary()

    def write(self, step: int, batch: TokenTable) -> None:
        """Writes a part of a step; the first part opens its file."""
        self._summary.add(batch)
        self._open(step).write(batch)

    def complete(self, step: int) -> None:
        """Gives the step's file its name, even if it has no record, and writes its summary."""
        self._open(step).close()
        target = self.paths.file(step, self.rank)
        start = target.stat().st_size if self.paths.is_shared and target.exists() else 0
        if self.paths.is_shared:
            append_file(target, partial_of(target))
            partial_of(target).unlink()
        else:
            partial_of(target).rename(target)
        self.paths.link(step, self.rank, start, target.stat().st_size)
        summary = orjson.dumps(self._summary.as_dict(), option=orjson.OPT_SERIALIZE_NUMPY)
        replace_file(self.paths.summary(step, self.rank), summary)
        self._records, self._summary = None, StepSummary()

    def abandon(self) -> None:
        """Lets go of a step that is not complete: its file keeps its hidden name. Never raises an OSError."""
        if self._records is not None:
            self._records.abandon()
        self._records, self._summary = None, StepSummary()

    def _open(self, step: int) -> JsonlRecords | ParquetSink:
        if self._records is None:
            path = partial_of(self.paths.file(step, self.rank))
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = JsonlRecords if self.paths.suffix == ".jsonl" else ParquetSink
            self._records = kind(path, self._fields)
        return self._records


class WriterProcess:
    """Runs a `StepWriter` in another process, which starts with the first call.

        training                                the other process
        ("write", step, batch)    ────────>     StepWriter.write
                                  <────────     None, or the error that it ended with

    Python's lock is not shared with training then: a thread would hold it while it makes JSON of a long
    record, and training could start no operation meanwhile. The process ends when the other end of its pipe
    does, however that came about: what it had of a step keeps its hidden name.
    """

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def write(self, step: int, batch: TokenTable) -> None:
        self._call("write", step, batch)

    def complete(self, step: int) -> None:
        self._call("complete", step)

    def abandon(self) -> None:
        """Ends the process."""
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None

    def _call(self, name: str, *arguments: object) -> None:
        try:
            pipe = self._pipe or self._start()
            pipe.send((name, *arguments))
            error = pipe.recv()
        except (EOFError, ConnectionError) as broken:
            raise OSError(f"its process is gone ({self._how_it_ended()})") from broken
        if error is not None:
            raise error

    def _start(self) -> Connection:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._pipe.send(self._writer)
        return self._pipe

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it did not start"
        try:
            return f"exit code {self._process.wait(_GRACE_S)}"
        except subprocess.TimeoutExpired:
            return "it closed its pipe"


def serve() -> None:
    """Handles the calls of a `WriterProcess` until the other end of the pipe is closed."""
    # Whoever ends a run signals all its processes; the trainer may finish its step, and this ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError), Connection(int(sys.argv[1])) as pipe:
        writer: StepWriter = pipe.recv()
        while True:
            name, *arguments = pipe.recv()
            error = None
            try:
                getattr(writer, name)(*arguments)
            except Exception as raised:  # all of them are raised where the call was made
                error = raised
            pipe.send(error)


class TokenExporter:
    """The export of one run by one rank."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int = 0,
        path: Path | None = None,
        format: "ExportFormat" = "jsonl",
        columns: "ExportColumns" = "all",
        own_process: bool = False,
        max_bytes: int | None = None,
        precision: "TrainerPrecision" = "float32",
    ) -> None:
        """`precision` is what the trainer computes in, weights and activations."""
        if format == "parquet":
            require("pyarrow", 'trainer.experimental.token_export.format = "parquet"')
        self.paths = ExportPaths.at(run_dir, format, path)
        self._rank = rank
        self._max_bytes = max_bytes
        self._num_bytes: int | None = None
        """Bytes of this rank's files, once they were counted."""
        self._precision = precision
        fields = [field for field in FIELDS if columns == "all" or not field.derivable]
        writer = StepWriter(self.paths, rank, fields)
        self._writer = WriterProcess(writer) if own_process else writer
        self._num_due = 0
        """Sequences of this step, whether they could be written or not."""
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-export")
        self._jobs: list[Future[None]] = []
        self._is_completed = False
        """Whether `complete` was called for this step: nothing more of it will come."""
        self._lock: IO[Any] | None = None
        self.num_skipped = 0
        """Sequences without a trainable token so far: not exported, but counted."""
        self.num_lost = 0
        """Sequences so far that should have been exported and are not."""

    def add(
        self,
        table: TokenTable,
        observed: "Mapping[str, Tensor | None]",
        *,
        step: int,
        micro_step: int,
        denominator: int,
    ) -> None:
        """Adds a micro batch; `observed` are the per-token values of forward and loss, None where absent."""
        from pellucid.data.tensors import HostCopy

        # First: the copy is under way while the micro batch before it is written.
        copy = HostCopy({name: values for name, values in observed.items() if values is not None})
        self.flush()
        held = [(table, dict.fromkeys(observed), copy)]
        self._jobs.append(self._thread.submit(self._export, held, step, micro_step, denominator))

    def complete(self, step: int) -> None:
        """Ends the step: its file gets its name while training goes on."""
        self._is_completed = True
        self._jobs.append(self._thread.submit(self._write, step, lambda: self._complete(step)))

    def finish(self, step: int) -> None:
        """Ends the step and waits until it is written."""
        if not self._is_completed:
            self.complete(step)
        self.flush()
        self._is_completed = False
        self.num_lost += self._num_due if self._failed else 0
        self._num_due = 0

    def claim(self, *, resume: bool) -> None:
        """Keeps other runs away from the files until `close`; a run that starts afresh finds none of its own.

        The main rank calls it before any rank writes. Raises ConfigError where another run writes or has
        written.
        """
        self._lock = self.paths.claim(resume=resume)
        self._attempt(0, self.paths.delete_partials)
        if not resume:
            self.forget_ranks_from(0, 0)
        logger.info("token exports go to %s", self.paths)

    def forget_from(self, step: int) -> None:
        """Deletes this rank's steps from `step` on, which will be written again."""
        self._attempt(step, lambda: self._delete_from(step, lambda rank: rank == self._rank))

    def forget_ranks_from(self, num_ranks: int, step: int) -> None:
        """Deletes steps from `step` on of ranks that no longer exist; others will write them again."""
        self._attempt(step, lambda: self._delete_from(step, lambda rank: rank >= num_ranks))

    def close(self) -> None:
        """Ends the thread and gives up the files; an unfinished step keeps its hidden name."""
        self._thread.shutdown()
        self._writer.abandon()
        if self._lock is not None:
            self._lock.close()

    def mark_stable(self, step: int) -> None:
        """Called once, when every rank has finished the step."""
        self._attempt(step, self.paths.marker(step).touch)

    def flush(self) -> None:
        """Waits until everything added so far is written."""
        while self._jobs:
            self._jobs.pop(0).result()

    def _export(
        self,
        held: "list[tuple[TokenTable, dict[str, None], HostCopy]]",
        step: int,
        micro_step: int,
        denominator: int,
    ) -> None:
        """Exports the micro batch in `held`, and drops the reference to it before the job counts as done."""
        table, absent, copy = held.pop()
        batch, num_skipped = micro_batch_columns(
            table,
            {**absent, **copy.wait()},
            step=step,
            rank=self._rank,
            micro_step=micro_step,
            denominator=denominator,
            num_written=self._num_due,
            precision=self._precision,
        )
        del table, copy
        self.num_skipped += num_skipped
        self._num_due += batch.num_sequences
        self._write(step, lambda: self._writer.write(step, batch))

    def _complete(self, step: int) -> None:
        """Gives the step's file its name; raises OSError where the rank's files then exceed `max_bytes`."""
        self._writer.complete(step)
        if self._max_bytes is None:
            return
        if self._num_bytes is None or self.paths.is_shared:
            files = {path for _, rank, path in self.paths.known() if rank == self._rank}
            self._num_bytes = sum(path.stat().st_size for path in files)
        else:
            written = (self.paths.file(step, self._rank), self.paths.summary(step, self._rank))
            self._num_bytes += sum(path.stat().st_size for path in written)
        if self._num_bytes > self._max_bytes:
            raise OSError(
                f"its files have {self._num_bytes:,} bytes, "
                f"trainer.experimental.token_export.max_bytes = {self._max_bytes:,}"
            )

    def _delete_from(self, step: int, is_meant: Callable[[int], bool]) -> None:
        for number, rank, path in self.paths.known():
            if is_meant(rank) and number is None:
                _cut_before(step, path)
            elif is_meant(rank) and number is not None and number >= step:
                self.paths.marker(number).unlink(missing_ok=True)  # first: killed in between, not trusted
                path.unlink(missing_ok=True)

    def _write(self, step: int, work: Callable[[], object]) -> None:
        """Attempts `work`; if it fails, deletes what was written of the step: half a step is of no use."""
        if self._attempt(step, work):
            target = self.paths.file(step, self._rank)
            with suppress(OSError):
                partial_of(target).unlink(missing_ok=True)
                if not self.paths.is_shared:
                    target.unlink(missing_ok=True)

    def _attempt(self, step: int, work: Callable[[], object]) -> bool:
        """Runs `work`; an OSError ends the export with a warning. Returns True if this call ended it."""
        if self._failed:
            return False
        try:
            work()
        except OSError as error:
            self._failed = True
            self._writer.abandon()
            path = error.filename or self.paths.file(step, self._rank)
            reason = error if error.errno is None else f"{path} cannot be written ({error.strerror})"
            logger.warning(
                "the token export ends with step %d: %s; training goes on without it, and "
                "export/lost_sequences counts what is left out. Once that is mended, --resume exports again",
                *(step, reason),
            )
        return self._failed


def _cut_before(step: int, path: Path) -> None:
    if step == 0:
        path.unlink()
        return
    kept = [line for number, line in read_lines(path) if _is_before(step, line, f"{path}:{number}")]
    replace_file(path, b"".join(kept))


def _is_before(step: int, line: bytes, place: str) -> bool:
    """Whether a line is a whole record of an earlier step."""
    try:
        return line.endswith(b"\n") and bool(orjson.loads(line)["step"] < step)
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        raise DataError(f"{place} is no record of an export ({error!r}); delete that line") from error
