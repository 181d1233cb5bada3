import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import ModelConfig
from pellucid.errors import InferenceError, TransportError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.cohorts import CohortDecoder
from pellucid.inference.decoder import Prompt
from pellucid.inference.engine import Engine, _locate, draw
from pellucid.inference.slots import QueueFullError, Request, run_to_end
from pellucid.model import load_policy, packed_layout
from pellucid.transport.weights import publish_version, weights_folder, write_version
from tolerance import bound, near, near_logprobs

ENV = Account("run", "env")


def loaded(folder, layout):
    return load_policy(ModelConfig(name=str(folder)), layout=layout)


@pytest.fixture(params=["packed", "rows"])
def policy(tiny_model, request):
    return loaded(tiny_model, request.param)


def request(prompt, finished, **params):
    params = {"max_tokens": 5, "seed": 0, **params}
    return Request(prompt, SamplingParams(**params), ENV, finished.append)


def trainer_logprobs(policy, prompt, completion, temperature):
    ids = torch.tensor([*prompt, *completion])
    with torch.no_grad():
        temperatures = torch.full((len(ids),), temperature)
        output = policy(ids, torch.arange(len(ids)), temperatures, packed_layout([len(ids)]))
    return output.logprobs[len(prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_trainers(policy, temperature) -> None:
    """Ragged prompts and lengths, more requests than slots."""
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 101) for _ in range(generator.randint(1, 40))] for _ in range(24)]
    finished = {}
    requests = [
        Request(
            prompt,
            SamplingParams(temperature=temperature, max_tokens=generator.randint(1, 30), seed=index),
            ENV,
            lambda completion, index=index: finished.__setitem__(index, completion),
        )
        for index, prompt in enumerate(prompts)
    ]
    run_to_end(Engine(policy, num_slots=8, max_length=80), requests)
    for index, prompt in enumerate(prompts):
        expected = trainer_logprobs(policy, prompt, finished[index].token_ids, temperature)
        assert finished[index].logprobs == near_logprobs(expected, policy, 70)


def test_logprobs_are_the_trainers_as_sequences_outgrow_their_shelves(policy) -> None:
    """Lengths from 60 to 300 pass three shelves at different times, among sequences that come and go."""
    finished = {}
    lengths = {index: 60 + 48 * index for index in range(6)}
    requests = [
        Request(
            [5 + index] * (3 * index + 1),
            SamplingParams(max_tokens=lengths[index] - (3 * index + 1), seed=index),
            ENV,
            lambda completion, index=index: finished.__setitem__(index, completion),
        )
        for index in lengths
    ]
    run_to_end(Engine(policy, num_slots=4, max_length=400), requests)
    for index, each in enumerate(requests):
        assert len(each.prompt_ids) + len(finished[index].token_ids) == lengths[index]
        expected = trainer_logprobs(policy, each.prompt_ids, finished[index].token_ids, 1.0)
        assert finished[index].logprobs == near_logprobs(expected, policy, lengths[index])


@pytest.mark.parametrize("windows", [{0: 5}, {0: 100, 1: 7}])
def test_a_token_sees_its_window_alone(tiny_model, windows) -> None:
    """Prompts and completions outgrow windows and shelves; a group shares its prompt."""
    policy = loaded(tiny_model, "packed")
    policy.windows = windows
    finished = {}
    prompts = [[5 + index] * (7 * index + 1) for index in range(4)] + [list(range(20, 90))] * 2
    requests = [
        Request(
            prompt,
            SamplingParams(max_tokens=130 - 20 * index, seed=index),
            ENV,
            lambda completion, index=index: finished.__setitem__(index, completion),
        )
        for index, prompt in enumerate(prompts)
    ]
    run_to_end(Engine(policy, num_slots=4, max_length=300), requests)
    for index, prompt in enumerate(prompts):
        expected = trainer_logprobs(policy, prompt, finished[index].token_ids, 1.0)
        assert finished[index].logprobs == near_logprobs(expected, policy, 160)
    policy.windows = {}
    unbounded = trainer_logprobs(policy, prompts[4], finished[4].token_ids, 1.0)
    assert finished[4].logprobs != near_logprobs(unbounded, policy, 160)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("abandon"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("disown"), st.integers(0, 10), st.just(0)),
    ),
    max_size=30,
)


