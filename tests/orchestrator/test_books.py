"""What is written when: books, then snapshot, then batch, beside the loop and in the order of the calls."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from pellucid.config import OrchestratorRunConfig
from pellucid.data import Completion, Example, Rollout, TokenTable, Turn
from pellucid.errors import DataError
from pellucid.ledger import Flow, State, read_journal
from pellucid.ledger.journal import end_of_mark
from pellucid.metrics import read_metrics
from pellucid.orchestrator.books import Books, Clerk
from pellucid.orchestrator.scheduler import RolloutLength, SchedulerState
from pellucid.orchestrator.snapshot import read_snapshot
from pellucid.orchestrator.verdict import Verdict, build_samples
from pellucid.transport import decode_batch

OWN = {"policy_version": 0, "time/batch_s": 1.0, "time/wait_weights_s": 0.0}


def configure(tmp_path: Path) -> OrchestratorRunConfig:
    run = {"output_dir": tmp_path, "run_id": "run", "model": {"name": "none"}, "max_steps": 4, "seq_len": 200}
    return OrchestratorRunConfig.model_validate(
        {**run, "orchestrator": {"env": [{"id": "x:Env", "name": "env"}]}}
    )


@contextmanager
def clerk_of(tmp_path: Path, sender: "Sender") -> Iterator[Clerk]:
    config = configure(tmp_path)
    books = Books(config)
    clerk = Clerk(config, books, sender)
    yield clerk
    clerk.close()
    books.close()


def group(name: str, num_tokens: int = 3) -> list[Verdict]:
    """One rollout, fit to be sent."""
    completion = Completion([7] * num_tokens, [-0.5] * num_tokens, [(0, num_tokens)], "stop")
    turn = Turn([5], completion, "text", [("user", 0, 1), ("assistant", 1, 1 + num_tokens)])
    example = Example(name, [{"role": "user", "content": "hi"}], info={"anything": object()})
    rollout = Rollout(f"{name}-r0", name, example, "env", 1.0, [turn], reward=1.0, metrics={"m": 0.5})
    samples = build_samples(rollout, run_id="run", advantage=0.25)
    rollout.forget_tokens()
    return [Verdict(rollout, Flow.SENT, "", 0.25, samples)]


def state(batches_sent: int, *ready: list[Verdict]) -> SchedulerState:
    return SchedulerState(
        batches_sent, {"env": 9}, 9, 0, [("env", 4)], ready, {"env": 0.5}, RolloutLength(7.5, 3)
    )


class Sender:
    """Looks at what is on disk when a batch arrives; waits until it may go on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.may_go_on = threading.Event()
        self.entered = threading.Event()
        self.seen: list[dict[str, Any]] = []

    def send(self, step: int, payload: bytes) -> None:
        self.entered.set()
        assert self.may_go_on.wait(120)
        snapshot = read_snapshot(self._run_dir)
        assert snapshot is not None
        journal = self._run_dir / "ledger" / "orchestrator.jsonl"
        self.seen.append(
            {
                "step": step,
                "thread": threading.current_thread() is not threading.main_thread(),
                "tokens": decode_batch(payload, sender="test").table.num_tokens,
                "batches_sent": snapshot.batches_sent,
                "journal_is_whole": end_of_mark(journal, snapshot.mark) == journal.stat().st_size,
                "sent": sum(entry.counts.get("sent", 0) for entry in read_journal(journal)),
                "saved": saved(self._run_dir, step),
                "metrics": [r["step"] for r in read_metrics(self._run_dir / "metrics/orchestrator.jsonl")],
            }
        )

    def check(self) -> None:
        """Nothing is refused."""

    def close(self) -> None:
        """Nothing to close."""


def saved(run_dir: Path, step: int) -> list[str]:
    path = run_dir / "rollouts" / f"step_{step}" / "train_rollouts.jsonl"
    return [orjson.loads(line)["rollout_id"] for line in path.read_bytes().splitlines()]


def test_books_and_snapshot_are_on_disk_before_the_batch_is_handed_over(tmp_path: Path) -> None:
    sender = Sender(tmp_path)

    async def write(clerk: Clerk) -> None:
        sending = asyncio.create_task(clerk.send(group("g0"), [group("g0")], state(1, group("g1")), OWN))
        while not sender.entered.is_set():
            await asyncio.sleep(0.001)  # the loop goes on while the clerk is at work
        later = asyncio.create_task(clerk.save([group("g2", 5)], state(1, group("g1"))))
        await asyncio.sleep(0.01)
        assert not later.done() and not (tmp_path / "rollouts" / "step_1").exists()
        sender.may_go_on.set()
        await sending
        await later

    with clerk_of(tmp_path, sender) as clerk:
        asyncio.run(write(clerk))
    [seen] = sender.seen
    assert seen == {
        **{"step": 0, "thread": True, "tokens": 4, "batches_sent": 1, "journal_is_whole": True},
        **{"sent": 3, "saved": ["g0-r0"], "metrics": [0]},
    }
    assert saved(tmp_path, 1) == ["g2-r0"]
    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None and snapshot.rollouts_bytes[1] > 0


