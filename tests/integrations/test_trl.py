"""TRL's GRPO trainer with an export: it trains as without one, and what is recorded is what it trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import pellucid.export
from pellucid.cli import main
from pellucid.errors import ConfigError
from pellucid.export.dumps import find_dump
from pellucid.integrations.trl import ExportingGRPOTrainer, ExportsTokens, translate
from tolerance import near, partial_sum

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of TRL and its friends
    pytest.mark.slow,
]

WORDS = ("abc", "reward", "de")


def letters(completions: list[Any], **columns: Any) -> list[float]:
    return [sum(map(ord, reply[0]["content"])) % 11 / 10 for reply in completions]


def unlike_the_prompt(completions: list[Any], example_id: list[str], **columns: Any) -> list[float]:
    pairs = zip(completions, example_id, strict=True)
    return [float(not set(reply[0]["content"]) & set(word)) for reply, word in pairs]


def train(
    model: Path, folder: Path, kind: type = ExportingGRPOTrainer, **settings: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Two groups of four a step, in two micro batches; returns the trainer and what it logged per step."""
    torch.manual_seed(0)
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 6,
            "reward_weights": [1.0, 0.5],
            "learning_rate": 3e-2,
            "temperature": 0.9,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **settings,
        },
    )
    rows = [{"prompt": [{"role": "user", "content": word}], "example_id": word} for word in WORDS]
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[letters, unlike_the_prompt],
        args=args,
        train_dataset=Dataset.from_list(rows),
        **({"export_dir": folder} if issubclass(kind, ExportsTokens) else {}),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]


def replay(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    capsys.readouterr()
    main(["replay", str(folder), "--weights", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="dapo"),
        pytest.param({"loss_type": "grpo"}, id="grpo"),
        pytest.param(
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}, id="gspo"
        ),
        pytest.param({"loss_type": "cispo", "epsilon_high": 2.0}, id="cispo"),
    ],
)
def test_the_loss_that_trl_optimised_is_what_replay_computes(tiny_model, tmp_path, capsys, settings) -> None:
    """num_iterations = 2: every second step has moved away from the policy that sampled."""
    _, logs = train(tiny_model, tmp_path, num_iterations=2, max_steps=4, **settings)
    report = replay(capsys, tmp_path)
    assert report["agrees"], report["findings"]
    (of_loss,) = [found for found in report["findings"] if found["check"] == "loss"]
    assert "4 steps" in of_loss["what"]
    assert report["notes"] == ["advantages were not recomputed: no rollouts were saved"]
    export = pellucid.export.open(tmp_path)
    for step, logged in enumerate(logs):
        records = export.step(step)
        losses = records.column("token_loss")
        total, scale = logged["loss"] * records[0]["denominator"], partial_sum(losses)
        # The recorder computes each token's loss again, from logprobs that are a few nats.
        assert losses.sum(dtype=np.float64) == near(total, terms=len(losses) + 8, scale=4 * scale)
        if "reward" in logged:  # sampled for this step
            assert records.column("reward").mean() == near(logged["reward"], terms=len(records), scale=1.0)
        trainable = records.column("loss_mask")
        assert records.column("entropy")[trainable].mean() == pytest.approx(logged["entropy"], rel=2e-2)
    moved = export.step(1).column("mismatch_kl")[export.step(1).column("loss_mask")]
    assert moved.max() > 1e-3 and not export.step(0).column("is_masked").any()


def test_the_export_is_what_trl_trained_and_changes_nothing(tiny_model, tmp_path, capsys) -> None:
    trainer, logs = train(tiny_model, tmp_path / "exported", num_iterations=2)
    plain, plain_logs = train(tiny_model, tmp_path / "plain", GRPOTrainer, num_iterations=2)
    for name, weights in plain.model.state_dict().items():
        assert torch.equal(weights, trainer.model.state_dict()[name]), name
    assert [entry["loss"] for entry in logs] == [entry["loss"] for entry in plain_logs]
    export = pellucid.export.open(tmp_path / "exported")
    assert export.steps == (0, 1, 2)
    tokenizer, records = trainer.processing_class, export.step(1)
    assert len(records) == 8 and len(set(records.column("rollout_id"))) == 8
    for record in records:
        chat = tokenizer.decode(record["token_ids"].tolist())
        assert chat.startswith(f"<|im_start|>user\n{record['example_id']}<|im_end|>\n<|im_start|>assistant\n")
        reply = tokenizer.decode(record["token_ids"][record["loss_mask"]].tolist(), skip_special_tokens=True)
        content = [[{"content": reply}]]
        expected = letters(content)[0] + 0.5 * unlike_the_prompt(content, [record["example_id"]])[0]
        assert record["reward"] == pytest.approx(expected)
        assert set(record["policy_versions"][record["loss_mask"]]) == {0}  # sampled for step 0
        assert set(record["temperatures"][record["loss_mask"]]) == {np.float32(0.9)}
    for group in set(records.column("group_id")):
        members = records.where(group_id=group)
        rewards = members.column("reward")
        assert len(set(members.column("example_id"))) == 1 and len(members) == 4
        deviation = rewards.std(ddof=1) + 1e-4
        expected = (rewards - rewards.mean()) / deviation
        scale = np.abs(rewards).max() / deviation
        assert members.column("advantage") == near(expected, terms=len(rewards) + 4, scale=scale)
    for step, logged in enumerate(logs):
        trainable = export.step(step).column("loss_mask")
        for side in ("low", "high"):
            clipped = export.step(step).column(f"is_masked_{side}")[trainable]
            # TRL's is a mean of its micro batches' means.
            assert clipped.mean() == pytest.approx(logged[f"clip_ratio/{side}_mean"], abs=0.05)
    assert export.step(1).column("is_masked").any()
    page = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "exported"), "-o", str(page)]) == 0 and page.stat().st_size > 50_000


