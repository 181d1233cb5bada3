"""The text of token ids: each distinct id is decoded once, and no character of it is lost."""

from typing import Any

REPLACEMENT = "\ufffd"
SENTENCEPIECE_SPACE = "\u2581"


class Vocabulary:
    """Without a tokenizer, a token's text is its id: `#123`."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[int] = frozenset(tokenizer.all_special_ids) if tokenizer else frozenset()
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._decode(token_id)
        return self._texts[token_id]

    def seen(self) -> dict[str, list[Any]]:
        """Ids, texts and special ids among all that were asked for."""
        ids = sorted(self._texts)
        return {
            "ids": ids,
            "texts": [self._texts[token_id] for token_id in ids],
            "special": [token_id for token_id in ids if token_id in self._special],
        }

    def _decode(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:
            return f"#{token_id}"
        text: str = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        # Part of a character decodes to the replacement character: the piece still shows its bytes.
        if not text or REPLACEMENT in text:
            return piece.replace(SENTENCEPIECE_SPACE, " ")
        # A decoder strips the space of the first piece of a text, which every piece is when alone.
        if piece.startswith(SENTENCEPIECE_SPACE) and not text.startswith(" "):
            return f" {text}"
        return text

    def _piece(self, token_id: int) -> str | None:
        """The token's own string in the tokenizer, None for an id that it does not know."""
        if self._tokenizer is None:
            return None
        try:
            piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError):
            return None
        return piece or None