@pytest.fixture(scope="module", params=["packed", "rows"])
def shared_policy(tiny_model, request):
    return loaded(tiny_model, request.param)


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
def test_any_schedule_balances_and_changes_nobodys_tokens(shared_policy, actions) -> None:
    """Requests that come, go and share prompts in any order get the tokens that they would get alone."""
    engine = Engine(shared_policy, num_slots=3, max_length=100)
    finished, requests, untaken = {}, [], set()
    for action, number, max_tokens in actions:
        if action == "submit":
            seed = len(requests)
            prompt = list(range(5, 70))[: 1 + 21 * number]
            params = SamplingParams(max_tokens=max_tokens, seed=seed)
            tell = partial(finished.__setitem__, seed)
            requests.append(Request(prompt, params, ENV, tell, f"r{seed}"))
            engine.submit(requests[-1])
        elif action == "step":
            for _ in range(number):
                engine.step()
        elif action == "abandon" and number < len(requests):
            engine.abandon(requests[number])
            untaken.add(number)
        elif action == "disown":
            engine.disown([f"r{number}"])  # maybe of a request that is still to come
            untaken.add(number)
        elif action == "abort":
            engine.abort([f"r{number}"])
    run_to_end(engine, [])
    counts = engine.counts
    taken = [completion for seed, completion in finished.items() if seed not in untaken]
    assert counts.delivered[ENV] == sum(len(completion.token_ids) for completion in taken)
    assert counts.sampled[ENV] == counts.delivered[ENV] + counts.cancelled[ENV]
    for seed, completion in finished.items():
        alone = []
        asked = requests[seed]
        run_to_end(
            Engine(shared_policy, num_slots=1, max_length=100),
            [Request(asked.prompt_ids, asked.params, ENV, alone.append)],
        )
        assert completion.token_ids == alone[0].token_ids[: len(completion.token_ids)]
        assert completion.finish_reason == "abort" or len(completion.token_ids) == asked.params.max_tokens


def test_a_policy_that_diverged_is_named(policy) -> None:
    engine = Engine(policy, num_slots=1, max_length=64)
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    with pytest.raises(InferenceError, match="policy version 0 gives logits that are not finite"):
        run_to_end(engine, [request([5, 6], [])])


def test_seed_decides_the_tokens(policy) -> None:
    finished = []
    for seed in (1, 2, 1):
        run_to_end(
            Engine(policy, num_slots=2, max_length=64),
            [request([5, 6, 7], finished, seed=seed, max_tokens=20)],
        )
    assert finished[0].token_ids == finished[2].token_ids
    assert finished[0].token_ids != finished[1].token_ids


def test_stop_token_ends_the_completion_and_is_part_of_it(policy) -> None:
    finished = []
    engine = Engine(policy, num_slots=1, max_length=64)
    run_to_end(engine, [request([5, 6, 7], finished, max_tokens=40)])
    third = finished[0].token_ids[2]
    run_to_end(engine, [request([5, 6, 7], finished, max_tokens=40, stop_token_ids=[third])])
    assert finished[0].finish_reason == "length"
    assert finished[1].finish_reason == "stop"
    stop = finished[0].token_ids.index(third)
    assert finished[1].token_ids == finished[0].token_ids[: stop + 1]


def test_stop_strings_end_the_completion(policy) -> None:
    finished = []
    letters = "".join(chr(97 + i % 26) for i in range(101))
    engine = Engine(
        policy, num_slots=1, max_length=64, decode_text=lambda ids: "".join(letters[i] for i in ids)
    )
    run_to_end(engine, [request([5, 6, 7], finished, max_tokens=40)])
    text = "".join(letters[i] for i in finished[0].token_ids)
    run_to_end(engine, [request([5, 6, 7], finished, max_tokens=40, stop=[text[4:7]])])
    assert finished[1].finish_reason == "stop"
    assert len(finished[1].token_ids) == text.index(text[4:7]) + 3