def test_books_and_snapshot_survive_a_power_failure_once_the_batch_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of each file has been synced by then, in the order in which they rely on each other."""
    synced: dict[str, int] = {}
    monkeypatch.setattr(os, "fsync", lambda file: synced.update({_name_of(file): os.fstat(file).st_size}))

    class LateSender(Sender):
        def send(self, step: int, payload: bytes) -> None:
            files = [
                tmp_path / "rollouts" / "step_0" / "train_rollouts.jsonl",
                tmp_path / "ledger" / "orchestrator.jsonl",
                tmp_path / "checkpoints" / "orchestrator.bin",
            ]
            names = ["train_rollouts.jsonl", "orchestrator.jsonl", ".orchestrator.bin.partial"]
            assert list(synced) == [*names, "checkpoints"]
            assert [synced[name] for name in names] == [path.stat().st_size for path in files]
            super().send(step, payload)

    sender = LateSender(tmp_path)
    sender.may_go_on.set()
    with clerk_of(tmp_path, sender) as clerk:
        asyncio.run(clerk.send(group("g0"), [group("g0")], state(1), OWN))
    assert len(sender.seen) == 1


def _name_of(file: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{file}")).name


def test_a_damaged_snapshot_is_passed_over_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with clerk_of(tmp_path, Sender(tmp_path)) as clerk:
        for batches_sent in (3, 4):
            asyncio.run(clerk.save([], state(batches_sent)))
    newest = tmp_path / "checkpoints" / "orchestrator.bin"
    content = bytearray(newest.read_bytes())
    for damaged in (content[:-1], content[:20] + bytes([content[20] ^ 1]) + content[21:], b""):
        newest.write_bytes(damaged)
        snapshot = read_snapshot(tmp_path)
        assert snapshot is not None and (snapshot.batches_sent, snapshot.is_fallback) == (3, True)
    assert f"{newest} is damaged: its checksum is not what was written; the one before" in caplog.text
    newest.with_name("orchestrator.before.bin").write_bytes(b"also damaged")
    with pytest.raises(DataError, match="and there is none before it, so the run cannot be resumed"):
        read_snapshot(tmp_path)


def test_a_cancelled_caller_is_told_only_when_its_job_is_done(tmp_path: Path) -> None:
    sender = Sender(tmp_path)

    async def write(clerk: Clerk) -> None:
        first = asyncio.create_task(clerk.send(group("g0"), [group("g0")], state(1), OWN))
        second = asyncio.create_task(clerk.settle(1, [group("g1")]))
        while not sender.entered.is_set():
            await asyncio.sleep(0.001)
        first.cancel()
        second.cancel()  # it has not even begun
        await asyncio.sleep(0.01)
        assert not first.done() and not second.done()
        sender.may_go_on.set()
        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await task

    with clerk_of(tmp_path, sender) as clerk:
        asyncio.run(write(clerk))
    assert len(sender.seen) == 1 and saved(tmp_path, 1) == ["g1-r0"]


def test_a_failure_reaches_the_caller_and_no_batch_goes_out(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    sender.may_go_on.set()
    (tmp_path / "checkpoints").write_text("in the way")
    with clerk_of(tmp_path, sender) as clerk, pytest.raises(OSError, match="checkpoints"):
        asyncio.run(clerk.send(group("g0"), [group("g0")], state(1), OWN))
    assert sender.seen == []


def test_what_a_snapshot_holds_trains_as_it_would_have(tmp_path: Path) -> None:
    [sent], [failed] = group("g0"), group("g1")
    failed = Verdict(failed.rollout, State.FAILED_ROLLOUT, "broken", None)
    with clerk_of(tmp_path, Sender(tmp_path)) as clerk:
        asyncio.run(clerk.save([], state(3, [sent, failed])))

    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None and snapshot.held() == {("env", ""): 6}
    restored = snapshot.scheduler_state("renamed")
    assert (restored.batches_sent, restored.unfinished) == (3, [("env", 4)])
    assert (restored.credits, restored.rollout_length) == ({"env": 0.5}, RolloutLength(7.5, 3))
    [[again, also]] = restored.ready
    assert (also.outcome, also.reason, also.samples) == (State.FAILED_ROLLOUT, "broken", [])
    assert (again.outcome, again.advantage) == (Flow.SENT, 0.25)
    old, new = TokenTable.from_samples(sent.samples), TokenTable.from_samples(again.samples)
    assert new["run_id"].tolist() == ["renamed"]
    for name in old.columns.keys() - {"run_id", "role_spans"}:
        assert new[name].tolist() == old[name].tolist(), name
    assert [list(span) for span in new["role_spans"][0]] == [["user", 0, 1], ["assistant", 1, 4]]
    before, after = sent.rollout, again.rollout
    for name in ("rollout_id", "group_id", "env_name", "reward", "metrics", "num_sampled", "stop_reason"):
        assert getattr(after, name) == getattr(before, name), name
    assert [tuple(span) for span in after.turns[0].role_spans] == before.turns[0].role_spans
    assert (after.oldest_version, after.turns[0].text) == (0, "text")
    assert after.example == Example("g0", [{"role": "user", "content": "hi"}])
