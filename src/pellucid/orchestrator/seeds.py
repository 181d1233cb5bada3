"""Seeds that depend on their purpose alone, not on process, time or order."""

from hashlib import blake2b

_NUM_BYTES = 4  # engines and numpy take seeds below 2**32


def stable_seed(*parts: object) -> int:
    """Hashes `parts` to a seed that is the same in every process, unlike Python's `hash`."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(name, digest_size=_NUM_BYTES).digest(), "little")