def test_what_replay_cannot_compare_it_says(tiny_model, tmp_path, capsys) -> None:
    for name, settings in (("mean", {"loss_type": "dr_grpo"}), ("tokens", {"beta": 0.1})):
        train(tiny_model, tmp_path / name, max_steps=1, **settings)
    report = replay(capsys, tmp_path / "mean")
    assert report["agrees"] and report["notes"][0] == (
        "the loss was not compared: TRL was run with loss_type = 'dr_grpo', which divides by the longest "
        "possible completions"
    )
    assert "losses" in {found["check"] for found in report["findings"]}
    report = replay(capsys, tmp_path / "tokens")
    assert report["agrees"] and report["notes"][:2] == [
        "the logged loss was not compared: the export has no token losses",
        "masks and token losses were not recomputed: TRL was run with beta = 0.1: a KL to the reference "
        "model",
    ]


def test_a_trl_without_the_methods_is_refused() -> None:
    class Renamed:
        def _compute_loss(self) -> None: ...

    with pytest.raises(
        ConfigError, match="has no _calculate_rewards, _generate.* the tested version is 1.16"
    ):
        type("Mine", (ExportsTokens, Renamed), {})(export_dir="anywhere")


@pytest.mark.parametrize(
    ("settings", "loss", "why"),
    [
        ({}, {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "reduction": "token"}, ""),
        ({"epsilon_high": 0.28}, {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}, ""),
        ({"loss_type": "grpo"}, {"type": "ppo_clip", "reduction": "sequence"}, ""),
        ({"loss_type": "bnpo"}, {"type": "ppo_clip"}, ""),
        (
            {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
            {"type": "ppo_clip"},
            "micro batches' means",
        ),
        ({"steps_per_generation": 2}, {"type": "ppo_clip"}, "steps_per_generation = 2"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"type": "cispo", "clip_low": 1, "clip_high": 4}, ""),
        ({"loss_type": "cispo"}, None, "bounds the weights below 1"),
        ({"importance_sampling_level": "sequence"}, {"type": "gspo", "reduction": "token"}, ""),
        ({"entropy_coef": 0.01}, {"type": "ppo_clip"}, "entropy bonus"),
        ({"loss_type": "sapo"}, None, "'sapo', which is none of the built-in losses"),
        ({"delta": 4.0}, None, "delta = 4.0"),
        ({"top_entropy_quantile": 0.2}, None, "top_entropy_quantile = 0.2"),
    ],
)
def test_which_loss_settings_amount_to(settings, loss, why) -> None:
    config = GRPOConfig(use_cpu=True, bf16=False, per_device_train_batch_size=8, **settings)
    found = translate(config, num_processes=1, has_aux_loss=False)
    assert why in found.no_loss + found.no_sum and bool(why) == bool(found.no_loss + found.no_sum)
    if loss is None:
        assert found.loss is None
    else:
        assert found.loss is not None and loss.items() <= found.loss.model_dump().items()


def test_the_viewer_reads_what_trl_logs(tiny_model, tmp_path) -> None:
    trainer, _ = train(tiny_model, tmp_path, GRPOTrainer, log_completions=True, max_steps=2)
    dump = find_dump(tmp_path / "trl")
    assert dump is not None and dump.title == "TRL's completions log" and list(dump.steps()) == [1, 2]
    for step in (1, 2):
        found = list(dump.rollouts(step))
        assert len(found) == 8 and len({one["group_id"] for one in found}) == 2
        for one in found:
            prompt, reply = one["messages"]
            assert prompt["role"] == "user" and prompt["content"] in WORDS and reply["role"] == "assistant"
            assert one["metrics"]["letters"] == pytest.approx(sum(map(ord, reply["content"])) % 11 / 10)
            assert set(one["metrics"]) == {"letters", "unlike_the_prompt"}
    last = trainer._logs["advantages"]
    assert [one["advantage"] for one in dump.rollouts(2)] == pytest.approx(list(last))