def test_a_groups_prompt_is_prefilled_once(policy) -> None:
    finished = []
    engine = Engine(policy, num_slots=8, max_length=64)
    prompt = list(range(5, 25))
    run_to_end(engine, [request(prompt, finished, seed=seed) for seed in range(8)])
    assert engine.counts.prefill_tokens == 19
    assert engine.counts.shared_tokens == 7 * 19
    assert len({tuple(completion.token_ids) for completion in finished}) > 1


def test_a_late_member_takes_the_prompt_of_a_running_one(policy) -> None:
    finished = []
    engine = Engine(policy, num_slots=4, max_length=64)
    engine.submit(request([5, 6, 7, 8], finished, seed=1, max_tokens=10))
    engine.step()
    run_to_end(engine, [request([5, 6, 7, 8], finished, seed=2, max_tokens=10)])
    assert (engine.counts.prefill_tokens, engine.counts.shared_tokens) == (3, 3)
    alone = []
    run_to_end(
        Engine(policy, num_slots=4, max_length=64), [request([5, 6, 7, 8], alone, seed=2, max_tokens=10)]
    )
    assert finished[1].token_ids == alone[0].token_ids


def test_a_late_member_takes_one_of_two_prompts_computed_together(policy) -> None:
    """The other one has ended by then."""
    prompts, late = [list(range(first, first + 20)) for first in (5, 40)], []
    engine = Engine(policy, num_slots=4, max_length=64)
    engine.submit(request(prompts[0], [], max_tokens=2))
    engine.submit(request(prompts[1], [], max_tokens=20))
    for _ in range(3):
        engine.step()
    assert engine.num_running == 1
    run_to_end(engine, [request(prompts[1], late, seed=1)])
    assert engine.counts.shared_tokens == 19
    expected = trainer_logprobs(policy, prompts[1], late[0].token_ids, 1.0)
    assert late[0].logprobs == near_logprobs(expected, policy, 25)


def held_bytes(row) -> int:
    """Returns the memory that a row's prefix keeps from being freed."""
    layers = row.prefix.kept["past_key_values"].layers
    return sum(each.untyped_storage().nbytes() for layer in layers for each in (layer.keys, layer.values))


@torch.inference_mode()
def test_a_row_holds_no_prompt_of_its_neighbours(tiny_model) -> None:
    policy, ids = loaded(tiny_model, "rows"), np.arange(5, 100)
    alone = CohortDecoder(policy, 64, None)
    only = alone.add(20)
    alone.logits([Prompt(ids[:19], [only])], alone.arrange(), [24])
    decoder = CohortDecoder(policy, 64, None)
    rows = [decoder.add(20) for _ in range(4)]
    groups = rows[:1], rows[1:3], rows[3:]
    prompts = [Prompt(ids[20 * place :][:19], group) for place, group in enumerate(groups)]
    decoder.logits(prompts, decoder.arrange(), [24, 44, 44, 64])
    decoder.remove(rows[0])
    decoder.remove(rows[3])
    assert decoder.arrange() == rows[1:3]
    assert rows[1].prefix is rows[2].prefix
    assert held_bytes(rows[1]) == held_bytes(only)
    decoder.forget_prefixes()
    assert rows[1].prefix is rows[2].prefix is None


