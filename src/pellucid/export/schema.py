"""Every field of a token-export record, declared once, in the order in which it is written."""

from dataclasses import dataclass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    what: str
    per_token: bool = False


FIELDS = (
    Field("schema_version", "version of this schema"),
    Field("step", "optimizer step, from 0"),
    Field("rank", "data rank that trained the sequence"),
    Field("micro_step", "micro batch within the step"),
    Field("micro_sequence_idx", "sequence within the micro batch"),
    Field("export_sequence_idx", "sequence within the file's step"),
    Field("env_name", "environment"),
    Field("training_mode", "rl, opd or sft"),
    Field("token_ids", "token ids", per_token=True),
    Field("position_ids", "position in the sequence", per_token=True),
    Field("loss_mask", "trainable", per_token=True),
    Field("advantages", "A", per_token=True),
    Field("rewards", "the rollout's reward", per_token=True),
    Field("inference_logprobs", "log μ, 0 where the token was not sampled", per_token=True),
    Field("trainer_logprobs", "log π; log(1/V) for the first token", per_token=True),
    Field("entropy", "entropy of the trainer's distribution; log V for the first token", per_token=True),
    Field("mismatch_kl", "r − ℓ − 1", per_token=True),
    Field("log_importance_ratio", "ℓ = log π − log μ", per_token=True),
    Field("importance_ratio", "r = exp ℓ", per_token=True),
    Field("prob_delta", "π − μ", per_token=True),
    Field("is_masked", "trainable, but outside the trust region", per_token=True),
    Field("is_masked_high", "masked with A > 0: the probability rose too far", per_token=True),
    Field("is_masked_low", "masked with A < 0: the probability fell too far", per_token=True),
    Field(
        "token_loss",
        "this token's loss; the sum over the step ÷ denominator is the logged loss",
        per_token=True,
    ),
    Field("denominator", "trainable tokens of the step, at least 1"),
    Field("sampled", "sampled by the policy (not prompt, not tool)", per_token=True),
    Field("temperatures", "sampling temperature", per_token=True),
    Field("teacher_logprobs", "log teacher; null without a teacher", per_token=True),
    Field("policy_versions", "weights that sampled the token; −1 where it was not sampled", per_token=True),
    Field("role_spans", "chat roles as [role, start, stop] in tokens"),
    Field("example_id", "example of the environment"),
    Field("group_id", "group of the rollout"),
    Field("rollout_id", "rollout"),
    Field("sample_id", "sample within the rollout"),
    Field("run_id", "run"),
    Field("reward", "the rollout's reward"),
    Field("advantage", "the sample's advantage; null where it is one per token"),
    Field("stop_reason", "why sampling ended: stop, length or abort"),
)
