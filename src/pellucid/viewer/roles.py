"""Who speaks where: `(role, start, end)` segments that cover every token of a record once, in order.

Recorded spans come first, then the headers of the tokenizer's chat template, then ChatML's, else one segment
without a role. Tokens between two recorded spans form segments without a role, so that none is dropped.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2 import TemplateError

from pellucid.viewer.access import Record
from pellucid.viewer.vocabulary import Vocabulary

Segment = tuple[str, int, int]

CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
MAX_ROLE_TOKENS = 32
ROLES = ("system", "user", "assistant", "tool")
_CONTENT = "\u2060pellucid\u2060"


class RoleFinder:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._headers = template_headers(vocabulary.tokenizer)

    def segments(self, record: Record) -> list[Segment]:
        spans = [_span(span) for span in record.fields.get("role_spans") or ()]
        recorded = sorted((span for span in spans if span is not None), key=lambda span: span[1])
        ids = record.columns["token_ids"]
        return cover(recorded or self._by_headers(ids) or self._by_chatml(ids), record.num_tokens)

    def _by_headers(self, ids: Any) -> list[Segment]:
        found = []
        for role, header in self._headers.items():
            for start in np.flatnonzero(ids == header[0]):
                if tuple(ids[start : start + len(header)]) == header:
                    found.append((int(start), role))
        found.sort()
        ends = [start for start, _ in found[1:]] + [len(ids)]
        return [(role, start, end) for (start, role), end in zip(found, ends, strict=True)]

    def _by_chatml(self, ids: Any) -> list[Segment]:
        """From each start marker to the next one; the role is what stands between marker and line end."""
        marker = [token for token in np.unique(ids) if self._vocabulary.text(int(token)) == CHATML_START]
        starts = np.flatnonzero(np.isin(ids, marker)).tolist() if marker else []
        return [(self._role_after(ids, start), start, end) for start, end in pairwise([*starts, len(ids)])]

    def _role_after(self, ids: Any, start: int) -> str:
        head = self._vocabulary.words(ids[start + 1 : start + 1 + MAX_ROLE_TOKENS])
        return head.partition(CHATML_END)[0].partition("\n")[0].strip()


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
        special = [at for at, token in enumerate(tokens[: same + 1]) if token in tokenizer.added_tokens_decoder]
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


def _span(span: Any) -> Segment | None:
    """`["user", 0, 9]`; None for anything else, as other writers may put something else here."""
    match span:
        case [str(role), int(start), int(end)]:
            return role, start, end
    return None


def cover(spans: Sequence[Segment], length: int) -> list[Segment]:
    """The spans clipped to each other and to the record, gaps filled."""
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
