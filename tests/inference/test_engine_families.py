"""The engine's logprobs with each mechanism: those of transformers' own forward of each sequence alone."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from pellucid.data.tokenizer import quiet_transformers
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, token_logprobs
from pellucid.model.attention import ATTENTION, attention_function
from tolerance import near_logprobs

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import families

ENV = Account("run", "env")

PACKED = [
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "deepseek_v3",
    "qwen3_moe",
]
ROWS = [
    "qwen3_next",
    "qwen3_5_text",
    "jamba",
    "lfm2",
    "falcon_h1",
    "mamba",
    "minimax",
    "recurrent_gemma",
    "rwkv",
]


def made(name, way):
    from transformers import AttentionInterface

    quiet_transformers()
    policy = Policy(families.make(name))
    policy.way = way
    if way == "packed":
        AttentionInterface.register(ATTENTION, attention_function)
        policy.hf.set_attn_implementation(ATTENTION)
        config = policy.hf.config
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        if getattr(config, "sliding_window", None):
            policy.windows = {
                layer: config.sliding_window
                for layer, kind in enumerate(kinds)
                if kind == "sliding_attention"
            }
    return policy


@torch.no_grad()
def alone(policy, prompt, token_ids, temperature):
    """Logprobs of the completion by the model's own forward of the sequence."""
    ids = torch.tensor([*prompt, *token_ids])
    if policy.way == "packed":
        policy.hf.set_attn_implementation("eager")
    logits = policy.hf(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = token_logprobs(logits, torch.full((len(logits),), temperature))
    if policy.way == "packed":
        policy.hf.set_attn_implementation(ATTENTION)
    return logprobs.gather(-1, ids[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "packed") for name in PACKED), *((name, "rows") for name in ROWS)]
)
def test_logprobs_are_those_of_each_sequence_alone(name, way) -> None:
    """A group of three and ragged others, more than slots; one that is abandoned leaves no trace."""
    policy = made(name, way)
    rows = families.sequences()
    prompts = [rows[0][:25].tolist()] * 3 + [rows[1][:1].tolist(), rows[2].tolist(), rows[3].tolist()]
    finished = {}
    requests = [
        Request(
            prompt,
            SamplingParams(max_tokens=24 - 3 * index, seed=index, temperature=0.7 if index % 2 else 1.0),
            ENV,
            partial(finished.__setitem__, index),
        )
        for index, prompt in enumerate(prompts)
    ]
    engine = Engine(policy, num_slots=4, max_length=families.CONTEXT)
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.abandon(requests[1])
    run_to_end(engine, [])
    assert sorted(finished) == [0, 2, 3, 4, 5]
    worst = 0
    for index, completion in finished.items():
        asked = requests[index]
        expected = alone(policy, prompts[index], completion.token_ids, asked.params.temperature)
        n = near_logprobs(expected, policy.hf, 90)
        gap = (torch.tensor(completion.logprobs) - expected).abs().max()
        worst = max(worst, float(gap) / n.bound.max())
    print(name, "ratio of bound", worst, n.bound)
