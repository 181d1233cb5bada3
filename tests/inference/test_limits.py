"""Windows and other limits bind in the probe by which an engine chooses how it uses a cache."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from pellucid.inference.limits import LOWERED, Limit, binding, limits_of, lowered
from pellucid.inference.methods import choose_method
from pellucid.model import Policy

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import families


@pytest.fixture
def forgetful(monkeypatch) -> None:
    """A cache whose oldest value is off once a window is full."""
    own = DynamicSlidingWindowLayer.update

    def update(self, keys, values, *others, **options):
        keys, values = own(self, keys, values, *others, **options)
        if keys.shape[-2] >= self.sliding_window:
            values = torch.cat([values[:, :, :1] + 1, values[:, :, 1:]], dim=2)
        return keys, values

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", update)


def policy_of(family: str, **settings: object) -> Policy:
    config = families.make(family).config
    for name, value in settings.items():
        setattr(config, name, value)
    return Policy(families.make_random(config))


def test_a_cache_that_is_wrong_beyond_a_long_window_is_not_used(forgetful) -> None:
    policy = policy_of("mistral", sliding_window=4096, max_position_embeddings=8192)
    assert not choose_method(policy, 8192).keeps_cache
    assert policy.hf.config.sliding_window == 4096
    assert choose_method(policy, 4096).keeps_cache  # no sequence is longer than the window


def test_a_window_that_cannot_be_lowered_makes_the_probe_longer() -> None:
    """GPT-Neo makes the masks of its layers when the model is made."""
    policy = policy_of("gpt_neo", window_size=200, max_position_embeddings=300)
    own, lengths = policy.hf.forward, []

    def forward(input_ids, past_key_values=None, **options):
        output = own(input_ids, past_key_values=past_key_values, **options)
        if past_key_values is not None:
            lengths.append(past_key_values.get_seq_length())
            if lengths[-1] > 200:
                output.logits = output.logits.roll(1, -1)
        return output

    policy.hf.forward = forward
    assert not choose_method(policy, 300).keeps_cache
    assert max(lengths) > 200
    lengths.clear()
    assert choose_method(policy, 200).keeps_cache
    assert max(lengths) <= 200


def test_limits_are_those_of_configs_and_modules_that_sequences_may_exceed() -> None:
    config = SimpleNamespace(
        sliding_window=64, chunk_size=8, max_window_layers=28, get_text_config=lambda: config
    )
    hf = torch.nn.Linear(1, 1)
    hf.config, hf.attention_chunk_size, hf.index_topk, hf.sliding_window = config, 128, 99, None
    found = limits_of(hf, 128)
    assert found == [Limit("sliding_window", [(config, 64)]), Limit("index_topk", [(hf, 99)])]
    with pytest.raises(ZeroDivisionError), lowered(found):
        assert (config.sliding_window, hf.index_topk) == (LOWERED, LOWERED)
        1 / 0  # noqa: B018
    assert (config.sliding_window, hf.index_topk) == (64, 99)


def test_a_limit_binds_if_the_model_computes_something_else_once_it_is_lowered() -> None:
    model = SimpleNamespace(window=64, chunk_size=64, index_topk=64)
    limits = [Limit(name, [(model, 64)]) for name in vars(model)]

    def compute() -> torch.Tensor:
        if model.index_topk < 64:
            raise RuntimeError("the size of tensor a must match")
        return torch.tensor(float(model.window))

    assert binding(limits, compute, lambda one, other: bool(one != other)) == limits[:1]
    assert vars(model) == {"window": 64, "chunk_size": 64, "index_topk": 64}
