"""A second implementation of everything between a rollout and the updated weights, to hold the first one to.

    conversation.py   messages -> prompts; turns -> samples, advantages, batches, truncation
    losses.py         logprobs -> token losses, their derivatives, masks; weights and denominator of a step
    training.py       token ids -> logprobs -> gradient -> clipping -> AdamW -> new weights

It is written from the documentation (losses, denominator, advantages, staleness) and the papers behind it,
in float64, for clarity and not for speed: one sequence at a time, the derivative of every loss by hand,
Hugging Face's own forward for the model. It imports nothing of pellucid, which a test asserts: a fault in the
trainer is not in here as well, unless it was made twice.
"""

from pellucid.checks.oracle.conversation import (
    Conversation,
    FinishedGroup,
    Sampled,
    advantages_of,
    expected_batches,
    expected_samples,
    off_policy_levels,
    prompt_ids_of,
    response_ids_of,
    response_length_of,
    truncated,
)
from pellucid.checks.oracle.losses import (
    TokenLosses,
    loss_weights_of,
    ratios_of,
    token_losses,
)
from pellucid.checks.oracle.training import (
    AdamWState,
    ReferenceModel,
    ReferenceSequence,
    ReferenceStep,
    adamw_step,
    clip_factor,
    learning_rate,
)

__all__ = [
    "AdamWState",
    "Conversation",
    "FinishedGroup",
    "ReferenceModel",
    "ReferenceSequence",
    "ReferenceStep",
    "Sampled",
    "TokenLosses",
    "adamw_step",
    "advantages_of",
    "clip_factor",
    "expected_batches",
    "expected_samples",
    "learning_rate",
    "loss_weights_of",
    "off_policy_levels",
    "prompt_ids_of",
    "ratios_of",
    "response_ids_of",
    "response_length_of",
    "token_losses",
    "truncated",
]
