"""Proves at load how a model can be trained: packed, or else in rows. What cannot be trained is refused.

A plan controls attention alone. Convolutions, recurrent states and a model's own attention code ignore it and
would silently mix packed sequences; errors of windows and positions may only show in long sequences. So the
loaded model computes a few tokens:

    calls      every decoder layer asks for attention once per forward
    masks      those that HF would build hide only the future, or what is behind a sliding window
    values     packed sequences, at the first and at the last positions within `max_length`, have the logits
               that HF's own forward with its own attention gives each of them alone; windows of the config
               are so short then that they hide tokens of the probe
    buffers    none changes with the positions in a row, as those of some RoPE do

A model that fails goes in rows, if sequences of different lengths side by side have the logits of each alone.

Values are compared in float32 whatever the dtype of the weights: in bfloat16, rounding alone sends tokens to
other experts.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.config.trainer import SequenceLayout
from pellucid.data.images import ImageShape
from pellucid.data.tokenizer import first_line
from pellucid.errors import ConfigError, ModelError
from pellucid.model.attention import ATTENTION, PackedAttention
from pellucid.model.images import ImageInputs
from pellucid.model.masks import NotPacked, computing_by, read_windows, short_windows
from pellucid.model.policy import NOT_YET, Policy, without_cache

logger = logging.getLogger(__name__)

_LENGTH = 6
"""Tokens of a probed sequence: more than a convolution of width four covers."""

_WINDOW = 4
"""Window of a probe, in tokens: shorter than its sequences."""

_LONGEST_ROW = 150
"""Tokens of the longest sequence that is probed in rows: more than layers take at a time (128)."""

_ROUNDINGS = 64
"""Rounding errors that add up in a layer: a product of 4,096 terms makes √4096 of them."""


def prove(
    policy: Policy, max_length: int | None, layout: SequenceLayout = "auto", *, own_code: str = ""
) -> None:
    """Decides by which way the policy computes sequences of up to `max_length` tokens, and sets it up for it.

    With None, only sequences as long as those that are probed are proved. `own_code` says why the model
    cannot be packed if that is known. Raises ModelError if no way is right, and ConfigError if that of
    `layout` is not.
    """
    if not own_code:
        policy.way, policy.attention = "packed", ATTENTION
    with torch.no_grad(), in_float32(policy):
        why_not = own_code or _why_not_packed(policy, max_length)
        if why_not and layout == "packed":
            raise ConfigError(
                f'trainer.model.layout = "packed", but {_name(policy)} cannot compute packed sequences: '
                f'{why_not}; set it to "auto" or "rows"'
            )
        if why_not or layout == "rows":
            policy.go_in_rows(why_not or 'trainer.model.layout = "rows"')
            _prove_rows(policy, max_length)
        if policy.images is not None:
            _prove_images(policy, policy.images)
    logger.info("%s: %s", _name(policy), _said(policy))


def prove_rows(policy: Policy, max_length: int | None, why: str) -> None:
    """Sets the policy up for sequences in rows, which must be right, too. `why`: why it is not packed."""
    with torch.no_grad(), in_float32(policy):
        policy.go_in_rows(why)
        _prove_rows(policy, max_length)
    logger.info("%s: %s", _name(policy), _said(policy))


def _said(policy: Policy) -> str:
    if policy.way == "rows":
        return f"sequences go in rows, not packed ({policy.why_rows})"
    widths = sorted(set(policy.windows.values()))
    if not widths:
        return "sequences are packed"
    number = f"{len(policy.windows)} of {len(policy.layers)} layers"
    return f"sequences are packed; {number} have a window of {' or '.join(map(str, widths))} tokens"


def _why_not_packed(policy: Policy, max_length: int | None) -> str:
    """Returns why packed sequences would be wrong, or "" if they are right; then the windows are set."""
    length = max(max_length or 0, 3 * _LENGTH)  # so that near and far positions never adjoin
    ids = _tokens(policy, 4, _LENGTH)
    near = torch.arange(_LENGTH, device=policy.device)
    far = near + length - _LENGTH
    positions = torch.stack([near, far, near, far])
    try:
        with short_windows(policy, _WINDOW), _uncertain():
            policy.windows = read_windows(policy, ids[:1], _LENGTH)
            plan = PackedAttention([_LENGTH] * 4)
            hidden = policy.hidden(ids.view(1, -1), positions.view(1, -1), plan)[0]
            alone = _alone_at(policy, ids, positions)
            _fit_logits(policy, hidden, alone.flatten(0, 1))
            packed = policy.logits(hidden).view(alone.shape)
        gaps = _gaps(policy, packed, alone)
        for where, gap in zip(("first", "last"), gaps, strict=True):
            if gap:
                raise NotPacked(
                    f"packed sequences at the {where} positions have other logprobs than each alone, {gap}"
                )
        with _uncertain():
            policy.windows = read_windows(policy, ids[:1], max_length)
    except NotPacked as reason:
        policy.windows = {}
        return str(reason)
    return ""


def _prove_rows(policy: Policy, max_length: int | None) -> None:
    """Raises ModelError unless sequences in rows have the logprobs of each alone."""
    context = getattr(policy.hf.config.get_text_config(), "max_position_embeddings", None)
    longest = min(_LONGEST_ROW, max_length or context or _LONGEST_ROW)
    lengths = [min(9, longest), -(-longest // 2), longest] * 2
    ids = _tokens(policy, len(lengths), longest)
    sequences = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    reason = ""
    with short_windows(policy, _WINDOW):
        with _refusing(policy), computing_by(policy, "eager"):
            alone = [_own_logits(policy, sequence[None])[0] for sequence in sequences]
        for name in ("sdpa", "eager"):
            try:
                policy.attention = name
                whole = torch.cat(sequences)[None]
                hidden = policy.hidden(whole, whole, PackedAttention(lengths))[0]
                _fit_logits(policy, hidden, torch.cat(alone))
                found = policy.logits(hidden).split(lengths)
            except (ImportError, *FORWARD_ERRORS) as error:  # the family does not have it
                reason = f"{type(error).__name__}: {first_line(error)}"
                continue
            gaps = [_gap(policy, *pair) for pair in zip(found, alone, strict=True)]
            if sum(gap != "" for gap in gaps) <= _has_experts(policy):  # rounding may choose another expert
                return
            worst = next(gap for gap in gaps if gap)
            reason = (
                f"sequences side by side have other logprobs than each alone in HF's own forward, {worst}"
            )
    raise ModelError(
        f"{_name(policy)} can be computed neither packed ({policy.why_rows}) nor in rows ({reason}); "
        f"{NOT_YET}"
    )


def _prove_images(policy: Policy, shape: ImageShape) -> None:
    """Raises ModelError unless an image within a sequence gives the logprobs of HF's own forward."""
    vision = policy.hf.config.vision_config
    tile = torch.randn(1, 3, *[vision.image_size] * 2, generator=torch.Generator().manual_seed(0))
    tile = tile.to(policy.device)
    num_image = (vision.image_size // (shape.patch_size * shape.scale_factor)) ** 2
    text = _tokens(policy, 2, _LENGTH)
    text[text == shape.token_id] = (shape.token_id + 1) % policy.vocab_size
    sequence = torch.cat([text[0], text.new_full((num_image,), shape.token_id), text[1]])
    places = torch.arange(_LENGTH, _LENGTH + num_image, device=policy.device)
    with _refusing(policy):
        with computing_by(policy, "eager"):
            alone = _own_logits(policy, sequence[None], pixel_values=tile[None])[0]
        embeddings = policy.embed(sequence, ImageInputs([places], [tile]))
        positions = torch.arange(len(sequence), device=policy.device)
        plan = PackedAttention([len(sequence)])
        found = policy.logits(policy.hidden(sequence[None], positions[None], plan, embeddings)[0])
    if gap := _gap(policy, found, alone):
        raise ModelError(
            f"{_name(policy)}: a sequence with an image has other logprobs than HF's own forward, {gap}; "
            f"{NOT_YET}"
        )


def _has_experts(policy: Policy) -> bool:
    return any(re.search("expert|router|moe", name) for name, _ in policy.hf.named_modules())


def _name(policy: Policy) -> str:
    return type(policy.hf).__name__


def _tokens(policy: Policy, num_rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, policy.vocab_size, (num_rows, length), generator=generator).to(policy.device)


def _alone_at(policy: Policy, ids: Tensor, positions: Tensor) -> Tensor:
    """Computes logits by HF's forward, each sequence in its own row; near and far ones apart."""
    logits, buffers = [], []
    with computing_by(policy, "eager"):
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            logits.append(_own_logits(policy, ids[rows], position_ids=positions[rows]))
            buffers.append({name: buffer.clone() for name, buffer in policy.hf.named_buffers()})
    for name, buffer in buffers[0].items():
        if not torch.equal(buffer, buffers[1][name]):
            raise NotPacked(f"{name} depends on the length of the row")
    return torch.stack(logits, dim=1).flatten(0, 1)


class _NotFinite(ModelError):
    pass


def _own_logits(policy: Policy, ids: Tensor, **options: Any) -> Tensor:
    """Computes the logits of the family's own forward; raises ModelError if they are not finite."""
    logits: Tensor = policy.hf(input_ids=ids, **without_cache(policy.hf), **options).logits
    if not bool(logits.isfinite().all()):
        raise _NotFinite(
            f"{_name(policy)}: logits of HF's own forward are not finite, so its weights hold NaN, "
            "infinities or huge numbers; start from an earlier checkpoint, or from other weights"
        )
    return logits


_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings that bound logits."""

_FACTORS = (
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_scaling",
    "logits_mup_width_multiplier",
)
"""Settings that logits are multiplied with, or divided by, depending on the family."""


def _fit_logits(policy: Policy, hidden: Tensor, logits: Tensor) -> None:
    """Chooses the factor and the cap by which the head gives these logits; the proof says if one is right."""
    config = policy.hf.config.get_text_config()
    cap = next((cap for name in _CAPS if (cap := getattr(config, name, None))), None)
    named = [value for name in _FACTORS if isinstance(value := getattr(config, name, None), float | int)]
    factors = [1.0, *(factor for value in named if value for factor in (float(value), 1 / value))]
    off = {}
    for factor in factors:
        policy.logit_factor, policy.logit_softcap = factor, None if cap is None else float(cap)
        off[factor] = float((policy.logits(hidden).float() - logits.float()).abs().max())
    policy.logit_factor = min(off, key=lambda factor: off[factor])


def _gaps(policy: Policy, found: Tensor, alone: Tensor) -> list[str]:
    """Compares sequences at near and at far positions; of two at each, the better one counts.

    Rounding may send a token to another expert.
    """
    gaps = [_gap(policy, *pair) for pair in zip(found, alone, strict=True)]
    return ["" if "" in gaps[start::2] else gaps[start] for start in range(2)]


def _gap(policy: Policy, found: Tensor, alone: Tensor) -> str:
    """Describes by how much logprobs differ; "" if rounding explains it."""
    scale = max(1.0, float(alone.abs().max()))
    limit = rounding_limit(len(policy.layers), scale)
    gap = float((found.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().max())
    return "" if gap <= limit else f"by up to {gap:.2g} nats where rounding explains {limit:.1g}"


def rounding_limit(num_layers: int, scale: float) -> float:
    """Returns the difference of logprobs, in nats, that rounding explains; `scale`: the largest logit."""
    return _ROUNDINGS * float(torch.finfo(torch.float32).eps) * num_layers * scale


FORWARD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, NotImplementedError)
"""Errors of a forward with another interface than expected."""


@contextmanager
def _uncertain() -> Iterator[None]:
    """Context manager: turns errors of a forward that takes no packed sequences into NotPacked."""
    try:
        yield
    except _NotFinite:
        raise
    except ModelError as error:
        raise NotPacked(str(error)) from error
    except FORWARD_ERRORS as error:
        raise NotPacked(
            f"its forward takes no packed sequences ({type(error).__name__}: {first_line(error)})"
        ) from error


@contextmanager
def _refusing(policy: Policy) -> Iterator[None]:
    """Context manager: turns errors of a forward with another interface than expected into a ModelError."""
    try:
        yield
    except FORWARD_ERRORS as error:
        raise ModelError(
            f"{_name(policy)} can be computed neither packed ({policy.why_rows}) nor in rows "
            f"({type(error).__name__}: {first_line(error)}); {NOT_YET}"
        ) from error


@contextmanager
def in_float32(policy: Policy) -> Iterator[None]:
    """Context manager: converts each decoder layer, and each module outside of them, while it computes."""
    inside = {module for layer in policy.layers for module in layer.modules()}
    outside = [module for module in policy.hf.modules() if module not in inside]
    handles = [handle for layer in policy.layers for handle in _converted(layer, recurse=True)]
    handles += [handle for module in outside for handle in _converted(module, recurse=False)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _converted(module: nn.Module, *, recurse: bool) -> tuple[Any, Any]:
    kept: list[tuple[Tensor, Tensor]] = []

    def convert(*_: object) -> None:
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def restore(*_: object) -> None:
        while kept:
            tensor, own = kept.pop()
            tensor.data = own

    return module.register_forward_pre_hook(convert), module.register_forward_hook(restore, always_call=True)
