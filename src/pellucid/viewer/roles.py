"""Who speaks where: `(role, start, end)` segments that cover every token of a record once, in order.

Recorded spans come first, then the headers of the tokenizer's chat template, then ChatML's, else one segment
without a role. Tokens between two recorded spans form segments without a role, so that none is dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from pellucid.data import TokenTable
from pellucid.viewer.vocabulary import Vocabulary, shortened

Segment = tuple[str, int, int]

CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
MAX_ROLE_TOKENS = 32
ROLES = ("system", "user", "assistant", "tool")
_CONTENT = "\u2060pellucid\u2060"


class RoleFinder:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._headers = template_headers(vocabulary.tokenizer)

    def segments(self, batch: TokenTable) -> list[list[Segment]]:
        """Returns the segments of each record."""
        lengths: list[int] = batch.lengths.tolist()
        recorded = batch.get("role_spans")
        spans = [_spans(value) for value in recorded] if recorded is not None else [[] for _ in lengths]
        if not all(spans):
            ids = batch["token_ids"]
            starts = self._header_starts(ids) or self._chatml_starts(ids)
            guessed = _by_record(starts, batch.token_offsets)
            spans = [own or other for own, other in zip(spans, guessed, strict=True)]
        return [cover(own, length) for own, length in zip(spans, lengths, strict=True)]

    def _header_starts(self, ids: NDArray[Any]) -> list[tuple[int, str]]:
        found = []
        for role, header in self._headers.items():
            for start in np.flatnonzero(ids == header[0]).tolist():
                if tuple(ids[start : start + len(header)].tolist()) == header:
                    found.append((start, role))
        return sorted(found)

    def _chatml_starts(self, ids: NDArray[Any]) -> list[tuple[int, str]]:
        """Finds ChatML headers; the role stands between a start marker and the end of its line."""
        markers = [token for token in np.unique(ids) if self._vocabulary.text(int(token)) == CHATML_START]
        starts = np.flatnonzero(np.isin(ids, markers)).tolist() if markers else []
        return [(start, self._role_after(ids, start)) for start in starts]

    def _role_after(self, ids: NDArray[Any], start: int) -> str:
        head = self._vocabulary.words(ids[start + 1 : start + 1 + MAX_ROLE_TOKENS].tolist())
        return head.partition(CHATML_END)[0].partition("\n")[0].strip()


def _by_record(starts: Sequence[tuple[int, str]], offsets: NDArray[np.int64]) -> list[list[Segment]]:
    """Turns that begin where a header does and end where the next one, or the record, does."""
    found: list[list[Segment]] = [[] for _ in range(len(offsets) - 1)]
    places = [start for start, _ in starts]
    owners = np.searchsorted(offsets, places, side="right") - 1
    for index, ((start, role), owner) in enumerate(zip(starts, owners.tolist(), strict=True)):
        first, last = int(offsets[owner]), int(offsets[owner + 1])
        end = min(places[index + 1], last) if index + 1 < len(places) else last
        found[owner].append((role, start - first, end - first))
    return found


def template_headers(tokenizer: Any) -> Mapping[str, tuple[int, ...]]:
    """The ids that open a turn of each role, from the tokenizer's chat template; none without a template.

    user: "hi", then a turn of each role: what is rendered before its content differs first where the role is
    named. The header starts there, or at the special token right before it.
    """
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        return {}
    rendered = {role: text for role in ROLES if (text := _before_content(tokenizer, role))}
    ids = {role: tokenizer.encode(text, add_special_tokens=False) for role, text in rendered.items()}
    same = _common_prefix(list(ids.values())) if len(ids) > 1 else 0
    headers = {}
    for role, tokens in ids.items():
        special = [
            at for at, token in enumerate(tokens[: same + 1]) if token in tokenizer.added_tokens_decoder
        ]
        if special:
            headers[role] = tuple(tokens[special[-1] :])
    return headers if len(headers) > 1 and len(set(headers.values())) == len(headers) else {}


def _before_content(tokenizer: Any, role: str) -> str:
    chat = [{"role": "user", "content": "hi"}, {"role": role, "content": _CONTENT}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # it wants a conversation of another form
        return ""
    before, found, _ = text.partition(_CONTENT)
    return before if found else ""


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    shortest = min(len(sequence) for sequence in sequences)
    first = sequences[0]
    return next(
        (at for at in range(shortest) if any(sequence[at] != first[at] for sequence in sequences)), shortest
    )


def _spans(value: Any) -> list[Segment]:
    if value is None or not isinstance(value, Sequence | np.ndarray):
        return []
    return sorted((span for span in map(_span, value) if span is not None), key=lambda span: span[1])


def _span(span: Any) -> Segment | None:
    """`["user", 0, 9]`; None for anything else, as other writers may put something else here."""
    match span.tolist() if isinstance(span, np.ndarray) else span:
        case [str(role), int(start), int(end)]:
            return shortened(role), start, end
    return None


def cover(spans: Sequence[Segment], length: int) -> list[Segment]:
    """Clips the spans to each other and to the record, and fills the gaps."""
    covered: list[Segment] = []
    position = 0
    for role, start, end in spans:
        start, end = max(start, position), min(end, length)
        if start >= end:
            continue
        if start > position:
            covered.append(("", position, start))
        covered.append((role, start, end))
        position = end
    if position < length:
        covered.append(("", position, length))
    return covered
