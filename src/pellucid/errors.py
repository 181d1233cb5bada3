"""Every error pellucid raises on purpose. A message names the key, the value, the rule and the remedy.

PellucidError
├── ConfigError        a setting, or a combination of settings, that cannot work
├── DataError          a sample, table or file whose content breaks its own rules
├── ModelError         a model or tokenizer that cannot be loaded or is not supported
├── TransportError     a channel that cannot be read or written
│   └── PayloadError   bytes that are not what they claim to be
├── InferenceError     an inference server that refused, failed or vanished
├── RolloutError       one rollout failed: data, not a crash
├── LedgerError        tokens are missing from the books
└── ProcessError       a process of the run died
"""


class PellucidError(Exception):
    """Base of all errors raised on purpose; the command line prints them without a traceback."""


class ConfigError(PellucidError):
    pass


class DataError(PellucidError):
    pass


class ModelError(PellucidError):
    pass


class TransportError(PellucidError):
    pass


class PayloadError(TransportError):
    pass


class InferenceError(PellucidError):
    pass


class RolloutError(PellucidError):
    pass


class LedgerError(PellucidError):
    pass


class ProcessError(PellucidError):
    pass
