"""The states a sampled token can end in, and the flows between the processes that count them.

    inference:     sampled  = delivered + cancelled                      (+ in_flight)
    orchestrator:  received = eval + … + rejected + sent                 (+ in_flight)
    trainer:       received = rejected + truncated + untrainable + skipped + masked + trained

Each arrow between two stages is a check: delivered = received, sent = received. Summed up, every token
that the engine sampled is in exactly one state.
"""

from enum import StrEnum


class Stage(StrEnum):
    INFERENCE = "inference"
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"


class State(StrEnum):
    """In order of precedence: the first that fits is the token's state."""

    EVAL = "eval"
    LOST = "lost"
    CANCELLED = "cancelled"
    FAILED_ROLLOUT = "failed_rollout"
    DROPPED_GROUP = "dropped_group"
    STALE = "stale"
    FILTERED = "filtered"
    ZERO_ADVANTAGE = "zero_advantage"
    REJECTED = "rejected"
    TRUNCATED = "truncated"
    UNTRAINABLE = "untrainable"
    SKIPPED = "skipped"
    MASKED = "masked"
    TRAINED = "trained"
    ROLLED_BACK = "rolled_back"
    """Skipped, trained or masked in a step that a resume discarded."""
    IN_FLIGHT = "in_flight"


MEANING = {
    State.EVAL: "sampled to evaluate, not to train",
    State.LOST: "a process died and took them along",
    State.CANCELLED: "given up while they were sampled",
    State.FAILED_ROLLOUT: "the environment raised or timed out",
    State.DROPPED_GROUP: "too little of their group was left",
    State.STALE: "sampled too many policy versions ago",
    State.FILTERED: "refused by a filter of yours",
    State.ZERO_ADVANTAGE: "an advantage of 0: nothing to learn from",
    State.REJECTED: "broke a rule of training samples",
    State.TRUNCATED: "beyond seq_len",
    State.UNTRAINABLE: "masked out by the environment, or in another branch",
    State.SKIPPED: "in a step whose loss or gradient was not finite",
    State.MASKED: "outside of the trust region",
    State.TRAINED: "their gradient is in the weights",
    State.ROLLED_BACK: "trained in a step that a resume discarded",
    State.IN_FLIGHT: "running, waiting, or on the way",
}
"""Why the tokens in a state are there, for a person."""


class Flow(StrEnum):
    """Tokens that a stage takes in, hands on or computes; never a final state."""

    SAMPLED = "sampled"
    DELIVERED = "delivered"
    RECEIVED = "received"
    HELD = "held"
    """Received by an earlier process of the orchestrator and kept for a coming batch; booked when it goes."""
    SENT = "sent"
    CONTEXT = "context"
    """Prompt and tool tokens computed by the trainer, beside the sampled ones."""
    PADDING = "padding"
    COMPUTED = "computed"
    """All tokens of the trainer's forward passes."""
    SAVED = "saved"
    """Tokens of a shared prompt that another sequence computed."""


TAKES_IN = {Stage.INFERENCE: Flow.SAMPLED, Stage.ORCHESTRATOR: Flow.RECEIVED, Stage.TRAINER: Flow.RECEIVED}
BESIDE = (Flow.CONTEXT, Flow.PADDING, Flow.COMPUTED, Flow.SAVED)
"""Beside the states; computed + saved = trained + masked + skipped + untrainable + context + padding."""

HANDS_ON = {Stage.INFERENCE: Flow.DELIVERED, Stage.ORCHESTRATOR: Flow.SENT}
