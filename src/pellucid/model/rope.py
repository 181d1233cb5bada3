"""Rotary positions whose frequencies depend on the length of a row, fixed for a whole run.

`longrope` has two sets of factors, for sequences within the original context of the model and for longer
ones. Transformers chooses by the longest sequence of a forward, so that a token's logprob would depend on its
neighbours in the row, and would change while a sequence grows. As vLLM does, the longest sequence that may
come chooses once for all: trainer and engine need the same answer.
"""

from collections.abc import Iterator
from typing import Any

_FIXED = "longrope, fixed"
"""Type that a fixed module has: one that transformers computes from its frequencies as they are."""


def fix_frequencies(hf: Any, max_length: int | None) -> str:
    """Fixes the frequencies of `longrope` by the longest sequence; returns which, "" if there are none.

    With None, the longest sequence is that of the model's context.
    """
    said = ""
    for module, layer_type, rope in _ropes(hf):
        if rope.get("rope_type") != "longrope":
            continue
        original = int(rope["original_max_position_embeddings"])
        longest = max_length or int(hf.config.get_text_config().max_position_embeddings)
        is_long = longest > original
        _fix(module, layer_type, original + 1 if is_long else original)
        said = (
            f"longrope uses its {'long' if is_long else 'short'} factors for sequences of all lengths: the "
            f"longest may have {longest} tokens, and the original context has {original}"
        )
    return said


def _ropes(hf: Any) -> Iterator[tuple[Any, str | None, dict[str, Any]]]:
    """Yields modules, type of layer or None, and parameters of rotary positions."""
    for module in hf.modules():
        kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        if isinstance(kinds, dict):
            yield from ((module, kind, parameters.get(kind) or {}) for kind in list(kinds))
        elif isinstance(kinds, str):
            yield module, None, parameters


def _fix(module: Any, layer_type: str | None, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    before = getattr(module, name)
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, before.device, seq_len=length, **options)
    module.register_buffer(name, frequencies.to(before.dtype), persistent=False)
    if layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type = {**module.rope_type, layer_type: _FIXED}