def test_weights_swap_between_steps_without_dropping_requests(policy, tiny_model, tmp_path) -> None:
    other = load_policy(ModelConfig(name=str(tiny_model)))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    publish_version(tmp_path, 3, partial(write_version, other.hf), keep=2)
    finished = []
    engine = Engine(policy, num_slots=2, max_length=64)
    engine.submit(request([5, 6, 7], finished, max_tokens=6))
    for _ in range(2):
        engine.step()
    engine.update_weights(3, tmp_path / "weights" / "step_3")
    run_to_end(engine, [request([5, 6, 7], finished, max_tokens=2)])
    by_length = {len(completion.token_ids): completion for completion in finished}
    assert by_length[6].policy_versions == [(0, 2), (3, 4)]
    assert by_length[2].policy_versions == [(3, 2)]
    # A prompt computed under the old weights is not shared with a request that starts under the new ones.
    assert engine.counts.shared_tokens == 0
    expected = trainer_logprobs(other, [5, 6, 7], by_length[2].token_ids, 1.0)
    assert by_length[2].logprobs == near_logprobs(expected, other, 5)


def test_a_version_published_again_with_other_weights_shares_no_prompt(policy, tiny_model, tmp_path) -> None:
    """A trainer that was resumed publishes the same number once more."""
    other = load_policy(ModelConfig(name=str(tiny_model)))
    publish_version(tmp_path / "first", 3, partial(write_version, other.hf), keep=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    publish_version(tmp_path / "again", 3, partial(write_version, other.hf), keep=2)
    prompt, running, finished = list(range(5, 25)), [], []
    engine = Engine(policy, num_slots=2, max_length=64)
    engine.update_weights(3, weights_folder(tmp_path / "first", 3))
    engine.submit(request(prompt, running, max_tokens=20))
    engine.step()
    engine.update_weights(3, weights_folder(tmp_path / "again", 3))
    run_to_end(engine, [request(prompt, finished, seed=1)])
    assert (engine.counts.prefill_tokens, engine.counts.shared_tokens) == (2 * 19, 0)
    expected = trainer_logprobs(other, prompt, finished[0].token_ids, 1.0)
    assert finished[0].logprobs == near_logprobs(expected, other, 25)
    assert running[0].policy_versions == [(3, 20)]


def test_weights_that_do_not_fit_change_nothing(policy, tmp_path) -> None:
    before = [parameter.clone() for parameter in policy.parameters()]
    publish_version(tmp_path, 1, partial(write_version, torch.nn.Linear(2, 2)), keep=2)
    engine = Engine(policy, num_slots=1, max_length=64)
    with pytest.raises(TransportError, match="does not fit the model: lacks"):
        engine.update_weights(1, tmp_path / "weights" / "step_1")
    assert engine.version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_every_sampled_token_is_delivered_or_cancelled(policy) -> None:
    finished = []
    engine = Engine(policy, num_slots=2, max_length=64)
    requests = [request([5, 6, index + 7], finished, max_tokens=10) for index in range(4)]
    for each in requests:
        engine.submit(each)
    for _ in range(4):
        engine.step()
    engine.abandon(requests[0])
    engine.abandon(requests[3])
    engine.step()
    engine.abort_all()
    assert engine.is_idle
    assert [completion.finish_reason for completion in finished] == ["abort", "abort"]
    counts = engine.counts
    assert counts.cancelled[ENV] == 4
    assert counts.delivered[ENV] == sum(len(completion.token_ids) for completion in finished)
    assert counts.sampled[ENV] == counts.cancelled[ENV] + counts.delivered[ENV]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        (
            [5] * 60,
            {"max_tokens": 5},
            "prompt of 60 \\+ max_tokens of 5 exceeds inference.max_model_len = 64",
        ),
        ([5, 101], {}, "outside 0 … 100"),
        ([5, -1], {}, "outside 0 … 100"),
        ([5], {"temperature": -0.5}, "temperature = -0.5"),
        ([5], {"max_tokens": 0}, "max_tokens = 0"),
        ([5], {"stop": ["x"]}, "stop strings need a tokenizer"),
        ([5], {"stop": ["x", ""]}, "stop has an empty string"),
    ],
)
def test_requests_that_cannot_be_served_say_why(policy, prompt, params, message) -> None:
    with pytest.raises(InferenceError, match=message):
        Engine(policy, num_slots=1, max_length=64).submit(request(prompt, [], **params))


