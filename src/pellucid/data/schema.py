"""Declares every column of a batch and every field of an export once, in the order of an export.

Samples, rules, wire, tensors, loss inputs, export, reader, summaries, the viewer (Python and page) and the
tables of the docs are made from these lines. So a new column costs its line, its producer and its consumer:
docs/architecture.md has an example.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


class Axis(StrEnum):
    """Axis of a column: one entry per token, per sampled token, or per sequence."""

    TOKENS = "tokens"
    SAMPLED = "sampled"
    SEQUENCES = "sequences"


class Encoding(StrEnum):
    """Encoding of a sequence's values as bytes."""

    RAW = "raw"
    """Values one after the other."""

    SPANS = "spans"
    """Start and length of every run of True, for masks; bits where those are smaller."""

    RUNS = "runs"
    """Value and length of every run of equal values; raw where that is smaller."""


class TrainingMode(StrEnum):
    RL = "rl"
    OPD = "opd"
    SFT = "sft"


RoleSpans = list[tuple[str, int, int]]
"""(role, start, stop) of each block of a sequence, in tokens."""


@dataclass(frozen=True, slots=True)
class Shade:
    """How the viewer colours, orders and bins tokens by a column, and how summaries count it."""

    key: str
    """Name in filters and addresses."""

    scale: Literal["log", "sequential", "diverging"]
    about: str
    shortcut: int | None = None
    """Number key that colours tokens by it."""

    of: Literal["value", "negative", "age"] = "value"
    """The value, its negative, or the number of steps since a policy version."""

    label: str = ""
    formula: str = ""
    """Label and formula where they differ from the column's."""

    summarised: bool = True
    """Whether summaries of an export have its distribution."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    meaning: str
    """Meaning and formula, for the docs."""

    dtype: Any = np.float32
    """Type of a value: a numpy scalar type, `str`, `bytes` or `RoleSpans`."""

    fill: Any = None
    """Value of padding, of tokens outside a sampled-only column, and of sequences that lack the column."""

    stored: Axis = Axis.TOKENS
    encoding: Encoding = Encoding.RAW
    in_batch: bool = True
    """Whether samples carry it; otherwise the trainer makes it for the export."""

    required: bool = False
    """Whether every sample has it."""

    stand_in: str | None = None
    """Per-sequence column that gives every token its value where this one is absent."""

    shares_prompts: bool = False
    """Whether members of a group have equal values on their common prompt, which are then sent once."""

    dims: tuple[str, ...] = ()
    """Names of the dimensions of an entry; empty for a single number."""

    narrow: type | None = None
    """Smaller dtype that is used if every value fits."""

    read_by: Literal["", "forward", "loss"] = ""
    """Who reads it as a tensor. A loss sees `fill` where a token is not trainable."""

    exported: bool = True
    base: bool = False
    """Whether other trainers export it, too, and existing tools read it."""

    derivable: bool = False
    """Whether it follows from other fields, so that readers fill it in where a file leaves it out."""

    few_values: bool = False
    """Whether the tokens of an export have few distinct values: Parquet stores it as a dictionary."""

    label: str = ""
    """Name beside a token's value; empty: not shown there."""

    formula: str = ""
    optional: bool = False
    """Whether runs commonly lack it: the viewer says nothing where it is absent."""

    needs_sampled: bool = False
    """Whether it means nothing for tokens that were not sampled."""

    key: str = ""
    """Name in filters, where it is not the column's."""

    shade: Shade | None = None

    @property
    def per_token(self) -> bool:
        return self.stored is not Axis.SEQUENCES

    @property
    def is_number(self) -> bool:
        return isinstance(self.dtype, type) and issubclass(self.dtype, np.generic)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of an array of values."""
        return np.dtype(self.dtype if self.is_number else object)

    def filled(self, size: int, dims: tuple[int, ...] = ()) -> NDArray[Any]:
        """Returns an array of `size` entries that all are the fill."""
        array: NDArray[Any] = np.empty((size, *dims), self.array_dtype)
        array.fill(self.fill)
        return array


def _mask(name: str, meaning: str, **options: Any) -> Column:
    return Column(name, meaning, np.bool_, **options)


def _text(name: str, meaning: str, fill: str = "", **options: Any) -> Column:
    return Column(name, meaning, str, fill, Axis.SEQUENCES, **options)


def _count(name: str, meaning: str, *, base: bool = True) -> Column:
    return Column(name, meaning, np.int64, None, Axis.SEQUENCES, in_batch=False, base=base)


def _ratio(name: str, meaning: str, *, formula: str = "", **options: Any) -> Column:
    options |= {"in_batch": False, "base": True, "derivable": True, "needs_sampled": True}
    return Column(name, meaning, formula=formula or meaning, **options)


# fmt: off
_DECLARED = (
    _count("schema_version", "version of this schema"),
    _count("step", "optimizer step, from 0"),
    _count("rank", "data rank that trained the sequence"),
    _count("micro_step", "micro batch within the step"),
    _count("micro_sequence_idx", "sequence within the micro batch"),
    _count("export_sequence_idx", "sequence within the file's step"),
    _text("env_name", "environment", required=True, base=True),
    _text("training_mode", "rl, opd or sft", TrainingMode.RL.value, base=True),
    Column("token_ids", "token ids", np.uint32, 0,
        required=True, shares_prompts=True, read_by="forward", base=True, key="id"),
    Column("position_ids", "position in the sequence", np.int32, in_batch=False, base=True, derivable=True),
    _mask("loss_mask", "trainable",
        fill=False, encoding=Encoding.SPANS, required=True, read_by="forward", base=True, key="trainable"),
    Column("advantages", "A", np.float32, 0.0, Axis.SAMPLED,
        stand_in="advantage", read_by="loss", base=True, few_values=True, label="advantage", formula="A",
        shade=Shade("adv", "diverging", "Which way, and how hard, the loss pushes", 4)),
    Column("rewards", "the rollout's reward; null where it has none",
        in_batch=False, stand_in="reward", base=True, derivable=True, few_values=True,
        label="reward", formula="R",
        shade=Shade("reward", "diverging", "How well the whole rollout did", 5, summarised=False)),
    Column("inference_logprobs", "log μ, 0 where the token was not sampled", np.float32, 0.0, Axis.SAMPLED,
        required=True, read_by="loss", base=True,
        label="inference logprob", formula="log μ", needs_sampled=True),
    Column("trainer_logprobs", "log π; log(1/V) for the first token", np.float32, 0.0,
        in_batch=False, base=True, label="trainer logprob", formula="log π", key="logp",
        shade=Shade("surprise", "sequential", "How unlikely the trainer finds the token", 3,
            of="negative", label="Surprise", formula="−log π")),
    Column("entropy", "entropy of the trainer's distribution; log V for the first token",
        in_batch=False, base=True, label="entropy", formula="−Σ p log p",
        shade=Shade("entropy", "sequential", "How undecided the trainer is at this position", 2)),
    _ratio("mismatch_kl", "r − ℓ − 1",
        label="mismatch KL",
        shade=Shade("kl", "log", "How far trainer and inference disagree on this token", 1)),
    _ratio("log_importance_ratio", "ℓ = log π − log μ",
        label="log ratio",
        shade=Shade("logratio", "diverging",
            "Above 0: the trainer finds the token more likely than the engine did", 6)),
    _ratio("importance_ratio", "r = exp ℓ", label="ratio", shade=Shade("ratio", "log", "π ÷ μ")),
    _ratio("prob_delta", "π − μ",
        label="prob. delta", formula="Δ = π − μ",
        shade=Shade("delta", "diverging", "What the trust region of DPPO looks at", 7)),
    _mask("is_masked", "trainable, but outside the trust region", in_batch=False, base=True, key="masked"),
    _mask("is_masked_high", "masked with A > 0: the probability rose too far",
        in_batch=False, base=True, key="high"),
    _mask("is_masked_low", "masked with A < 0: the probability fell too far",
        in_batch=False, base=True, key="low"),
    Column("token_loss", "this token's loss; the sum over the step ÷ denominator is the logged loss",
        in_batch=False, label="token loss", formula="L",
        shade=Shade("loss", "diverging", "The sum over the step ÷ denominator is the logged loss", 8)),
    _count("denominator", "trainable tokens of the step, at least 1", base=False),
    _mask("sampled", "sampled by the policy (not prompt, not tool)",
        fill=False, encoding=Encoding.SPANS, required=True),
    Column("temperatures", "sampling temperature", np.float32, 1.0, Axis.SAMPLED,
        stand_in="temperature", read_by="forward", few_values=True,
        label="temperature", formula="τ", optional=True),
    Column("teacher_logprobs", "log teacher; null without a teacher", np.float32, np.nan,
        shares_prompts=True, read_by="loss", label="teacher logprob", formula="log teacher", optional=True),
    Column("policy_versions", "weights that sampled the token; −1 where it was not sampled", np.int32, -1,
        Axis.SAMPLED, Encoding.RUNS, required=True, few_values=True,
        label="policy version", formula="v", needs_sampled=True, key="version",
        shade=Shade("stale", "sequential", "Steps between the weights that sampled the token and this one", 9,
            of="age", label="Staleness", formula="n − v", summarised=False)),
    Column("routed_experts", "experts that computed the token", np.int16, -1,
        shares_prompts=True, dims=("layers", "top_k"), narrow=np.uint8, read_by="forward", exported=False),
    Column("expert_weights", "weights that the engine gave the token's experts; null where it recorded none",
        np.float32, np.nan,
        shares_prompts=True, dims=("layers", "top_k"), read_by="forward", exported=False),
    Column("mm_token_type_ids", "modality of the token: 0 is text, 1 is a part of an image", np.uint8, 0,
        encoding=Encoding.RUNS,
        few_values=True, label="modality", formula="mm", optional=True, key="modality"),
    Column("role_spans", "chat roles as [role, start, stop] in tokens", RoleSpans, (), Axis.SEQUENCES),
    _text("example_id", "example of the environment"),
    _text("group_id", "group of the rollout"),
    _text("rollout_id", "rollout"),
    _text("sample_id", "sample within the rollout"),
    _text("run_id", "run"),
    Column("reward", "the rollout's reward; null where it has none (sft)", np.float32, np.nan,
        Axis.SEQUENCES),
    Column("advantage", "the sample's advantage; null where it is one per token", np.float32, 0.0,
        Axis.SEQUENCES),
    Column("temperature", "sampling temperature of all its tokens", np.float32, 1.0, Axis.SEQUENCES,
        exported=False),
    _text("stop_reason", "why sampling ended: stop, length or abort"),
    _text("precision", "what the trainer computed log π in: float32, bfloat16 or float16", in_batch=False),
    Column("mm_tensors", "multimodal tensors of the sequence", bytes, b"", Axis.SEQUENCES, exported=False),
)
# fmt: on

SCHEMA = {column.name: column for column in _DECLARED}

_WIRE_ORDER = (
    *("token_ids", "loss_mask", "sampled", "teacher_logprobs", "routed_experts", "mm_token_type_ids"),
    *("inference_logprobs", "policy_versions", "temperatures", "advantages"),
    *("temperature", "advantage", "reward", "training_mode", "env_name", "example_id", "group_id"),
    *("rollout_id", "sample_id", "run_id", "stop_reason", "role_spans", "mm_tensors"),
)
"""Order of the sections in version 2 of the wire format; newer columns follow in the order of the schema."""


def _carried() -> Iterable[str]:
    return dict.fromkeys([*_WIRE_ORDER, *(each.name for each in _DECLARED if each.in_batch)])


COLUMNS = {name: SCHEMA[name] for name in _carried()}
"""Columns of a batch, in the order of the wire."""

FIELDS = tuple(each for each in _DECLARED if each.exported)
"""Fields of an export's record, in the order in which they are written."""

FIELD_BY_NAME = {each.name: each for each in FIELDS}

TOKEN_FIELDS = tuple(each for each in FIELDS if each.per_token)

SUMMARISED: dict[str, Shade] = {
    each.name: each.shade
    for each in sorted(TOKEN_FIELDS, key=lambda each: each.in_batch)
    if each.shade is not None and each.shade.summarised
}
"""Fields whose distribution is in the summary of an export: those of the trainer first."""
