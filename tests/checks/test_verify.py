"""`pellucid verify`: a sound trainer passes; each planted fault is caught, and named."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid.checks import verify
from pellucid.checks.verify import agreement, gradients, path, subject
from pellucid.config import VerifyConfig
from pellucid.config.orchestrator import EnvConfig
from pellucid.config.shared import LoraConfig
from pellucid.data import COLUMNS
from pellucid.data.rows import FlatRows
from pellucid.errors import ConfigError
from pellucid.inference import engine
from pellucid.model import attention, head, layout, routing
from pellucid.model.head import TokenOutput
from pellucid.model.policy import Policy
from pellucid.trainer.step import StepBatch


@pytest.fixture
def config(tiny_model) -> VerifyConfig:
    return VerifyConfig.model_validate(
        {
            "model": {"name": str(tiny_model)},
            "seq_len": 512,
            "trainer": {"threads": 1},
            "orchestrator": {
                "env": [{"id": "reverse-text"}],
                "sampling": {"temperature": 0.6, "max_tokens": 16},
            },
        }
    )


def failures(config, check) -> dict[str, str]:
    """The first failure of each check: what it is said to mean."""
    found: dict[str, str] = {}
    with subject.opened(config) as opened:
        for finding in check(opened):
            if not finding.passed:
                found.setdefault(finding.check, finding.meaning)
    return found


def test_an_environment_with_images_is_refused_with_its_name(config) -> None:
    environments = [EnvConfig(id="reverse-text"), EnvConfig(id="pictures:ShowsPictures", name="dots")]
    shown = subject.updated(config, orchestrator={"env": environments})
    rule = "orchestrator.env 'dots' shows images, and verify checks text alone; name an environment of text"
    with pytest.raises(ConfigError, match=rule), subject.opened(shown):
        pass


def test_a_sound_trainer_passes_every_check(config) -> None:
    findings = verify.verify(config)
    assert [finding.what for finding in findings if not finding.passed] == []
    not_held = [finding.check for finding in findings if not finding.is_held]
    assert not_held == ["precision", "experts", "processes"]
    assert {finding.check for finding in findings if finding.is_held} == {
        "tokenizer",
        "columns",
        "packing",
        "ranks",
        "leakage",
        "record",
        "agreement",
        "sampling",
        "oracle",
        "drift",
        "weights",
    }


def in_bfloat16(config):
    return subject.updated(config, trainer={"model": {"precision": "bfloat16"}})


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_precision_that_trains_is_held_to_float32(config, lora) -> None:
    config = subject.updated(in_bfloat16(config), model={"lora": lora})
    with subject.opened(config) as opened:
        findings = [*agreement.check_agreement(opened), *agreement.check_precision(opened)]
        assert opened.run.policy.compute_dtype is None
    assert [finding.what for finding in findings if not finding.passed] == []
    gaps = [finding.value for finding in findings if "gradient" in finding.what]
    assert len(gaps) == 3
    assert min(gaps) > 1e-4, "nothing was rounded to bfloat16"


def test_a_fault_of_bfloat16_alone(config, monkeypatch) -> None:
    """A scale of attention that is off where flash attention would compute it."""
    attend = attention.SharedAttention.attend

    def scaled(plan, layer, query, key, value, scale, rule):
        is_half = query.dtype == torch.bfloat16
        return attend(plan, layer, query, key, value, scale * 8 if is_half else scale, rule)

    monkeypatch.setattr(attention.SharedAttention, "attend", scaled)
    assert failures(in_bfloat16(config), gradients.check_packing) == {}
    found = failures(in_bfloat16(config), agreement.check_precision)
    assert "by more than rounding explains" in found["precision"]


def test_a_denominator_per_rank(config, monkeypatch) -> None:
    def own_tokens(batch: StepBatch) -> int:
        return max(1, sum(part.counts.loss_tokens for part in batch.packed.micro_batches(batch.rank)))

    monkeypatch.setattr(StepBatch, "denominator", property(own_tokens))
    assert "a per-rank denominator" in failures(config, gradients.check_ranks)["ranks"]


def test_a_denominator_per_micro_batch(config, monkeypatch) -> None:
    from pellucid.trainer.run import Run

    loss = Run.loss

    def per_micro_batch(run, micro_batch, output, denominator):
        return loss(run, micro_batch, output, max(1, micro_batch.packed.counts.loss_tokens))

    monkeypatch.setattr(Run, "loss", per_micro_batch)
    assert "divided per micro batch" in failures(config, gradients.check_packing)["packing"]
    assert "does not add up" in failures(config, gradients.check_record)["record"]


def test_padding_that_trains(config, monkeypatch) -> None:
    monkeypatch.setitem(COLUMNS, "loss_mask", replace(COLUMNS["loss_mask"], fill=True))
    assert "its tokens count as trainable" in failures(config, gradients.check_packing)["packing"]


def test_an_engine_that_is_not_greedy_at_temperature_0(config, monkeypatch) -> None:
    draw = engine.draw

    def never_greedy(logits, temperatures, uniforms):
        return draw(logits, [temperature or 1.0 for temperature in temperatures], uniforms)

    monkeypatch.setattr(engine, "draw", never_greedy)
    assert "evaluations are not greedy" in failures(config, agreement.check_sampling)["sampling"]


def test_chunks_of_logits_whose_gradient_is_another(config, monkeypatch) -> None:
    differentiate = head._differentiate

    def doubled(logits, *others):
        differentiate(logits, *others)
        logits *= 2

    monkeypatch.setattr(head, "_differentiate", doubled)
    assert "in chunks" in failures(config, gradients.check_packing)["packing"]


def test_a_mask_that_leaks(config, monkeypatch) -> None:
    def one_sequence(families):
        total = sum(family.num_tokens for family in families)
        return attention.SharedAttention([attention.Family(0, [total])])

    monkeypatch.setattr(layout, "SharedAttention", one_sequence)
    assert "sees the tokens of another" in failures(config, agreement.check_leakage)["leakage"]
    assert "packing" in failures(config, gradients.check_packing)


def test_stale_weights(config, monkeypatch) -> None:
    def only_the_number(self, version, folder):
        self.version = version

    monkeypatch.setattr(engine.Engine, "update_weights", only_the_number)
    found = failures(config, agreement.check_swaps)
    assert list(found) == ["weights"]
    assert "it serves stale ones" in found["weights"]


def test_a_prompt_that_was_computed_before_the_swap(config, monkeypatch) -> None:
    def whatever_the_version(self):
        return {request.prompt: row for row, request in self._running.items()}

    monkeypatch.setattr(engine.Engine, "_donors", whatever_the_version)
    found = failures(config, agreement.check_swaps)
    assert list(found) == ["weights"]
    assert "computed before the swap" in found["weights"]


def test_experts_that_are_not_replayed(config, tiny_moe, monkeypatch) -> None:
    replayed = config.model_copy(
        update={
            "model": config.model.model_copy(update={"name": str(tiny_moe)}),
            "trainer": config.trainer.model_copy(update={"enable_router_replay": True}),
        }
    )
    assert failures(config, agreement.check_experts) == failures(replayed, agreement.check_experts) == {}
    monkeypatch.setattr(routing.ReplayedExperts, "choose", lambda self, layer, own: own)
    assert "choose for themselves" in failures(replayed, agreement.check_experts)["experts"]


def test_one_check_alone(config) -> None:
    findings = verify.verify(config.model_copy(update={"only": "tokenizer"}))
    assert [finding.check for finding in findings] == ["tokenizer", "tokenizer"]


@pytest.mark.parametrize(
    ("only", "remedy"),
    [
        ("processes", "start `torchrun --standalone --nproc-per-node 2 -m pellucid.cli verify …`"),
        ("experts", "trainer.enable_router_replay = false"),
        ("oracle", "the model has 1,234 parameters, and one above 1,000 is not loaded"),
    ],
)
def test_a_check_that_has_nothing_to_check(config, monkeypatch, only, remedy) -> None:
    monkeypatch.setattr(path, "MAX_PARAMETERS", 1_000)
    with pytest.raises(ConfigError) as raised:
        verify.run_verify(config.model_copy(update={"only": only}))
    assert f"--only {only} has nothing to check" in str(raised.value)
    assert re.sub("has [0-9,]+ parameters", "has 1,234 parameters", str(raised.value)).count(remedy) == 1


def test_what_was_not_held_is_printed(config, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify, "CHECKS", {"columns": gradients.check_columns, "oracle": path.check_oracle})
    monkeypatch.setattr(path, "MAX_PARAMETERS", 1_000)
    assert verify.run_verify(config) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not held: the way from a conversation to published weights (oracle): the model has" in printed
    assert "not held: several processes against one (processes):" in printed
    assert "1 of 1 findings are within their limits" in printed
    assert verify.run_verify(config.model_copy(update={"as_json": True})) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["check"], line["passed"], line["value"]) for line in lines] == [
        ("columns", True, 0),
        ("oracle", None, None),
        ("processes", None, None),
    ]


def test_a_temperature_that_one_side_forgets(config, monkeypatch) -> None:
    draw = engine.draw
    monkeypatch.setattr(
        engine, "draw", lambda logits, scales, randoms: draw(logits, [1.0] * len(scales), randoms)
    )
    found = failures(config, agreement.check_agreement)
    assert "one side does not divide the logits by the temperature" in found["agreement"]


def test_shifted_labels(config, monkeypatch) -> None:
    forward = Policy.forward

    def shifted(self, *arguments):
        output = forward(self, *arguments)
        return TokenOutput(output.logprobs.roll(-1), output.entropy)

    monkeypatch.setattr(Policy, "forward", shifted)
    assert "its labels are shifted" in failures(config, agreement.check_agreement)["agreement"]


def test_swapped_columns(config, monkeypatch) -> None:
    decode = gradients.decode_batch

    def swapped(payload, *, sender):
        batch = decode(payload, sender=sender)
        columns = batch.table.columns
        columns["reward"], columns["advantage"] = columns["advantage"], columns["reward"]
        logprobs = columns["inference_logprobs"]
        columns["inference_logprobs"] = FlatRows(logprobs.array[::-1], logprobs.lengths)
        return batch

    monkeypatch.setattr(gradients, "decode_batch", swapped)
    meaning = failures(config, gradients.check_columns)["columns"]
    assert meaning.startswith("advantage, inference_logprobs, reward arrived with other values")


def test_a_tokenizer_of_another_model(config, monkeypatch) -> None:
    class Shouting:
        def __init__(self, tokenizer) -> None:
            self._tokenizer = tokenizer
            self.chat_template = tokenizer.chat_template

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

        def decode(self, *arguments, **keywords):
            return self._tokenizer.decode(*arguments, **keywords).upper()

    load = subject.load_tokenizer
    monkeypatch.setattr(subject, "load_tokenizer", lambda name: Shouting(load(name)))
    assert "not the same to this tokenizer" in failures(config, gradients.check_tokenizer)["tokenizer"]


def test_the_command_prints_and_fails(config, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify, "CHECKS", {"columns": gradients.check_columns})
    assert verify.run_verify(config.model_copy(update={"as_json": True})) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["check"], line["value"], line["limit"], line["passed"]) == ("columns", 0, 0, True)
    monkeypatch.setattr(gradients.np, "array_equal", lambda a, b: False)
    assert verify.run_verify(config) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "swapped, shifted or misaligned" in printed


def test_a_number_that_is_not_one_fails() -> None:
    assert not verify.Finding("x", "y", float("nan"), 1.0).passed
    assert np.isnan(verify.Finding("x", "y", float("nan"), 1.0).as_dict()["value"])