def test_a_full_queue_refuses(policy) -> None:
    engine = Engine(policy, num_slots=1, max_length=64, max_queued=1)
    for _ in range(2):
        engine.submit(request([5], []))
    with pytest.raises(QueueFullError, match="1 requests are waiting already"):
        engine.submit(request([5], []))


def drawn(logits, temperatures, uniforms) -> list[list[float]]:
    return [each.tolist() for each in draw(logits, temperatures, uniforms)]


def test_draw_follows_the_distribution() -> None:
    """Inverse CDF on (0.1, 0.2, 0.7): evenly spread uniforms give the exact shares."""
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(1000, 1)
    tokens, logprobs = drawn(logits, [1.0] * 1000, [(i + 0.5) / 1000 for i in range(1000)])
    assert Counter(tokens) == {0: 100, 1: 200, 2: 700}
    assert logprobs[0] == pytest.approx(torch.tensor(0.1).log().item())


def test_draw_follows_the_distribution_of_a_large_vocabulary() -> None:
    """Half the mass on one token, the other half spread evenly over the last 500 of 50,000."""
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, 7] = math.log(0.5)
    logits[0, -500:] = math.log(0.001)
    tokens, logprobs = drawn(logits.expand(1000, -1), [1.0] * 1000, [(i + 0.5) / 1000 for i in range(1000)])
    assert Counter(tokens) == {7: 500} | {token: 1 for token in range(49_500, 50_000)}
    exact = torch.log_softmax(logits.double(), -1)[0]
    assert logprobs[0] == near(exact[7], terms=501, scale=-math.log(0.001))
    assert logprobs[-1] == near(exact[-1], terms=501, scale=-math.log(0.001))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([2, 101, 256, 257, 1000, 50_257]), st.floats(0.3, 3.0), st.integers(0, 2**32))
def test_draw_is_the_inverse_of_the_distribution_function(vocab_size, temperature, seed) -> None:
    """The token in whose share of [0, 1) the uniform number falls, by a sum over everything in float64."""
    torch.manual_seed(seed)
    logits = 4 * torch.randn(8, vocab_size)
    uniforms = [random.Random(seed + row).random() for row in range(8)]
    tokens, logprobs = drawn(logits, [temperature] * 8, uniforms)
    expected = torch.log_softmax(logits.double() / temperature, -1)
    ends = expected.exp().cumsum(-1)
    for row, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        start, end = ends[row, token - 1].item() if token else 0.0, ends[row, token].item()
        # A share is exp(logit − largest), whose exponent is as large as the largest logits in float32.
        largest = (logits[row].abs().max() / temperature).item()
        off = bound(2 * largest, vocab_size) * min(end, 1 - start)
        assert start - off <= uniform <= end + off
        assert logprobs[row] == near(expected[row, token], terms=vocab_size, scale=2 * largest)


@pytest.mark.parametrize("vocab_size", [3, 1000])
def test_draw_never_takes_an_impossible_token(vocab_size) -> None:
    logits = torch.full((4, vocab_size), -torch.inf)
    logits[:, 1] = 0.0
    assert drawn(logits, [1.0] * 4, [0.0, 0.5, 0.999999999999, 1 - 2**-53])[0] == [1] * 4


def test_temperature_zero_is_greedy_beside_others_that_are_not() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(2, 1)
    tokens, logprobs = drawn(logits, [0.0, 1.0], [0.999, 0.999])
    assert tokens == [1, 2]
    assert logprobs == pytest.approx(torch.log_softmax(logits[0], -1)[1:].tolist())


def test_locate() -> None:
    masses = torch.tensor([[2.0, 0.0, 3.0, 0.0]], dtype=torch.float64).repeat(4, 1)
    index, rest = _locate(masses, torch.tensor([0.0, 1.5, 2.0, 9.0], dtype=torch.float64))
    assert index.tolist() == [0, 0, 2, 2]
    assert rest.tolist() == pytest.approx([0.0, 1.5, 0.0, 3.0])
