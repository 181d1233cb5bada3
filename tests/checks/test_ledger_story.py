"""`pellucid ledger RUN --rollout ID`: why did these tokens not train?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.checks.ledger import run_ledger
from pellucid.config import DppoLossConfig
from pellucid.config.tools import LedgerSettings
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.errors import LedgerError
from pellucid.export import TokenExporter
from pellucid.loss import LossInputs, dppo_loss
from pellucid.model import TokenOutput
from pellucid.trainer.observer import observed_values

SEQ_LEN = 6


def turn(text: str, num_tokens: int, version: int = 0) -> dict[str, Any]:
    return {
        "text": text,
        "num_prompt_tokens": 1,
        "num_tokens": num_tokens,
        "finish_reason": "stop",
        "policy_versions": [[version, num_tokens]],
    }


def rollout(name: str, outcome: str, *turns: dict[str, Any], step: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group_id": name.partition("-")[0],
        "rollout_id": name,
        "sample_ids": [f"{name}-0"] if outcome == "sent" else [],
        "env_name": "math",
        "example_id": "7",
        "outcome": outcome,
        "reason": "",
        "error": None,
        "reward": 1.0,
        "advantage": None,
        "num_tokens": sum(each["num_tokens"] for each in turns),
        "stop_reason": "stop",
        "trajectory": list(turns),
        **changes,
    }


def save(run: Path, *rollouts: dict[str, Any]) -> Path:
    for each in rollouts:
        folder = run / "rollouts" / f"step_{each['step']}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "train_rollouts.jsonl").open("a") as file:
            file.write(json.dumps(each) + "\n")
    return run


def export(run: Path, *samples: TrainingSample) -> None:
    """Of step 0, cut to `SEQ_LEN`. The trainer is sure of every token: what was not likely is masked."""
    table = TokenTable.from_samples(list(samples)).truncate(SEQ_LEN)
    logprobs = torch.full((table.num_tokens,), -0.01)
    record = dppo_loss(LossInputs.of(to_tensors(table, torch.device("cpu")), logprobs), DppoLossConfig())
    exporter = TokenExporter(run)
    observed = observed_values(TokenOutput(logprobs, logprobs.abs()), record)
    exporter.add(table, observed, step=0, micro_step=0, denominator=1)
    exporter.finish(0)
    exporter.mark_stable(0)
    exporter.close()


def sample(name: str, logprobs: list[float], **columns: Any) -> TrainingSample:
    """A prompt of one token, and a completion with an advantage of 1."""
    ids = list(range(10, 10 + len(logprobs)))
    own = {"rollout_id": name, "group_id": name.partition("-")[0], "env_name": "math", "run_id": "run"}
    return TrainingSample.from_turn([1], ids, logprobs, advantage=1.0, **own, **columns)


def told(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run_ledger(LedgerSettings(run=run, rollout=name)) == 0
    return capsys.readouterr().out.splitlines()


def told_tokens(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What became of them."""
    prefix = "  tokens     "
    return [line.removeprefix(prefix) for line in told(run, name, capsys) if line.startswith(prefix)]


def test_a_rollout_without_an_advantage(tmp_path: Path, capsys) -> None:
    reason = "advantage is 0"
    dropped = rollout("g1-r0", "zero_advantage", turn("tsalb", 8), reason=reason, reward=0.0, advantage=0.0)
    save(tmp_path, dropped, rollout("g1-r1", "zero_advantage", turn("x", 3), reward=0.0))
    save(tmp_path, rollout("g2-r0", "sent", turn("y", 3)))
    assert told(tmp_path, "g1-r0", capsys) == [
        "rollout g1-r0 of math, example 7, group g1",
        "  sampled    8 tokens in 1 turn; policy version (tokens): 0 (8); stopped: stop",
        "             'tsalb'",
        "  reward     0; its group: 0 0",
        "  advantage  0",
        "  outcome    zero_advantage: advantage is 0 (settled at step 0)",
        "  tokens     8 zero_advantage: an advantage of 0: nothing to learn from",
        "",
    ]


