"""Loading, attention and logprobs for trainer and engine alike, so that their logprobs can be compared."""

from pellucid.model.adapter import Adapter, Adapters
from pellucid.model.attention import PackedAttention, Rule
from pellucid.model.head import TokenOutput, token_logprobs
from pellucid.model.images import ImageInputs
from pellucid.model.layout import ContextParallel, Layout, packed_layout, shared_layout
from pellucid.model.lean import hf_forward, lean_forward
from pellucid.model.load import load_policy
from pellucid.model.masks import key_shape
from pellucid.model.policy import Policy
from pellucid.model.routing import ExpertRecorder, RouterShape

__all__ = [
    "Adapter",
    "Adapters",
    "ContextParallel",
    "ExpertRecorder",
    "ImageInputs",
    "Layout",
    "PackedAttention",
    "Policy",
    "RouterShape",
    "Rule",
    "TokenOutput",
    "hf_forward",
    "key_shape",
    "lean_forward",
    "load_policy",
    "packed_layout",
    "shared_layout",
    "token_logprobs",
]
