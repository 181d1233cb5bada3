"""The built-in losses as JavaScript: the viewer's "what if" computes by the functions that train.

    python -m pellucid.loss.script > src/pellucid/viewer/assets/data/losses.js

Each of `RL_LOSSES` is traced once, with symbols for the columns of a token and for the loss's settings. Every
operation becomes a line, and the settings with their limits and defaults become sliders:

    too_high = delta > config.dppo_mask_high        const a1 = t.delta > p.dppo_mask_high;

The page computes trainable tokens alone, so `loss_mask` is true, and operations on it are simplified away.
"""

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from pydantic.fields import FieldInfo
from torch import Tensor, fx

from pellucid.data.schema import COLUMNS
from pellucid.loss.functions import RL_LOSSES
from pellucid.loss.record import LossInputs, LossRecord, Ratios, only

_HEAD = """\
// What each loss makes of a trainable token. Written by `python -m pellucid.loss.script`.

/**
 * Columns of a token by name, NaN where there is none; `sequence_log_ratio` is the mean over its sequence.
 * @typedef {Record<string, number>} LossToken
 * @typedef {{key: string, low: number, high: number, step: number, usual: number}} Parameter
 * @typedef {{loss: number, masked: boolean, high: boolean, low: boolean}} Decision
 * @typedef {{title: string, formula: string, masks: boolean, reduction: string, parameters: Parameter[],
 *   decide: (p: Record<string, number>, t: LossToken) => Decision}} Loss
 */

"""

_READ = tuple(name for name, column in COLUMNS.items() if column.read_by == "loss")
_COLUMNS = {
    **{name: f"t.{name}" for name in (*_READ, *(each.name for each in fields(Ratios)))},
    "trainer_logprobs": "t.trainer_logprobs",
    "sequence_log_ratio": "t.sequence_log_ratio",
    "loss_mask": "true",
}
"""The inputs of a loss in JavaScript."""

_NAMED = {each.name for each in fields(LossInputs)}

_SIGNS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.gt: ">",
    operator.lt: "<",
    operator.and_: "&&",
    operator.or_: "||",
}


_UNARY = {
    operator.invert: "!{0}",
    operator.neg: "-{0}",
    "exp": "Math.exp({0})",
    "square": "{0} * {0}",
    "isnan": "Number.isNaN({0})",
    "detach": "{0}",
}


def script() -> str:
    """Writes the whole JavaScript module."""
    losses = "".join(_loss(name, function) for name, function in RL_LOSSES.items())
    read = [name for name in _COLUMNS if f"t.{name}" in losses and name != "sequence_log_ratio"]
    values = "".join(f"  {name}: columns.{name}?.[i] ?? NaN,\n" for name in read)
    return f"""{_HEAD}/** Columns that the losses read. */
export const LOSS_COLUMNS = {json.dumps(read)};

/** @param {{Record<string, any>}} columns @param {{number}} i @param {{number}} mean @return {{LossToken}} */
export const tokenAt = (columns, i, mean) => ({{
{values}  sequence_log_ratio: mean,
}});

/** @type {{Record<string, Loss>}} */
export const LOSSES = {{
{losses}}};
"""


def _loss(name: str, function: Callable[..., LossRecord]) -> str:
    settings = function.__annotations__["config"].model_fields
    names = sorted(settings.keys() - {"type", "reduction"}, key=lambda name: (name == "kl_tau", name))
    chosen = {name: settings[name] for name in names}
    lines, (loss, *masks) = _lines(_trace(function, chosen))
    title, _, formula = " ".join((function.__doc__ or "").split()).rstrip(".").partition(": ")
    facts = {
        "title": title,
        "formula": formula,
        "masks": masks[0] is not None,
        "reduction": settings["reduction"].default,
    }
    masked, high, low = (mask or "false" for mask in masks)
    return "\n".join(
        [
            f"  {name}: {{",
            *(f"    {key}: {json.dumps(value, ensure_ascii=False)}," for key, value in facts.items()),
            "    parameters: [",
            *(f"      {json.dumps(_slider(key, field))}," for key, field in chosen.items()),
            "    ],",
            "    decide(p, t) {",
            *(f"      {line}" for line in lines),
            f"      return {{ loss: {loss}, masked: {masked}, high: {high}, low: {low} }};",
            "    },",
            "  },\n",
        ]
    )


