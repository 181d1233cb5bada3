"""The types that travel from the rollout to the gradient: samples, tables of tokens, rollouts."""

from pellucid.data.packed import PackedArray
from pellucid.data.rollout import (
    NOT_OURS,
    Completion,
    Example,
    RecordedExperts,
    RoleSpan,
    Rollout,
    Turn,
    TurnTrace,
    join_columns,
    join_experts,
)
from pellucid.data.sample import TrainingSample, read_list_payload
from pellucid.data.schema import COLUMNS, Axis, Column, TrainingMode
from pellucid.data.table import TokenTable

__all__ = [
    "COLUMNS",
    "NOT_OURS",
    "Axis",
    "Column",
    "Completion",
    "Example",
    "PackedArray",
    "RecordedExperts",
    "RoleSpan",
    "Rollout",
    "TokenTable",
    "TrainingMode",
    "TrainingSample",
    "Turn",
    "TurnTrace",
    "join_columns",
    "join_experts",
    "read_list_payload",
]
