"""The types that travel from the rollout to the gradient: samples, tables of tokens, rollouts."""

from pellucid.data.conversation import RoleSpan
from pellucid.data.experts import RecordedExperts, join_experts
from pellucid.data.list_payload import read_list_payload
from pellucid.data.packed import PackedArray
from pellucid.data.rollout import NOT_OURS, Completion, Example, Rollout, Turn
from pellucid.data.sample import TrainingSample
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
    "join_experts",
    "read_list_payload",
]
