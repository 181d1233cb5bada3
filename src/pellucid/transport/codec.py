"""Bytes <-> batch, pure. docs/wire-format.md says it byte by byte.

header      magic, version, checksum, counts, run id
directory   one entry per section: name, form, dtype, where, how long
sections    `.lengths`, `.shared` (prompts that are stored once), and one per column
"""

from pellucid.transport.decode import decode_batch
from pellucid.transport.encode import encode_batch
from pellucid.transport.wire import UNLIMITED, VERSION, Compression, Limits

__all__ = ["UNLIMITED", "VERSION", "Compression", "Limits", "decode_batch", "encode_batch"]
