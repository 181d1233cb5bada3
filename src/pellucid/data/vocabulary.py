"""Whether two models speak of the same tokens."""

import hashlib
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """Equal exactly if every id is the same token; special and added tokens count, templates do not."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}:{len(token)}:{token}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
