"""What a resume does to the saved rollouts: they tell what the ledger tells."""

from pathlib import Path

import pytest

from pellucid.ledger import reconcile
from small_run import RUN, Attempt, KilledError, Said, SmallRun, saved_tokens


def send_a_batch(run: SmallRun, *, killed_before: str | None = None) -> None:
    """Of the first group in flight: a rollout of 3 tokens, and one of 5 that is better."""
    run.go_on()
    first, second, *_ = run.orchestrator.inflight.values()
    assert first.group_id == second.group_id
    run.orchestrator.play(first, Attempt([Said(3)], reward=0.0))
    run.orchestrator.play(second, Attempt([Said(5)], reward=1.0))
    run.orchestrator.send(killed_before=killed_before)


def states_of(run: SmallRun, env: str) -> dict[str, int]:
    report = reconcile(run.ledger_dir)
    assert report.balanced
    return report.states[RUN, env]


def test_a_batch_that_was_never_there_is_lost_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    with pytest.raises(KilledError):
        send_a_batch(run, killed_before="batch")
    run.crash({"orchestrator"})
    for num_lost in (8, 0, 0):
        point = run.rewind()
        assert (point.next_batch, point.num_lost, point.num_rolled_back) == (0, num_lost, 0)
        assert saved_tokens(tmp_path) == {("math", "lost"): 8}
        assert states_of(run, "math") == {"lost": 8}


def test_batches_that_are_damaged_are_rolled_back_as_far_as_they_were_trained(tmp_path: Path) -> None:
    """Of three batches the first is trained; it is damaged, so that none of them survives."""
    run = SmallRun(tmp_path)
    send_a_batch(run)
    run.trainer.train()
    send_a_batch(run)
    send_a_batch(run)
    (tmp_path / "batches" / "step_0" / "batch.bin").write_bytes(b"damaged")
    run.crash({"trainer"})
    for num_lost, num_rolled_back in ((16, 8), (0, 0)):
        point = run.rewind()
        assert (point.next_batch, point.num_lost, point.num_rolled_back) == (0, num_lost, num_rolled_back)
        saved = {("math", "rolled_back"): 8, ("debate", "lost"): 8, ("math", "lost"): 8}
        assert saved_tokens(tmp_path) == saved
        assert states_of(run, "math") == {"rolled_back": 8, "lost": 8}
        assert states_of(run, "debate") == {"lost": 8}


def test_what_a_resumed_run_saves_is_cut_back_and_what_was_there_before_stays(tmp_path: Path) -> None:
    """The group that was left open is sampled again first: what is lost is of `math`, then of `debate`."""
    run = SmallRun(tmp_path)
    for _ in range(2):
        with pytest.raises(KilledError):
            send_a_batch(run, killed_before="batch")
        run.crash({"orchestrator"})
        run.rewind()
        run.start(resume=True)
    with pytest.raises(KilledError):
        send_a_batch(run, killed_before="snapshot")
    lost = {("math", "lost"): 8, ("debate", "lost"): 8}
    assert saved_tokens(tmp_path) == {**lost, ("math", "sent"): 8}
    run.crash({"orchestrator"})
    assert run.rewind().num_lost == 8
    assert saved_tokens(tmp_path) == lost
    assert (states_of(run, "math"), states_of(run, "debate")) == ({"lost": 16}, {"lost": 8})