def test_a_rollout_that_failed(tmp_path: Path, capsys) -> None:
    error = "TimeoutError: not finished within 5 s"
    failed = rollout(
        "g1-r0", "failed_rollout", turn("a", 2, 3), turn("b", 4, 4), reason=error, error=error, reward=None
    )
    save(tmp_path, failed, rollout("g1-r1", "sent", turn("c", 1), reward=0.25))
    assert told(tmp_path, "g1-r0", capsys) == [
        "rollout g1-r0 of math, example 7, group g1",
        "  sampled    6 tokens in 2 turns; policy version (tokens): 3 (2), 4 (4); stopped: stop",
        "             'a'",
        "             'b'",
        "  reward     -; its group: - 0.25",
        f"  outcome    failed_rollout: {error} (settled at step 0)",
        f"  error      {error}",
        "  tokens     6 failed_rollout: the environment raised or timed out",
        "",
    ]


def test_in_a_step_that_was_skipped_nothing_is_trained_or_masked(tmp_path: Path, capsys) -> None:
    save(tmp_path, rollout("g1-r0", "sent", turn("abc", 3)))
    export(tmp_path, sample("g1-r0", [-0.01, -3.0, -0.01], completion_mask=[True, True, False]))
    metrics = tmp_path / "metrics" / "trainer.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps({"step": 0, "skipped_steps": 1}) + "\n")
    assert told_tokens(tmp_path, "g1-r0", capsys) == [
        "1 untrainable: masked out by the environment, or in another branch",
        "2 skipped: in a step whose loss or gradient was not finite",
    ]


def test_of_one_that_was_sent_the_export_tells(tmp_path: Path, capsys) -> None:
    """8 tokens: the second may not train, the third was unlikely, the last three are beyond `SEQ_LEN`."""
    save(tmp_path, rollout("g1-r0", "sent", turn("text", 8), advantage=1.0))
    mask = [True, False, True, True, True, True, True, True]
    logprobs = [-0.02, -0.02, -2.0, *[-0.02] * 5]
    export(tmp_path, sample("g1-r0", logprobs, completion_mask=mask), sample("g1-r1", [-0.02] * 3))
    assert told(tmp_path, "g1-r0", capsys)[-8:] == [
        "  reward     1; its group: 1",
        "  advantage  1",
        "  outcome    sent to the trainer with the batch of step 0",
        "  tokens     1 untrainable: masked out by the environment, or in another branch",
        "  tokens     1 masked: outside of the trust region",
        "  tokens     3 trained: their gradient is in the weights",
        "  tokens     3 truncated: beyond seq_len",
        "",
    ]


def test_a_sample_that_no_export_has_is_not_taken_for_truncated(tmp_path: Path, capsys) -> None:
    """Two branches; no token of the second may train, so that it is not exported."""
    branches = ["g1-r0-0", "g1-r0-1"]
    save(tmp_path, rollout("g1-r0", "sent", turn("a", 3), turn("b", 4), sample_ids=branches))
    export(tmp_path, sample("g1-r0", [-0.02] * 3), sample("g1-r0", [-0.02] * 4, completion_mask=False))
    assert told_tokens(tmp_path, "g1-r0", capsys) == [
        "3 trained: their gradient is in the weights",
        "4 untrainable or truncated: samples without a trainable token are not exported",
    ]


def test_without_an_export_it_is_not_known(tmp_path: Path, capsys) -> None:
    save(tmp_path, rollout("g1-r0", "sent", turn("a", 3)), rollout("g2-r0", "sent", turn("b", 3), step=1))
    assert told_tokens(tmp_path, "g1-r0", capsys) == ["the run has no token export of that step"]
    export(tmp_path, sample("g1-r0", [-0.02] * 3))
    assert told_tokens(tmp_path, "g1-r0", capsys) == ["3 trained: their gradient is in the weights"]
    assert told_tokens(tmp_path, "g2-r0", capsys) == ["the run has no token export of that step"]


