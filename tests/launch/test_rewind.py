"""What a resume does to the saved rollouts: they tell what the ledger tells."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pellucid.config import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from pellucid.errors import ConfigError, PayloadError, TransportError
from pellucid.launch.run_folder import rewind_rl, take_over
from pellucid.ledger import reconcile
from pellucid.ledger.settings import record_settings
from pellucid.orchestrator.snapshot import read_snapshot
from pellucid.transport import FilesystemSender, limits_of
from pellucid.transport.spool import Spool
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


def rl_config(folder: Path, **changes: Any) -> RLConfig:
    own = {
        "output_dir": folder,
        "run_id": RUN,
        "resume": True,
        "model": {"name": "some/model"},
        "orchestrator": {"env": [{"id": "x:Env"}], **changes.pop("orchestrator", {})},
        **changes,
    }
    return RLConfig.model_validate(own)


def resume(config: RLConfig) -> str:
    """What the launcher says."""
    out = io.StringIO()
    take_over(config, rewind_rl, Console(file=out, width=200))
    return out.getvalue()


def with_one_batch(folder: Path) -> SmallRun:
    """A run that sent a batch, has a rollout group of 8 tokens ready for the next one, and was killed."""
    run = SmallRun(folder, batch_size=2)
    send_a_batch(run)
    run.go_on()
    first, second, *_ = run.orchestrator.inflight.values()
    run.orchestrator.play(first, Attempt([Said(3)], reward=0.0))
    run.orchestrator.play(second, Attempt([Said(5)], reward=1.0))
    run.orchestrator.save()
    run.crash({"trainer", "orchestrator"})
    before = rl_config(folder)
    record_settings(before.part(TrainerRunConfig), "trainer", 0)
    record_settings(before.part(OrchestratorRunConfig), "orchestrator", 0)
    return run


def test_batches_are_kept_up_to_the_size_that_is_set(tmp_path: Path) -> None:
    with_one_batch(tmp_path)
    batch = tmp_path / "batches" / "step_0" / "batch.bin"
    huge = rl_config(tmp_path, transport={"type": "filesystem", "max_batch_bytes": 3 << 30})
    limits = limits_of(huge.transport)
    assert (limits.max_bytes, limits.max_tokens) == (3 << 30, 3 << 30)
    assert rewind_rl(huge).next_batch == 1 and batch.exists()
    with batch.open("ab") as file:
        file.truncate(5000)
    small = rl_config(tmp_path, transport={"type": "filesystem", "max_batch_bytes": 4096})
    assert rewind_rl(small).next_batch == 0 and not batch.exists()


def test_refusals_are_forgotten_with_the_batches_that_are_sampled_anew(tmp_path: Path) -> None:
    with_one_batch(tmp_path)
    (tmp_path / "batches" / "step_0" / "batch.bin").write_bytes(b"noise")
    with pytest.raises(PayloadError):
        Spool(tmp_path).take(0)
    with pytest.raises(TransportError, match="the trainer refused the batch of step 0"):
        FilesystemSender(tmp_path).check()
    assert rewind_rl(rl_config(tmp_path)).next_batch == 0
    FilesystemSender(tmp_path).check()


def test_changed_settings_are_told_with_the_step_they_hold_from(tmp_path: Path) -> None:
    with_one_batch(tmp_path)
    changed = rl_config(
        tmp_path,
        max_steps=200,
        trainer={"loss": {"type": "dppo", "kl_tau": 0.01}},
        orchestrator={"max_retries": 3},
    )
    assert resume(changed).splitlines()[1:] == [
        "max_steps: 100 → 200 from step 0",
        "orchestrator.max_retries: 0 → 3 from step 1",
        "trainer.loss.kl_tau: 0.001 → 0.01 from step 0",
    ]


def test_a_refused_change_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with_one_batch(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="model.name = 'other/model', but .* has 'some/model'"):
        resume(rl_config(tmp_path, model={"name": "other/model"}))
    (tmp_path / "configs" / "sft.toml").touch()
    with pytest.raises(ConfigError, match="holds a run of `pellucid sft`, which another command cannot"):
        resume(rl_config(tmp_path))
    (tmp_path / "configs" / "sft.toml").unlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "configs"} == {
        path: time for path, time in before.items() if path.name != "configs"
    }


def test_max_steps_below_what_is_done_is_refused(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    for _ in range(2):
        send_a_batch(run)
        run.trainer.train()
    run.trainer.save()
    run.crash({"orchestrator"})
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "trainer.log").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        resume(rl_config(tmp_path, max_steps=1))
    assert str(refused.value) == (
        f"max_steps = 1, but the run in output_dir = {tmp_path} has sampled 2 steps already; set max_steps "
        "to 2 to end it there, or higher to go on"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert resume(rl_config(tmp_path, max_steps=2)).startswith("resuming at step 2")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["trainer.1.log"]


@pytest.mark.parametrize(("advantage", "lost"), [("default", 0), ("rloo", 8)])
def test_groups_that_another_rule_has_judged_do_not_wait_for_the_next_batch(
    tmp_path: Path, advantage: str, lost: int
) -> None:
    """So that all groups of a batch were judged by the rule that is recorded for its step."""
    run = with_one_batch(tmp_path)
    out = resume(rl_config(tmp_path, orchestrator={"advantage": {"type": advantage}}))
    assert (f"{lost} sampled tokens were lost" in out) is bool(lost)
    held = read_snapshot(tmp_path).held()
    assert sum(held.values()) == 8 - lost
    assert reconcile(run.ledger_dir).balanced
