"""The engine's record of experts: what the trainer's routers choose for the very same tokens."""

import base64
import json
import random
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.data import RecordedExperts, Turn, join_experts
from pellucid.inference.client import Account, Choice, GenerateResponse, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.server import _choice
from pellucid.inference.slots import Request, Scoring, run_to_end
from pellucid.model import ExpertRecorder, load_policy, packed_layout
from pellucid.transport.weights import publish_version, weights_folder, write_version
from tolerance import logprob_bound, near, near_logprobs

ENV = Account("run", "env")


@pytest.fixture(params=["packed", "rows"])
def policy(tiny_moe, request):
    return load_policy(ModelConfig(name=str(tiny_moe)), layout=request.param)


def request(prompt, finished, index, **params):
    params = {"max_tokens": 5, "seed": index, **params}
    return Request(prompt, SamplingParams(**params), ENV, lambda done: finished.__setitem__(index, done))


def forward(policy, token_ids):
    """Experts and logprobs of a whole sequence, as one prefill computes them."""
    recorder = ExpertRecorder(policy.hf)
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        output = policy(ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)]))
    return recorder.last().numpy(), output.logprobs


def agreement(policy, prompts, finished) -> float:
    """Share of the recorded experts that a forward of the whole sequence chooses, too."""
    same = []
    for index, prompt in enumerate(prompts):
        completion = finished[index]
        token_ids = [*prompt, *completion.token_ids]
        experts = completion.routed_experts
        assert experts.shape == (len(token_ids) - 1, 2, 2) and experts.dtype == "uint8"
        expected, logprobs = forward(policy, token_ids)
        same.append((experts.array() == expected[:-1]).flatten())
        assert completion.logprobs == near_logprobs(logprobs[len(prompt) :], policy, len(token_ids))
    return float(np.concatenate(same).mean())


def test_prompts_and_completions_of_ragged_requests(policy) -> None:
    """More of them than slots, prompts of one token among them; a scoring in between leaves no trace."""
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 101) for _ in range(generator.randint(1, 40))] for _ in range(20)]
    prompts[3] = prompts[3][:1]
    finished = {}
    engine = Engine(policy, num_slots=8, max_length=120, record_experts=True)
    engine.submit_scoring(Scoring([5, 6, 7, 8], 1.0, lambda scored: None))
    run_to_end(
        engine,
        [
            request(prompt, finished, index, max_tokens=generator.randint(1, 70))
            for index, prompt in enumerate(prompts)
        ],
    )
    # One choice in a thousand may be so close that rounding decides it.
    assert agreement(policy, prompts, finished) > 0.999


def test_a_prompt_that_is_computed_once_has_the_same_experts_for_all(policy) -> None:
    """Two requests of a group start together; two come later, while the first still runs."""
    prompt, finished = list(range(5, 30)), {}
    engine = Engine(policy, num_slots=4, max_length=80, record_experts=True)
    for index in (0, 1):
        engine.submit(request(prompt, finished, index, max_tokens=40))
    for _ in range(5):
        engine.step()
    run_to_end(engine, [request(prompt, finished, index) for index in (2, 3)])
    assert engine.counts.prefill_tokens == 24 and engine.counts.shared_tokens == 72
    assert agreement(policy, [prompt] * 4, finished) > 0.999
    first, *others = (finished[index].routed_experts.array()[:24] for index in range(4))
    assert all((first == other).all() for other in others)


def test_tokens_keep_the_experts_of_the_weights_that_computed_them(policy, tiny_moe, tmp_path) -> None:
    """After a swap the running sequence goes on with its cache; a new one computes the same prompt anew."""
    prompt, finished = list(range(5, 30)), {}
    other = load_policy(ModelConfig(name=str(tiny_moe)))
    with torch.no_grad():
        for name, weight in other.hf.named_parameters():
            if "mlp.gate." in name:
                weight.neg_()
    publish_version(tmp_path, 1, partial(write_version, other.hf), keep=2)
    before, _ = forward(policy, prompt)
    after, _ = forward(other, prompt)
    assert (before[:24] != after[:24]).mean() > 0.5
    engine = Engine(policy, num_slots=4, max_length=80, record_experts=True)
    engine.submit(request(prompt, finished, 0, max_tokens=8))
    engine.step()
    engine.update_weights(1, weights_folder(tmp_path, 1))
    run_to_end(engine, [request(prompt, finished, 1)])
    assert finished[0].policy_versions == [(0, 1), (1, 7)]
    assert (finished[0].routed_experts.array()[:25] == before).all()
    assert (finished[1].routed_experts.array()[:25] == after).all()


def test_a_request_that_is_cut_short_has_the_experts_of_what_it_computed(policy) -> None:
    finished = {}
    engine = Engine(policy, num_slots=1, max_length=80, record_experts=True)
    running = request([5, 6, 7], finished, 0, max_tokens=40)
    running.request_id = "running"
    waiting = request([5, 6, 7], finished, 1)
    waiting.request_id = "waiting"
    engine.submit(running)
    engine.submit(waiting)
    for _ in range(4):
        engine.step()
    engine.abort({"running", "waiting"})
    assert finished[0].routed_experts.shape == (3 + 4 - 1, 2, 2)
    assert finished[1].token_ids == [] and finished[1].routed_experts.shape == (0, 2, 2)


