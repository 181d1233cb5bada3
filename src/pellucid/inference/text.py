"""Text of a completion: in pieces while it is sampled, and up to a stop string.

Invariants:
- A piece is never taken back: bytes of an unfinished character and text that may be the start of a stop
  string are held until the next token decides.
- The pieces together are the text that a request without streaming gets.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
"""Character that decoders return for bytes that are no character, or an unfinished one."""


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Text before the first stop string: `cut_at_stop("ab\\n\\ncd", ["\\n\\n"]) == "ab"`."""
    return text[: min((text.find(each) for each in stop if each in text), default=len(text))]


class TextStream:
    """Token ids in, text out.

    With the stop string "END": the tokens "a", "E", "x", "EN", "D" give "a", "", "Ex", "", "".
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._token_ids: list[int] = []
        self._context = 0
        """Token where decoding starts: some decoders treat the first token of a text differently."""
        self._given = 0
        """Number of tokens that have become text."""
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self._past_stop(self._new_text(is_last=False), is_last=False)

    def finish(self) -> str:
        """Returns the text that was held back; call it once no token can follow."""
        return self._past_stop(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool) -> str:
        known = self._decode(self._token_ids[self._context : self._given])
        text = self._decode(self._token_ids[self._context :])
        if len(text) <= len(known) or (text.endswith(_BROKEN) and not is_last):
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[len(known) :]

    def _past_stop(self, text: str, is_last: bool) -> str:
        if self._ended:
            return ""
        text = self._held + text
        before = cut_at_stop(text, self._stop)
        self._ended = len(before) < len(text)
        keep = 0 if self._ended or is_last else _num_undecided(text, self._stop)
        self._held = text[len(text) - keep :]
        return before[: len(before) - keep]


def _num_undecided(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins a stop string."""
    starts = (each[:length] for each in stop for length in range(1, len(each)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)
