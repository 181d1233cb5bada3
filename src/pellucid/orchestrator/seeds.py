"""Seeds that depend on what they are for and on nothing else: not on the process, the time or the order."""

from hashlib import blake2b

_NUM_BYTES = 4  # engines and numpy take seeds below 2**32


def stable_seed(*parts: object) -> int:
    """The same parts give the same seed in every process; Python's `hash` does not."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(name, digest_size=_NUM_BYTES).digest(), "little")
