"""Compares the vocabularies of two models."""

import hashlib
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """Hashes a vocabulary, special tokens included: equal exactly if every id is the same token."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}:{len(token)}:{token}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
