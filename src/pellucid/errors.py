"""Every error pellucid raises on purpose. A message names the key, the value, the rule and the remedy.

PellucidError
├── ConfigError        a setting, or a combination of settings, that cannot work
│   ├── MissingPackageError   what was asked for needs a package that is not installed
│   └── UserCodeError         an environment, advantage or filter raised; the log has its traceback
├── DataError          a sample, table or file whose content breaks a rule
│   └── ColumnError    the same, with the column and the sequence
├── ModelError         a model or tokenizer that cannot be loaded or is not supported
├── TransportError     a channel that cannot be read or written
│   └── PayloadError   bytes that are not what they claim to be
├── WeightsError       a server serves other weights than were published
├── InferenceError     an inference server that refused, failed or vanished
│   └── TeacherError   the same, of the teacher
├── RolloutError       one rollout failed: data, not a crash
│   └── PromptTooLongError   its conversation has outgrown the model
├── LedgerError        tokens are missing from the books
├── DiskError          a disk that is full or read-only; nothing half-written is left behind
└── ProcessError       a process of the run died
"""

import errno
import re
from collections.abc import Mapping
from typing import ClassVar


def printable(text: str) -> str:
    """Writes control characters as `\\x1b`: a name that somebody chose must not steer a terminal."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PellucidError(Exception):
    """Base of all errors raised on purpose; the command line prints them without a traceback."""

    exit_code: ClassVar[int] = 1
    """Exit code of a process that ends with this error."""


class ConfigError(PellucidError):
    exit_code = 2


class MissingPackageError(ConfigError):
    pass


class UserCodeError(ConfigError):
    """Raised from the error of somebody's own code; the command line prints that error's traceback, too."""


class DataError(PellucidError):
    pass


class ColumnError(DataError):
    def __init__(self, column: str, sequence: int | None, rule: str) -> None:
        super().__init__(column, sequence, rule)
        self.column = column
        self.sequence = sequence
        self.rule = rule

    def __str__(self) -> str:
        where = "" if self.sequence is None else f"sequence {self.sequence}: "
        return f"{where}{self.column} {self.rule}"


class ModelError(PellucidError):
    pass


class TransportError(PellucidError):
    pass


class WeightsError(PellucidError):
    pass


class PayloadError(TransportError):
    def __init__(self, sender: str, position: int, reason: str) -> None:
        super().__init__(sender, position, reason)
        self.sender = sender
        self.position = position
        self.reason = reason

    def __str__(self) -> str:
        return f"payload from {self.sender}, byte {self.position}: {self.reason}"


class InferenceError(PellucidError):
    pass


class TeacherError(InferenceError):
    pass


class RolloutError(PellucidError):
    pass


class PromptTooLongError(RolloutError):
    pass


class LedgerError(PellucidError):
    pass


class DiskError(PellucidError):
    exit_code = 74
    """EX_IOERR of sysexits.h. The code tells what happened when no log can be written."""

    REMEDIES: ClassVar[Mapping[int, str]] = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space, or ask for a larger quota",
        errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
        errno.EROFS: "make it writable",
    }
    """Numbers of the OSErrors that become a DiskError, each with its remedy."""

    @classmethod
    def of(cls, error: OSError, *, can_resume: bool = True) -> "DiskError":
        """Returns the same error with its remedy; its number is one of `REMEDIES`."""
        assert error.errno is not None
        what = f"{error.filename} cannot be written" if error.filename else "a file cannot be written"
        again = "go on with --resume" if can_resume else "try again"
        return cls(f"{what} ({error.strerror}); {cls.REMEDIES[error.errno]} and {again}")


class ProcessError(PellucidError):
    pass