def _slider(key: str, field: FieldInfo) -> dict[str, Any]:
    """Makes a slider from a setting's lower limit to five times its default, or to its upper limit."""
    limits = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "le") if hasattr(each, name)
    }
    low = limits.get("ge", 0)
    high = min(low + (5 * (field.default - low) or 1), limits.get("le", math.inf))
    step = float(f"{(high - low) / 200:.3g}")
    return {"key": key, "low": low, "high": float(f"{high:.3g}"), "step": step, "usual": field.default}


def _trace(function: Callable[..., LossRecord], settings: Mapping[str, FieldInfo]) -> fx.Graph:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    symbols: dict[str, Any] = {
        name: fx.Proxy(graph.placeholder(name), tracer) for name in (*_COLUMNS, *settings)
    }

    class SymbolicInputs(LossInputs):
        """Inputs of a loss whose ℓ, and its mean over a sequence, are columns of the page."""

        def log_ratio(self, where: Tensor | None = None) -> Tensor:
            return only(self.loss_mask if where is None else where, self.ratios.log_importance_ratio)

        def mean_per_sequence(self, values: Tensor) -> Tensor:
            assert values is self.ratios.log_importance_ratio
            mean: Tensor = symbols["sequence_log_ratio"]
            return mean

    inputs = SymbolicInputs(
        trainer_logprobs=symbols["trainer_logprobs"],
        inference_logprobs=symbols["inference_logprobs"],
        advantages=symbols["advantages"],
        loss_mask=symbols["loss_mask"],
        teacher_logprobs=symbols["teacher_logprobs"],
        ratios=Ratios(**{each.name: symbols[each.name] for each in fields(Ratios)}),
        lengths=(),
        columns={name: symbols[name] for name in _READ if name not in _NAMED},
    )
    record: Any = function(inputs, type("Settings", (), {name: symbols[name] for name in settings}))
    columns = (record.token_loss, record.is_masked, record.is_masked_high, record.is_masked_low)
    graph.output(tuple(None if column is None else column.node for column in columns))
    graph.eliminate_dead_code()
    return graph


def _lines(graph: fx.Graph) -> tuple[list[str], list[str | None]]:
    """Writes one constant per operation; also returns the names of the loss and its masks, if any."""
    constants: dict[str, str] = {}
    known: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = _COLUMNS.get(node.name, f"p.{node.name}")
        elif node.op != "output":
            operands, options = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            expression = _operation(node.target, operands, options)
            is_new = expression not in ("false", *known.values())
            known[node] = constants.setdefault(expression, f"a{len(constants) + 1}") if is_new else expression
    (columns,) = graph.output_node().args
    lines = [f"const {name} = {expression};" for expression, name in constants.items()]
    return lines, [None if column is None else known[column] for column in columns]


def _operation(target: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Writes an operation of torch in JavaScript. If a new loss needs another operation, add it here."""
    first, *rest = operands
    match target:
        case operator.and_ if "true" in operands:
            return str(rest[0] if first == "true" else first)
        case operator.invert if first == "true":
            return "false"
        case "masked_fill":
            return str(first) if rest[0] == "false" else f"{rest[0]} ? {rest[1]} : {first}"
        case torch.where:
            return f"{first} ? {rest[0]} : {rest[1]}"
        case "clamp":
            low, high = (*rest, None, None)[:2]
            low, high = options.get("min", low), options.get("max", high)
            at_least = first if low is None else f"Math.max({low}, {first})"
            return at_least if high is None else f"Math.min({high}, {at_least})"
    if target in _SIGNS:
        return f"{first} {_SIGNS[target]} {rest[0]}"
    if target in _UNARY:
        return _UNARY[target].format(first)
    raise NotImplementedError(f"{target}: say in pellucid.loss.script what that is in JavaScript")


if __name__ == "__main__":
    print(script(), end="")
