"""Beside another trainer: what a plain PyTorch loop hands over is what is read back, replayed and shown."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pellucid.export
from pellucid.cli import main
from pellucid.errors import ConfigError, DataError
from pellucid.integrations import RecordedConfig, TokenRecorder
from tolerance import near

CLIP = 0.05
PAD = 0


def replay(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["replay", str(folder), "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if report["agrees"] else 1)
    return report


def failed(report: dict[str, Any]) -> list[str]:
    return [
        f"{found['check']} {found['what'].split()[0]}" for found in report["findings"] if not found["passed"]
    ]


def grpo(folder: Path, *, num_steps: int = 3) -> list[dict[str, Any]]:
    """Three lines of pellucid in a loop of its own: two micro batches of two groups a step, each of them used
    for two updates, so that ratios move."""
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
    optimizer = torch.optim.SGD(policy.parameters(), lr=5.0)
    trained = []
    with TokenRecorder(folder, loss={"type": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP}) as recorder:
        for step in range(num_steps):
            micro_batches = []
            for half in range(2):
                prompts = torch.tensor([[PAD, 3, 4], [PAD, 3, 4], [5, 6, 7], [5, 6, 7]])
                completions = torch.randint(1, 11, (4, 4))
                length = torch.tensor([4, 2, 3, 1 + half])
                mask = torch.arange(4) < length[:, None]
                ids = torch.cat([prompts, completions * mask], dim=1)
                rewards = (completions * mask).sum(1) / 20
                advantages = rewards - rewards.view(2, 2).mean(1).repeat_interleave(2)
                micro_batches.append((ids, mask, rewards, advantages, logprobs_of(policy, ids).detach()))
            num_trainable = sum(int(mask.sum()) for _, mask, *_ in micro_batches)
            for update in range(2):
                total = 0.0
                for ids, mask, rewards, advantages, old in micro_batches:
                    logprobs = logprobs_of(policy, ids)
                    ratio, surplus = (logprobs - old).exp(), advantages[:, None]
                    losses = -torch.minimum(ratio * surplus, ratio.clamp(1 - CLIP, 1 + CLIP) * surplus)
                    loss = (losses * mask).sum() / num_trainable
                    loss.backward()
                    total += loss.item()
                    given = {
                        "token_ids": ids,
                        "attention_mask": ids != PAD,
                        "loss_mask": mask,
                        "inference_logprobs": old,
                        "trainer_logprobs": logprobs,
                        "token_loss": losses,
                        "advantages": advantages,
                        "rewards": rewards.tolist(),
                    }
                    recorder.add(**given, group_id=["a", "a", "b", "b"], env_name="digits")
                    trained.append(given | {"step": 2 * step + update})
                recorder.finish_step(loss=total, reward=float(rewards.mean()))
                optimizer.step()
                optimizer.zero_grad()
    return trained


def logprobs_of(policy: torch.nn.Module, ids: Tensor) -> Tensor:
    """Of the completion's four tokens."""
    logits = policy(ids[:, :-1])[:, -4:].log_softmax(-1)
    return logits.gather(-1, ids[:, -4:, None]).squeeze(-1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("beside") / "run"
    return folder, grpo(folder)


def test_values_are_those_of_the_loop(recorded) -> None:
    folder, trained = recorded
    export = pellucid.export.open(folder)
    assert export.steps == tuple(range(6))
    for step in export.steps:
        records, batches = export.step(step), [given for given in trained if given["step"] == step]
        assert len(records) == 8 and set(records.column("denominator")) == {21}
        for record, (given, row) in zip(
            records, ((given, row) for given in batches for row in range(4)), strict=True
        ):
            present, mask = given["attention_mask"][row], given["loss_mask"][row]
            assert record["token_ids"].tolist() == given["token_ids"][row][present].tolist()
            length = int(mask.sum())
            assert (
                record["loss_mask"].tolist()
                == [False] * (len(record["token_ids"]) - length) + [True] * length
            )
            for name in ("trainer_logprobs", "inference_logprobs", "token_loss"):
                expected = given[name][row][mask].detach().numpy()
                assert record[name][-length:].tolist() == expected.tolist(), name
            assert record["reward"] == pytest.approx(given["rewards"][row])
            assert record["advantages"][-1] == pytest.approx(float(given["advantages"][row]))
            assert (record["env_name"], record["group_id"]) == ("digits", "aabb"[row])
    assert export.step(1).column("is_masked").sum() > 0  # the second update has moved, and some is clipped
    assert not export.step(0).column("is_masked").any()


def test_replay_computes_the_same_loss(recorded, capsys) -> None:
    report = replay(capsys, recorded[0])
    assert report["agrees"] and report["notes"] == ["advantages were not recomputed: no rollouts were saved"]
    checks = [found["check"] for found in report["findings"]]
    assert sorted(set(checks)) == ["loss", "losses", "masks", "ratios", "record"]
    assert "6 steps" in report["findings"][-1]["what"]


@pytest.mark.parametrize(
    ("column", "change", "caught"),
    [
        ("token_loss", lambda value: value + 1e-3, ["losses token_loss", "loss sum"]),
        ("is_masked", lambda value: not value, ["masks is_masked"]),
        ("inference_logprobs", lambda value: value - 1e-3, ["ratios", "losses token_loss"]),
    ],
)
def test_a_planted_difference_is_found(tmp_path, capsys, column, change, caught) -> None:
    grpo(tmp_path / "run", num_steps=1)
    path = tmp_path / "run" / "token_exports" / "step_0" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[2][column][-1] = change(records[2][column][-1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = failed(replay(capsys, tmp_path / "run"))
    for name in caught:
        assert any(each.startswith(name) for each in found), found


def test_a_loss_that_was_not_what_was_named_is_found(tmp_path, capsys) -> None:
    """The loop trains with other bounds than it says."""
    grpo(tmp_path / "run", num_steps=1)
    config = tmp_path / "run" / "configs" / "trainer.toml"
    config.write_text(config.read_text().replace("clip_high = 0.05", "clip_high = 9.0"))
    assert {"masks is_masked", "losses token_loss"} <= set(failed(replay(capsys, tmp_path / "run")))


def test_the_page_is_made_from_it(recorded, tmp_path) -> None:
    assert main(["view", str(recorded[0]), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000


ONE: dict[str, Any] = {
    "token_ids": torch.tensor([[5, 6, 9, 8], [5, 7, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "loss_mask": torch.tensor([[0.0, 0, 1, 1], [0, 1, 0, 0]]),
    "inference_logprobs": torch.tensor([[0, -1, -2.0, -3], [0, -4, 0, 0]]),
    "trainer_logprobs": torch.tensor([[-1, -2.5, -2.5], [-4, 0, 0]], dtype=torch.bfloat16),
    "advantages": np.array([1.0, -1.0]),
    "rewards": [1, 0],
}


def record_one(folder: Path, loss: Any = None, **changes: Any) -> pellucid.export.Records:
    with TokenRecorder(folder, loss=loss) as recorder:
        recorder.add(**{name: value for name, value in {**ONE, **changes}.items() if value is not None})
        recorder.finish_step(loss=0.0)
    return pellucid.export.open(folder).step(0)


def test_padding_on_either_side_and_narrower_tensors(tmp_path) -> None:
    """Logprobs of all but the first token have one column less."""
    first, second = record_one(tmp_path)
    assert first["token_ids"].tolist() == [5, 6, 9, 8] and second["token_ids"].tolist() == [5, 7]
    np.testing.assert_equal(first["trainer_logprobs"], np.float32([np.nan, -1, -2.5, -2.5]))
    np.testing.assert_equal(first["log_importance_ratio"], np.float32([np.nan, -1, -0.5, 0.5]))
    assert second["inference_logprobs"].tolist() == [0, -4] and second["advantage"] == -1
    assert first["denominator"] == 3


def test_rewards_that_are_not_given_are_null(tmp_path) -> None:
    assert [record["reward"] for record in record_one(tmp_path / "none", rewards=None)] == [None, None]
    assert [record["reward"] for record in record_one(tmp_path / "one", rewards=[math.nan, 1])] == [None, 1]


def test_any_column_of_a_batch_is_taken_by_its_name(tmp_path) -> None:
    """Policy versions and temperatures of every token, where the loop knows them."""
    versions, temperatures = torch.tensor([[0, 0, 3, 4], [0, 5, 0, 0]]), torch.full((2, 4), 0.5)
    first, second = record_one(tmp_path, policy_versions=versions, temperatures=temperatures)
    assert first["policy_versions"].tolist() == [-1, -1, 3, 4] and second["policy_versions"].tolist() == [
        -1,
        5,
    ]
    assert first["temperatures"].tolist() == [1, 1, 0.5, 0.5]


def test_flat_tensors_say_the_same(tmp_path) -> None:
    flat = {
        "token_ids": torch.tensor([5, 6, 9, 8, 5, 7]),
        "attention_mask": None,
        "lengths": [4, 2],
        "loss_mask": np.array([False, False, True, True, False, True]),
        "inference_logprobs": torch.tensor([0, -1, -2.0, -3, 0, -4]),
        "trainer_logprobs": torch.tensor([math.nan, -1, -2.5, -2.5, math.nan, -4]),
    }
    padded, given_flat = record_one(tmp_path / "padded"), record_one(tmp_path / "flat", **flat)
    assert [record.as_dict() for record in padded] == [record.as_dict() for record in given_flat]


def test_the_named_loss_fills_what_is_not_given(tmp_path) -> None:
    """r = e^-½, e^½ and 1 with A = 1, 1, −1; 1.2 bounds the second."""
    records = record_one(tmp_path, loss="ppo_clip")
    expected = [0, 0, -math.exp(-0.5), -1.2, 0, 1]
    assert records.column("token_loss") == near(expected, terms=4, each=True)
    assert records.column("is_masked_high").tolist() == [False, False, False, True, False, False]


def test_a_mean_over_sequences_weighs_their_tokens(tmp_path) -> None:
    records = record_one(tmp_path, loss={"type": "ppo_clip", "reduction": "sequence"})
    weights = np.repeat([3 / 4, 3 / 2], [4, 2])
    expected = [0, 0, -math.exp(-0.5), -1.2, 0, 1] * weights
    assert records.column("token_loss") == near(expected, terms=4, each=True)


def test_an_unknown_loss_leaves_its_columns_out_and_replay_says_so(tmp_path, capsys) -> None:
    records = record_one(tmp_path / "run")
    assert records[0]["is_masked"] is None and np.isnan(records.column("token_loss")).all()
    report = replay(capsys, tmp_path / "run")
    assert report["agrees"] and {found["check"] for found in report["findings"]} == {"ratios", "record"}
    sums, losses, _ = report["notes"]
    assert sums == "the logged loss was not compared: the export has no token losses"
    assert losses.startswith("masks and token losses were not recomputed: the export does not name the loss")
    assert main(["replay", str(tmp_path / "run"), "--set", "trainer.loss.type=ppo_clip"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_own_losses_of_an_unknown_kind_still_have_to_add_up(tmp_path, capsys) -> None:
    losses = torch.tensor([[0, 0, 1.0, 2], [0, 3, 0, 0]])
    masks = {"is_masked_high": torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])}
    for logged, expected in ((2.0, []), (2.1, ["loss sum"])):
        folder = tmp_path / str(logged)
        with TokenRecorder(folder, about=RecordedConfig(no_loss="it is squared")) as recorder:
            recorder.add(**ONE, token_loss=losses, **masks)
            recorder.finish_step(loss=logged)
        report = replay(capsys, folder)
        assert failed(report) == expected
        assert "masks and token losses were not recomputed: it is squared" in report["notes"]
        assert pellucid.export.open(folder).records().column("is_masked").sum() == 1


def test_sft_needs_no_logprobs_of_a_sampler(tmp_path, capsys) -> None:
    records = record_one(tmp_path, inference_logprobs=None, training_mode="sft")
    assert records.column("token_loss").tolist() == [0, 0, 2.5, 2.5, 0, 4]
    assert records[0]["importance_ratio"].tolist() != records[0]["importance_ratio"].tolist()  # null
    assert "losses token_loss" in {
        f"{found['check']} {found['what'].split()[0]}" for found in replay(capsys, tmp_path)["findings"]
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.rand(2, 4)}, "token_ids holds float32; whole numbers are needed"),
        ({"token_ids": torch.tensor([5, 6])}, r"token_ids has shape \(2,\); padded tensors have"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\); token_ids has \(2, 4\)"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])},
            "sequence 1: attention_mask is 0 in column 1, between tokens",
        ),
        (
            {"attention_mask": torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]])},
            "sequence 0: attention_mask is 0 in column 2, between tokens",
        ),
        ({"attention_mask": None}, "give attention_mask with padded .* got neither"),
        ({"lengths": [4, 2]}, "got both"),
        ({"loss_mask": torch.full((2, 4), 0.5)}, "loss_mask holds float32 that are not all 0 or 1"),
        ({"loss_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])}, "loss_mask marks padding"),
        (
            {"loss_mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]])},
            "sequence 0: loss_mask marks the first token",
        ),
        (
            {"trainer_logprobs": torch.zeros(2, 2)},
            r"trainer_logprobs has shape \(2, 2\); expected \(2, 4\) or",
        ),
        (
            {"trainer_logprobs": torch.tensor([[0, 0, 0, math.nan], [0, 0, 0, 0]])},
            "sequence 0: trainer_logprobs of token 3 is nan",
        ),
        (
            {"inference_logprobs": torch.tensor([[0, 0, 0, 0], [0, -math.inf, 0, 0]])},
            "sequence 1: inference_logprobs of token 1 is -inf",
        ),
        ({"inference_logprobs": None}, "inference_logprobs is missing; .* trainer_logprobs.detach"),
        ({"advantages": torch.zeros(3)}, r"advantages has shape \(3,\)"),
        ({"rewards": [1.0]}, r"rewards has shape \(1,\); one for each of the 2 sequences"),
        ({"rewards": [1.0, math.inf]}, "sequence 1: reward is inf"),
        ({"rewards": ["a", "b"]}, "rewards holds <U1; numbers are needed"),
        ({"group_id": ["a"]}, "group_id has 1 entries; there are 2 sequences"),
        ({"group_id": [1, 2]}, "sequence 0: group_id is 1; a text is needed"),
        ({"groups": "a"}, r"add\(groups=…\): no such column; texts of a sequence are env_name"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, changes, message) -> None:
    with pytest.raises(DataError, match=message):
        record_one(tmp_path, **changes)


def test_a_loss_that_is_not_ours_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="loss: .*'grpo'.*give None for another loss"):
        TokenRecorder(tmp_path, loss="grpo")
    with pytest.raises(ConfigError, match="loss.clip_high: .*greater than or equal to 0"):
        TokenRecorder(tmp_path, loss={"type": "ppo_clip", "clip_high": -1})


def test_going_on_from_a_checkpoint_takes_back_what_came_after(tmp_path) -> None:
    with TokenRecorder(tmp_path) as recorder:
        for loss in (1.0, 2.0, 3.0):
            recorder.add(**ONE)
            recorder.finish_step(loss=loss)
    with pytest.raises(DataError, match="steps 0 to 2 already; give another folder, or first_step"):
        TokenRecorder(tmp_path)
    with TokenRecorder(tmp_path, first_step=1) as recorder:
        assert pellucid.export.open(tmp_path).steps == (0,)
        recorder.add(**ONE)
        recorder.finish_step(loss=4.0)
        assert recorder.step == 2
    logged = [json.loads(line) for line in (tmp_path / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["loss"]) for entry in logged] == [(0, 1.0), (1, 4.0)]
