"""The text of token ids: each distinct id is looked up once, and no byte of it is lost.

" two"          a token that is text on its own
[240, 159]      the bytes of one that is not: part of a character that several tokens spell
"#123"          an id that no tokenizer knows
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ModelError

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Text = str | list[int]


MAX_CHARACTERS = 2_000
"""Characters shown of a token or a name: a browser lays out a line of megabytes for minutes."""


def shortened(text: str) -> str:
    """Returns the text as far as it is shown, and how long it is."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… ({len(text):,} characters)"


class Vocabulary:
    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self._special: frozenset[int] = frozenset(tokenizer.all_special_ids) if tokenizer else frozenset()
        if tokenizer is not None:
            self._special |= frozenset(
                token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
            )
        self._texts: dict[int, Text] = {}

    def text(self, token_id: int) -> Text:
        if token_id not in self._texts:
            text = self._look_up(token_id)
            self._texts[token_id] = shortened(text) if isinstance(text, str) else text[:MAX_CHARACTERS]
        return self._texts[token_id]

    def texts(self, token_ids: Iterable[int]) -> dict[str, Any]:
        """Returns the texts of ids in the form that the browser expects."""
        ids = [int(token_id) for token_id in token_ids]
        return {
            "ids": ids,
            "texts": [self.text(token_id) for token_id in ids],
            "special": [token_id for token_id in ids if token_id in self._special],
        }

    def words(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence, what is not UTF-8 replaced."""
        parts = (self.text(int(token_id)) for token_id in token_ids)
        raw = b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts)
        return raw.decode("utf-8", errors="replace")

    def _look_up(self, token_id: int) -> Text:
        piece = self._piece(token_id)
        if piece is None:
            return f"#{token_id}"
        if token_id in self._special:
            return piece
        if byte := _BYTE_PIECE.fullmatch(piece):
            return _text_or_bytes(bytes([int(byte[1], 16)]))
        if self._is_byte_level and all(character in BYTE_OF for character in piece):
            return _text_or_bytes(bytes(BYTE_OF[character] for character in piece))
        text: str = self.tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if not text:
            return piece.replace(SENTENCEPIECE_SPACE, " ")
        # A decoder strips the space of the first piece of a text, which every piece is when alone.
        if piece.startswith(SENTENCEPIECE_SPACE) and not text.startswith(" "):
            return f" {text}"
        return text

    def _piece(self, token_id: int) -> str | None:
        """Returns the token's own string in the tokenizer, None for an id that it does not know."""
        if self.tokenizer is None:
            return None
        try:
            piece: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError):
            return None
        return piece or None

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in str(backend.decoder)


def open_vocabulary(
    asked: str | None, found: str | None, *, trust_remote_code: bool = False
) -> tuple[Vocabulary, str | None]:
    """The texts of the ids, and a note where there are none. A tokenizer that was asked for must load.

    Code that comes with a tokenizer is trusted only if it was asked for, never if it was found.
    """
    if asked is not None:
        return Vocabulary(load_tokenizer(asked, trust_remote_code=trust_remote_code)), None
    remedy = "pass --tokenizer with a folder or hub name to see text"
    if found is None:
        return Vocabulary(), f"Tokens are shown as ids: no tokenizer was given and none was found; {remedy}."
    try:
        return Vocabulary(load_tokenizer(found)), None
    except ModelError as error:
        return Vocabulary(), f"Tokens are shown as ids: {error}; {remedy}."


def _text_or_bytes(raw: bytes) -> Text:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _byte_of()
