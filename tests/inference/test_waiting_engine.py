"""The engine on a pretend accelerator: it waits for the device once per step, and tokens stay the same."""

import pytest

from pellucid.checks.rehearsal import rehearsing
from pellucid.config import ModelConfig
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, Scoring
from pellucid.model import load_policy
from tolerance import near_logprobs

NUM_REQUESTS = 5
SCORED = [5, 6, 7, 8]


def served(model, rehearsal=None, *, record_experts):
    """Serves requests of ragged lengths, two of them of one prompt; returns completions, scores and steps."""
    engine = Engine(
        load_policy(
            ModelConfig(name=str(model), dtype="float32"),
            device=None if rehearsal is None else rehearsal.device,
        ),
        num_slots=3,
        max_length=96,
        record_experts=record_experts,
    )
    finished, scores, num_steps = {}, [], 0
    for index in range(NUM_REQUESTS):
        max_tokens = 4 + (6 if record_experts else 17) * index
        params = SamplingParams(temperature=0.0 if index == 2 else 0.9, max_tokens=max_tokens, seed=index)
        prompt = [7, 8, 9] if index < 2 else [5, 6, 7, 8, 9 + index]
        request = Request(prompt, params, Account(), lambda done, index=index: finished.update({index: done}))
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
        num_steps += 1
    engine.submit_scoring(Scoring(SCORED, 0.9, scores.append))
    engine.step()
    return finished, scores, num_steps


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_step_waits_for_the_device_once(tiny_model, tiny_moe, kind) -> None:
    model = tiny_moe if kind == "experts" else tiny_model
    options = {"record_experts": kind == "experts"}
    expected, expected_scores, num_expected = served(model, **options)
    with rehearsing() as rehearsal:
        found, scores, num_steps = served(model, rehearsal, **options)
        waits = {
            event.where: times
            for event, times in rehearsal.events["sync"].items()
            if "inference/" in event.where and not event.where.startswith("model/")
        }
    assert num_steps == num_expected > NUM_REQUESTS
    assert sum(waits.values()) == num_steps + 1, waits  # and one for the scoring
    assert found.keys() == expected.keys()
    for index, completion in found.items():
        assert completion.token_ids == expected[index].token_ids
        assert completion.logprobs == near_logprobs(expected[index].logprobs, model, length=96)
        assert completion.routed_experts == expected[index].routed_experts
    assert scores[0][1:] == near_logprobs(expected_scores[0][1:], model, length=len(SCORED))
