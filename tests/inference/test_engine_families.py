"""The engine's logprobs with each mechanism: those of transformers' own forward of each sequence alone."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import quiet_transformers
from pellucid.errors import ModelError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.methods import Method, choose_method
from pellucid.inference.slots import Request, Scoring, run_to_end
from pellucid.model import load_policy, token_logprobs
from tolerance import near_logprobs

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import families

ENV = Account("run", "env")

PACKED = {
    "llama": "attention",
    "mistral": "windows",
    "gemma2": "windows and full layers, soft caps of scores and logits",
    "gemma3_text": "windows and full layers with other positions",
    "gpt_oss": "windows and full layers with sinks, experts",
    "cohere2": "windows with positions, full layers without, scaled logits",
    "deepseek_v3": "latent attention, experts",
    "qwen3_moe": "experts",
}

JOINED = {
    "qwen3_next": "gated delta nets, attention, experts",
    "qwen3_5_text": "gated delta nets, attention",
    "jamba": "state spaces, attention, experts",
    "lfm2": "convolutions, attention",
    "falcon_h1": "state spaces beside attention",
    "mamba": "state spaces alone",
    "bloom": "attention code of its own",
}

MIXED = {"gemma4_text": "keys of two widths: it trains packed and samples in rows"}

APART = {
    "minimax": "lightning attention in a cache of its own",
    "rwkv": "states whose rows cannot be told apart",
    "recurrent_gemma": "states outside of the cache",
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    quiet_transformers()


@torch.no_grad()
def alone(model, prompt, token_ids, temperature) -> torch.Tensor:
    """Logprobs of the completion by the model's own forward of the sequence."""
    ids = torch.tensor([*prompt, *token_ids])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = token_logprobs(logits, torch.full((len(logits),), temperature))
    return logprobs.gather(-1, ids[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("name", ["minimax", "rwkv", "recurrent_gemma", "lfm2"])
def test_a_late_member_takes_one_of_two_prompts_computed_together(name, tmp_path) -> None:
    families.make(name).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path)), max_length=families.CONTEXT)
    ids, late = families.sequences()[0].tolist(), []
    prompts = [ids[:12], ids[12:24]]
    engine = Engine(policy, num_slots=4, max_length=80)
    for prompt, max_tokens in zip(prompts, (1, 12), strict=True):
        engine.submit(Request(prompt, SamplingParams(max_tokens=max_tokens, seed=0), ENV, lambda _: None))
    engine.step()
    params = SamplingParams(max_tokens=6, seed=1)
    run_to_end(engine, [Request(prompts[1], params, ENV, late.append)])
    assert engine.counts.shared_tokens == 11
    expected = alone(policy.hf, prompts[1], late[0].token_ids, 1.0)
    assert late[0].logprobs == near_logprobs(expected, policy.hf, 18)


@pytest.mark.parametrize("name", [*PACKED, *JOINED, *APART, *MIXED])
def test_logprobs_are_those_of_each_sequence_alone(name, tmp_path) -> None:
    """A group of three and ragged others, more than slots; one is abandoned, and a sequence is scored."""
    model = families.make(name)
    model.save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path)), max_length=families.CONTEXT)
    assert policy.way == ("packed" if name in PACKED or name in MIXED else "rows")
    rows = families.sequences()
    prompts = [rows[0][:25].tolist()] * 3 + [rows[1][:1].tolist(), rows[2].tolist(), rows[3].tolist()]
    finished, scored = {}, []
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
    assert policy.way == ("packed" if name in PACKED else "rows")
    for request in requests:
        engine.submit(request)
    engine.submit_scoring(Scoring(rows[1].tolist(), 0.7, scored.append))
    for _ in range(5):
        engine.step()
    engine.abandon(requests[1])
    run_to_end(engine, [])
    assert sorted(finished) == [0, 2, 3, 4, 5]
    for index, completion in finished.items():
        temperature = requests[index].params.temperature
        expected = alone(model, prompts[index], completion.token_ids, temperature)
        assert completion.logprobs == near_logprobs(expected, model, families.CONTEXT)
    expected = alone(model, rows[1][:1].tolist(), rows[1][1:].tolist(), 0.7)
    assert scored[0][1:] == near_logprobs(expected, model, families.CONTEXT)


@pytest.mark.parametrize(
    ("name", "keeps_cache", "is_batched", "joins"),
    [
        ("qwen3_next", True, True, True),
        ("mistral", True, True, True),
        ("minimax", True, True, False),
        ("rwkv", True, False, False),
        ("recurrent_gemma", False, True, False),
        ("roberta", False, True, False),
    ],
)
def test_the_fastest_method_that_is_right_is_chosen(name, keeps_cache, is_batched, joins) -> None:
    method = choose_method(rows_policy(name), 100)
    assert (method.keeps_cache, method.is_batched, method.joins) == (keeps_cache, is_batched, joins)


def rows_policy(name):
    from pellucid.model import Policy

    return Policy(families.make(name))


def test_a_cache_that_gives_other_values_is_not_used() -> None:
    """A model whose logits are off by a hundredth when it goes on from its cache."""
    policy = rows_policy("mamba")
    own = policy.hf.forward

    def leaking(input_ids, cache_params=None, use_cache=None, **options):
        goes_on = cache_params is not None and cache_params.has_previous_state(0)
        output = own(input_ids, cache_params=cache_params, use_cache=use_cache, **options)
        if goes_on:
            output.logits = output.logits + 0.01 * output.logits.roll(1, -1)
        return output

    policy.hf.forward = leaking
    method = choose_method(policy, families.CONTEXT)
    assert isinstance(method, Method) and not method.keeps_cache and method.is_batched


def test_a_least_time_step_that_no_probed_token_falls_below_counts() -> None:
    """Cached steps of transformers 5.22 leave it out, which shows for other tokens alone."""
    policy = rows_policy("nemotron_h")
    mixers = [module for module in policy.hf.modules() if hasattr(module, "dt_bias")]
    for mixer in mixers:
        torch.nn.init.constant_(mixer.dt_bias, 5.0)
    limits = [mixer.time_step_limit for mixer in mixers]
    assert mixers and not choose_method(policy, families.CONTEXT).keeps_cache
    assert [mixer.time_step_limit for mixer in mixers] == limits


def test_in_bfloat16_a_method_is_tried_in_float32_and_in_bfloat16() -> None:
    """Some families mix both dtypes by themselves, which torch refuses."""
    policy = rows_policy("qwen3_next")
    assert choose_method(policy.bfloat16(), families.CONTEXT).joins
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    with pytest.raises(ModelError, match='Mamba.* cannot sample .* try model.dtype = "float32"'):
        choose_method(rows_policy("mamba").bfloat16(), families.CONTEXT)


def test_a_model_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ModelError, match="CpmAntForCausalLM predicts a token differently once others follow"):
        choose_method(rows_policy("cpmant"), families.CONTEXT)