def test_nothing_is_recorded_unless_asked_for(policy) -> None:
    finished = {}
    run_to_end(Engine(policy, num_slots=1, max_length=80), [request([5, 6], finished, 0)])
    assert finished[0].routed_experts is None and finished[0].expert_weights is None
    run_to_end(
        Engine(policy, num_slots=1, max_length=80, record_experts=True), [request([5, 6], finished, 0)]
    )
    assert finished[0].routed_experts is not None and finished[0].expert_weights is None


@pytest.mark.parametrize("way", ["packed", "rows"])
def test_weights_are_those_of_a_forward_of_the_whole_sequence(tiny_moe, way) -> None:
    """Requests that share a prompt, one that comes later, and one of a single token."""
    plain, finished = {}, {}
    policy = load_policy(ModelConfig(name=str(tiny_moe)), layout=way)
    prompts = [list(range(5, 20))] * 3 + [[7]]
    for weighs, answers in ((False, plain), (True, finished)):
        engine = Engine(policy, num_slots=3, max_length=60, record_experts=True, record_expert_weights=weighs)
        run_to_end(engine, [request(prompt, answers, index) for index, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        completion = finished[index]
        assert completion.token_ids == plain[index].token_ids
        assert completion.routed_experts == plain[index].routed_experts
        token_ids = torch.tensor([*prompt, *completion.token_ids])
        recorder = ExpertRecorder(policy.hf, weights=True)
        layout = packed_layout([len(token_ids)])
        with torch.no_grad():
            policy(token_ids, torch.arange(len(token_ids)), torch.ones(len(token_ids)), layout)
        experts, weights = recorder.shape.pack(recorder.last().numpy().tobytes())
        size = len(token_ids) - 1
        assert completion.expert_weights.shape == (size, 2, 2)
        assert (completion.routed_experts.array() == experts.array()[:size]).all()
        bound = logprob_bound(policy, size)
        assert completion.expert_weights.array() == near(weights.array()[:size], within=bound)


def test_experts_travel_as_base64(policy) -> None:
    finished = {}
    engine = Engine(policy, num_slots=1, max_length=80, record_experts=True)
    run_to_end(engine, [request([5, 6], finished, 0, max_tokens=2)])
    body = msgspec.json.encode(GenerateResponse("id", [_choice(finished[0], compact=True)]))
    data, shape, dtype = json.loads(body)["choices"][0]["routed_experts"]
    assert (shape, dtype) == ([3, 2, 2], "uint8")
    assert base64.b64decode(data) == finished[0].routed_experts.data
    assert len(base64.b64decode(data)) == 12
    back = msgspec.json.decode(body, type=GenerateResponse).choices[0]
    assert back.routed_experts == finished[0].routed_experts
    plain = Choice(0, [1], "stop", [(0, 1)])
    assert b"expert" not in msgspec.json.encode(plain)


def test_weights_travel_as_base64_and_through_turns(policy) -> None:
    finished = {}
    engine = Engine(policy, num_slots=1, max_length=80, record_expert_weights=True)
    run_to_end(engine, [request([5, 6], finished, 0, max_tokens=2)])
    body = msgspec.json.encode(GenerateResponse("id", [_choice(finished[0], compact=True)]))
    assert json.loads(body)["choices"][0]["expert_weights"][1:] == [[3, 2, 2], "float32"]
    back = msgspec.json.decode(body, type=GenerateResponse).choices[0]
    assert back.expert_weights == finished[0].expert_weights
    first = Turn([5, 6], finished[0], "")
    longer = [5, 6, *finished[0].token_ids, 30]
    run_to_end(engine, [request(longer, finished, 1, max_tokens=2)])
    second = Turn(longer, finished[1], "", goes_on_from=first)
    joined = join_experts([turn.tokens.expert_weights for turn in (first, second)])
    expected = np.concatenate([finished[0].expert_weights.array(), finished[1].expert_weights.array()[3:]])
    assert (joined[:-1] == expected).all() and (joined[-1] == joined[-2]).all()


def test_a_following_turn_fills_what_the_last_one_could_not_know(policy) -> None:
    """Turn by turn, the sample's experts are those that a forward of all its tokens chooses."""
    finished = {}
    engine = Engine(policy, num_slots=1, max_length=80, record_experts=True)
    run_to_end(engine, [request([5, 6, 7], finished, 0)])
    longer = [5, 6, 7, *finished[0].token_ids, 30, 31]
    run_to_end(engine, [request(longer, finished, 1)])
    joined = join_experts([RecordedExperts.of(each.routed_experts) for each in (finished[0], finished[1])])
    expected, _ = forward(policy, [*longer, *finished[1].token_ids])
    assert len(joined) == len(expected) == 15
    assert (joined[:-1] == expected[:-1]).all()
    assert (joined[-1] == joined[-2]).all()