def test_a_group_is_the_stories_of_its_rollouts(tmp_path: Path, capsys) -> None:
    """`g1` is not `g11`, nor a word in the text of another rollout."""
    stale = {"reason": "oldest token of policy version 0 at step 9", "step": 9}
    save(
        tmp_path,
        rollout("g1-r0", "stale", turn("a", 3), reward=0.0, **stale),
        rollout("g1-r1", "failed_rollout", turn("b", 2), reward=None, error="ValueError: no", step=9),
        rollout("g11-r0", "stale", turn("g1", 4), **stale),
    )
    lines = told(tmp_path, "g1", capsys)
    assert [line for line in lines if line.startswith("rollout")] == [
        "rollout g1-r0 of math, example 7, group g1",
        "rollout g1-r1 of math, example 7, group g1",
    ]
    assert lines.count("  reward     0; its group: 0 -") == lines.count("  reward     -; its group: 0 -") == 1
    assert [line for line in lines if line.startswith("  tokens")] == [
        "  tokens     3 stale: sampled too many policy versions ago",
        "  tokens     2 failed_rollout: the environment raised or timed out",
    ]


def test_a_rollout_that_was_sampled_again_has_two_stories(tmp_path: Path, capsys) -> None:
    """What is rolled back is not among the group that was sampled in its place."""
    gone = "its batch did not survive"
    save(
        tmp_path,
        rollout("g1-r0", "rolled_back", turn("a", 5), reason=gone, step=3, reward=0.0),
        rollout("g1-r0", "sent", turn("b", 4), step=4, reward=0.5),
    )
    lines = told(tmp_path, "g1-r0", capsys)
    assert [line for line in lines if line.startswith(("  outcome", "  reward", "  tokens"))] == [
        "  reward     0; its group: 0",
        f"  outcome    rolled_back: {gone} (settled at step 3)",
        "  tokens     5 rolled_back: trained in a step that a resume discarded",
        "  reward     0.5; its group: 0.5",
        "  outcome    sent to the trainer with the batch of step 4",
        "  tokens     the run has no token export of that step",
    ]


def test_long_texts_and_groups_are_cut_short(tmp_path: Path, capsys) -> None:
    save(tmp_path, *(rollout(f"g1-r{number}", "stale", turn("x" * 300, 1)) for number in range(20)))
    lines = told(tmp_path, "g1-r19", capsys)
    assert lines[2] == f"             '{'x' * 200}…'"
    assert lines[3] == f"  reward     1; its group: {'1 ' * 16}…"


def test_json_has_the_rollout_its_group_and_its_states(tmp_path: Path, capsys) -> None:
    saved = rollout("g1-r0", "sent", turn("a", 3), advantage=0.5)
    save(tmp_path, saved, rollout("g1-r1", "filtered", turn("b", 2), reward=0.0))
    export(tmp_path, sample("g1-r0", [-0.02, -2.0, -0.02]))
    assert run_ledger(LedgerSettings(run=tmp_path, rollout="g1-r0", json=True)) == 0
    assert json.loads(capsys.readouterr().out) == [
        {**saved, "group": [1.0, 0.0], "states": {"masked": 1, "trained": 2}, "unknown": ""}
    ]


def test_an_id_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="holds no saved rollouts; give the folder of an rl run"):
        run_ledger(LedgerSettings(run=tmp_path, rollout="g1"))
    save(tmp_path, rollout("g11-r0", "stale", turn("g1", 1)))
    with pytest.raises(LedgerError, match="has no rollout or group 'g1' among its saved rollouts"):
        run_ledger(LedgerSettings(run=tmp_path, rollout="g1"))
