"""Who speaks where: `(role, start, end)` segments that cover every token of a record once, in order.

Recorded spans come first, then ChatML markers in the text, else one segment without a role. Tokens between
two recorded spans form segments without a role, so that none is dropped.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Segment = tuple[str, int, int]

START, END = "<|im_start|>", "<|im_end|>"
MAX_ROLE_TOKENS = 32


def segments_of(record: Mapping[str, Any], texts: Sequence[str]) -> list[Segment]:
    spans = [_span(span) for span in record.get("role_spans") or ()]
    recorded = sorted((span for span in spans if span is not None), key=lambda span: span[1])
    return _cover(recorded or _chatml(texts), len(texts))


def _span(span: Any) -> Segment | None:
    """`["user", 0, 9]`; None for anything else, as other writers may put something else here."""
    match span:
        case [str(role), int(start), int(end)]:
            return role, start, end
    return None


def _chatml(texts: Sequence[str]) -> list[Segment]:
    """From each start marker to the next one; the role is what stands between marker and line end."""
    starts = [index for index, text in enumerate(texts) if text == START]
    return [(_role_after(texts, start), start, end) for start, end in pairwise([*starts, len(texts)])]


def _role_after(texts: Sequence[str], start: int) -> str:
    head = "".join(texts[start + 1 : start + 1 + MAX_ROLE_TOKENS])
    return head.partition(END)[0].partition("\n")[0].strip()


def _cover(spans: Sequence[Segment], length: int) -> list[Segment]:
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
