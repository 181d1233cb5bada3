"""Every field of a token-export record, declared once, in the order in which it is written.

Writers, readers, views and docs loop over `FIELDS` and never list columns on their own.
"""

from dataclasses import dataclass

import numpy as np

SCHEMA_VERSION = 1

NAMES = ("env_name", "training_mode")
"""Fields that are text in every trainer's export: parts of a summary are distinguished by them."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    what: str
    """Meaning and formula, as the docs have them."""

    dtype: type
    """numpy scalar type of the values; `str` for text, `object` for what is neither."""

    per_token: bool = False
    """One value per token; otherwise one per sequence."""

    base: bool = False
    """Whether other trainers export the field, too, and existing tools read it."""

    derivable: bool = False
    """Follows from other fields (`derive.py`): readers fill it in where a file leaves it out."""


def _sequence(name: str, what: str, dtype: type = str, *, base: bool = False) -> Field:
    return Field(name, what, dtype, base=base)


def _token(
    name: str, what: str, dtype: type = np.float32, *, base: bool = False, derivable: bool = False
) -> Field:
    return Field(name, what, dtype, per_token=True, base=base, derivable=derivable)


FIELDS = (
    _sequence("schema_version", "version of this schema", np.int64, base=True),
    _sequence("step", "optimizer step, from 0", np.int64, base=True),
    _sequence("rank", "data rank that trained the sequence", np.int64, base=True),
    _sequence("micro_step", "micro batch within the step", np.int64, base=True),
    _sequence("micro_sequence_idx", "sequence within the micro batch", np.int64, base=True),
    _sequence("export_sequence_idx", "sequence within the file's step", np.int64, base=True),
    _sequence("env_name", "environment", base=True),
    _sequence("training_mode", "rl, opd or sft", base=True),
    _token("token_ids", "token ids", np.uint32, base=True),
    _token("position_ids", "position in the sequence", np.int32, base=True, derivable=True),
    _token("loss_mask", "trainable", np.bool_, base=True),
    _token("advantages", "A", base=True),
    _token("rewards", "the rollout's reward; null where it has none", base=True, derivable=True),
    _token("inference_logprobs", "log μ, 0 where the token was not sampled", base=True),
    _token("trainer_logprobs", "log π; log(1/V) for the first token", base=True),
    _token("entropy", "entropy of the trainer's distribution; log V for the first token", base=True),
    _token("mismatch_kl", "r − ℓ − 1", base=True, derivable=True),
    _token("log_importance_ratio", "ℓ = log π − log μ", base=True, derivable=True),
    _token("importance_ratio", "r = exp ℓ", base=True, derivable=True),
    _token("prob_delta", "π − μ", base=True, derivable=True),
    _token("is_masked", "trainable, but outside the trust region", np.bool_, base=True),
    _token("is_masked_high", "masked with A > 0: the probability rose too far", np.bool_, base=True),
    _token("is_masked_low", "masked with A < 0: the probability fell too far", np.bool_, base=True),
    _token("token_loss", "this token's loss; the sum over the step ÷ denominator is the logged loss"),
    _sequence("denominator", "trainable tokens of the step, at least 1", np.int64),
    _token("sampled", "sampled by the policy (not prompt, not tool)", np.bool_),
    _token("temperatures", "sampling temperature"),
    _token("teacher_logprobs", "log teacher; null without a teacher"),
    _token("policy_versions", "weights that sampled the token; −1 where it was not sampled", np.int32),
    _sequence("role_spans", "chat roles as [role, start, stop] in tokens", object),
    _sequence("example_id", "example of the environment"),
    _sequence("group_id", "group of the rollout"),
    _sequence("rollout_id", "rollout"),
    _sequence("sample_id", "sample within the rollout"),
    _sequence("run_id", "run"),
    _sequence("reward", "the rollout's reward; null where it has none (sft)", np.float32),
    _sequence("advantage", "the sample's advantage; null where it is one per token", np.float32),
    _sequence("stop_reason", "why sampling ended: stop, length or abort"),
    _sequence("precision", "what the trainer computed log π in: float32, bfloat16 or float16"),
)

BY_NAME = {field.name: field for field in FIELDS}
ESSENTIAL = tuple(field for field in FIELDS if not field.derivable)

KEY = ("step", "rank", "export_sequence_idx")
"""Fields that identify a record, and by which records are ordered."""
