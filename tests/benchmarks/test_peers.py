"""What `make bench-peers` makes of its runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers_page
from benchmarks.curve import Curve, Work, machine_busy_s
from benchmarks.drawing import draw
from benchmarks.peers import RACES, Results, candidates, race_on
from benchmarks.peers_page import TRIAL, between, headline, load_runs, publish, summary, tables, winner
from benchmarks.peers_sides import TrlSettings, curve_of, require_same_prompts, trained_prompts
from pellucid.config import RLConfig
from pellucid.config.parse import parse
from pellucid.data import TokenTable, TrainingSample
from pellucid.transport.batch import Batch, encode_batch

ROOT = Path(__file__).parents[2]
TARGET = 0.899


def rising(name: str, step_s: float, seed: int = 3, setting: str = "") -> Curve:
    """0.5 for ten steps, then 1: the mean of ten is 0.9 with the eighth 1, which is step 18."""
    rewards = [0.5] * 10 + [1.0] * 12
    return Curve(
        name,
        seed,
        setting,
        startup_s=4.0,
        points=[(round(step_s * (step + 1), 3), reward) for step, reward in enumerate(rewards)],
        num_trained=21,
        trained_s=round(21.5 * step_s, 3),
        sampling=Work(2000, 4.0),
        training=Work(1800, 2.0),
        num_prompts=336,
        wall_s=20.0,
        cpu_s=31.4,
        other_cpu_s=5.0,
    )


def three_seeds() -> list[Curve]:
    """Ours takes 9.0, 9.9 and 8.1 s; TRL with two threads 22.5, 27 and 18 s, with one 36 s on the first."""
    ours = [rising("pellucid", step_s, seed, "as it is") for seed, step_s in enumerate((0.5, 0.55, 0.45))]
    best = [rising("TRL", step_s, seed, "2 threads") for seed, step_s in enumerate((1.25, 1.5, 1.0))]
    trials = [rising("TRL", 1.9, 0, f"{TRIAL}1 thread"), rising("TRL", 1.2, 0, f"{TRIAL}2 threads")]
    return [ours[0], *trials, rising("TRL", 2.0, 0, "1 thread"), best[0], ours[1], best[1], ours[2], best[2]]


def test_the_task_is_learned_when_the_mean_of_ten_steps_is_the_target(tmp_path) -> None:
    curve = rising("pellucid", 0.5)
    assert curve.smoothed()[0] == (5.0, 0.5) and curve.smoothed()[8] == (9.0, pytest.approx(0.9))
    assert curve.reached(TARGET) == (9.0, 18)
    assert curve.reached(1.1) is None and Curve("TRL", 0).reached(0.1) is None
    curve.save(tmp_path / "curve.json")
    assert Curve.load(tmp_path / "curve.json") == curve


def test_ours_is_read_from_the_metrics_of_its_three_processes(tmp_path) -> None:
    """The clock starts with the first sampling; records of an earlier run are not this one's."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    (metrics / "orchestrator.jsonl").write_text(
        '{"step": 0, "time": 90.0, "time/batch_s": 9.0, "reward/all": 0.1}\n'
        '{"step": 0, "time": 112.0, "time/batch_s": 2.0, "reward/all": 0.4}\n'
        '{"step": 1, "time": 112.5, "time/batch_s": 0.5, "reward/all": 0.6}\n'
    )
    assert curve_of(tmp_path, "pellucid", 0, started=100.0).num_trained == 0
    (metrics / "trainer.jsonl").write_text(
        '{"step": 0, "time": 112.4, "time/step_s": 2.4, "time/train_s": 0.25, '
        '"throughput/trained_tokens_per_s": 300.0}\n'
        '{"step": 1, "time": 113.0, "time/step_s": 0.5, "time/train_s": 0.5, '
        '"throughput/trained_tokens_per_s": 1400.0}\n'
    )
    (metrics / "inference.jsonl").write_text(
        '{"step": 0, "time": 112.0, "time/busy_s": 0.5, "sampled_tokens": 900}\n'
        '{"step": 1, "time": 113.5, "time/busy_s": 0.25, "sampled_tokens": 600}\n'
    )
    curve = curve_of(tmp_path, "pellucid", 0, started=100.0)
    assert curve.startup_s == 10.0 and curve.points == [(2.0, 0.4), (2.5, 0.6)]
    assert (curve.num_trained, curve.trained_s) == (2, 3.0) and curve.steps_per_minute == 40.0
    assert curve.sampling == Work(1500, 0.75) and curve.sampling.rate == 2000.0
    assert curve.training == Work(300 * 2.4 + 1400 * 0.5, 0.75)
    assert curve_of(tmp_path, "pellucid", 0, started=100.0, num_steps=1).num_trained == 1


def test_the_machine_is_busy_with_all_that_is_not_idle_or_a_disk(tmp_path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 50 9000 700 3 4 23 60 10\ncpu0 …\n")
    assert machine_busy_s(stat) == (100 + 20 + 50 + 3 + 4 + 23) / 100


def test_prompts_are_read_from_what_was_trained_and_compared_token_by_token(tmp_path) -> None:
    def sample(example: int, prompt: list[int], completion: list[int]) -> TrainingSample:
        logprobs = np.full(len(completion), -1.0, np.float32)
        return TrainingSample.from_turn(
            np.array(prompt),
            np.array(completion),
            logprobs,
            env_name="e",
            example_id=str(example),
            group_id=f"g{example}",
            rollout_id=f"g{example}-r0",
            sample_id=f"g{example}-r0-0",
            run_id="run",
            reward=1.0,
            advantage=0.5,
        )

    for step, samples in enumerate(
        ([sample(0, [5, 6], [7]), sample(1, [5, 8, 9], [4, 3])], [sample(2, [1], [2])])
    ):
        folder = tmp_path / "batches" / f"step_{step}"
        folder.mkdir(parents=True)
        payload = encode_batch(Batch("run", step, TokenTable.from_samples(samples)))
        (folder / "batch.bin").write_bytes(payload)
    ours = trained_prompts(tmp_path)
    assert ours == {0: [5, 6], 1: [5, 8, 9], 2: [1]}
    assert require_same_prompts(ours, {1: [5, 8, 9], 2: [1], 3: [4]}) == 2
    with pytest.raises(SystemExit, match=r"1 of 2 prompts differ, the first that of example 1: \[5, 8, 9\]"):
        require_same_prompts(ours, {0: [5, 6], 1: [5, 8, 10]})
    with pytest.raises(SystemExit, match="no example in common"):
        require_same_prompts(ours, {7: [1]})


def test_the_median_of_the_seeds_and_their_spread_are_told() -> None:
    curves = three_seeds()
    assert winner(curves, TARGET, "TRL") == "2 threads" and winner(curves, TARGET, "pellucid") == "as it is"
    assert winner(curves, 1.1, "TRL") is winner([], TARGET, "TRL") is None
    assert headline(curves, TARGET) == (
        "the demo's task reaches a reward of 0.899 in 9 s (8 to 10), with TRL's GRPO trainer in "
        "22 s (18 to 27), medians and range of 3 seeds"
    )
    assert "**2.50 ×** sooner" in summary(curves, TARGET)  # 22.5 / 9
    assert headline(curves[:-1], TARGET).endswith("25 s (22 to 27), medians and range of 2 seeds")
    assert headline(curves[:1], TARGET) == "" and headline([*curves[:1], *curves[3:4]], 1.1) == ""
    text = tables(curves, TARGET)
    assert "| 0 | pellucid | 4.0 s | 9.0 s | 2,304 | 500 tok/s | 900 tok/s | 31 s | 0.25 |" in text
    assert "| 1 | TRL | 4.0 s | 27.0 s | 2,304 | 500 tok/s | 900 tok/s | 31 s | 0.25 |" in text
    assert text.count("| 36.0 s |") == 1  # the setting that lost is in the second table alone
    assert (
        "| TRL | 1 thread | 1.900 s | 36.0 s |" in text and "| TRL | 2 threads | 1.200 s | 22.5 s |" in text
    )
    assert "| pellucid | as it is |  | 9.0 s |" in text
    assert "| pellucid | as it is |  | not within 11 s |" in tables(curves[:1], 1.1)


def test_steps_per_minute_are_told_where_there_is_no_target() -> None:
    text = tables([rising("pellucid", 0.5), rising("TRL", 2.0, setting="1 thread")], None)
    assert "| pellucid | 4.0 s | 117.21 | 500 tok/s | 900 tok/s | 31 s | 0.25 |" in text  # 60 · 21 / 10.75
    assert "| TRL (1 thread) | 4.0 s | 29.30 |" in text


def test_the_picture_labels_the_run_in_the_middle() -> None:
    picture = draw(peers_page.racing(three_seeds(), TARGET), TARGET)
    assert picture.count("<polyline") == 12 and picture.count("<circle") == 6
    assert picture.count("pellucid 9 s") == picture.count("TRL 22 s") == 1


def test_pages_are_made_anew_and_other_tasks_stay(tmp_path) -> None:
    for folder in ("benchmarks", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    kept = {"other": [rising("TRL", 1.0).as_dict()]}
    (tmp_path / peers_page.RUNS).write_text(json.dumps(kept))
    (tmp_path / peers_page.PAGE).write_text("before <!-- task -->old<!-- /task --> after")
    (tmp_path / peers_page.README).write_text("On two cores <!-- race -->old<!-- /race -->.")
    curves = three_seeds()
    publish("task", curves, TARGET, tmp_path)
    assert load_runs(tmp_path) == {"other": [rising("TRL", 1.0)], "task": curves}
    page = (tmp_path / peers_page.PAGE).read_text()
    assert page == f"before <!-- task -->\n\n{tables(curves, TARGET)}\n\n<!-- /task --> after"
    assert (tmp_path / peers_page.README).read_text() == (
        f"On two cores <!-- race -->{headline(curves, TARGET)}<!-- /race -->."
    )
    publish("task", curves[:1], TARGET, tmp_path)  # TRL has not run: README keeps what it has
    assert headline(curves, TARGET) in (tmp_path / peers_page.README).read_text()
    with pytest.raises(ValueError, match="<!-- missing -->"):
        between(page, "missing")


def test_figures_in_readme_and_docs_are_those_of_the_file() -> None:
    runs = load_runs(ROOT)
    assert runs.keys() == RACES.keys()
    page = (ROOT / peers_page.PAGE).read_text()
    for task, curves in runs.items():
        if curves:
            assert between(page, task).strip() == tables(curves, RACES[task].target)
    if sentence := headline(runs["reverse_text"], 0.9):
        assert between((ROOT / peers_page.README).read_text(), "race") == sentence


def test_what_runs_in_full_is_the_fastest_the_fastest_on_policy_and_that_with_two_iterations() -> None:
    one, two = TrlSettings(threads=1), TrlSettings(threads=2)
    ahead = TrlSettings(threads=2, steps_per_generation=3)
    trials = [
        (settings, rising("TRL", step_s)) for settings, step_s in ((one, 0.6), (two, 0.5), (ahead, 0.4))
    ]
    twice = TrlSettings(threads=2, num_iterations=2)
    assert candidates(trials, has_target=True) == [ahead, two, twice]
    assert candidates(trials[:2], has_target=True) == [two, twice]
    assert candidates(trials, has_target=False) == [ahead]
    assert str(twice) == "2 threads, 2 iterations" and str(one) == "1 thread"
    assert str(ahead) == "2 threads, 3 steps per generation"
    assert one.flags == ["--threads", "1", "--steps-per-generation", "1", "--num-iterations", "1"]


def test_runs_alternate_and_a_race_that_was_stopped_goes_on(tmp_path, monkeypatch) -> None:
    ran: list[tuple[str, int, str]] = []

    def ours(race, name, flags, model, seed, max_s) -> Curve:
        ran.append((name, seed, " ".join(flags)))
        return rising(name, 0.4 if flags else 0.5, seed)

    def theirs(race, settings, model, seed, max_s) -> Curve:
        ran.append(("TRL", seed, str(settings) if race.target else f"{TRIAL}{settings}"))
        return rising("TRL", 1.0 / settings.threads / settings.num_iterations, seed)

    monkeypatch.setattr("benchmarks.peers.train_with_pellucid", ours)
    monkeypatch.setattr("benchmarks.peers.train_with_trl", theirs)
    trials = [TrlSettings(threads=1), TrlSettings(threads=2)]
    settings = [("pellucid", "as it is", ()), ("pellucid", "wide", ("--wide",))]
    race = replace(RACES["reverse_text"], model=lambda: tmp_path, target=TARGET, trials=trials, ours=settings)
    shown: list[int] = []
    results = Results.open(tmp_path / "race.json")
    race_on(race, results, [0, 1], 300, lambda: shown.append(len(results.curves)))
    best = "2 threads, 2 iterations"
    expected = [
        ("pellucid", 0, ""),
        ("TRL", 0, "trial: 1 thread"),
        ("TRL", 0, "trial: 2 threads"),
        ("TRL", 0, "2 threads"),
        ("pellucid", 0, "--wide"),
        ("TRL", 0, best),
        ("pellucid", 1, "--wide"),
        ("TRL", 1, best),
    ]
    assert ran == expected and shown == list(range(1, 9))
    again = Results.open(tmp_path / "race.json")
    assert again.curves == results.curves
    del again.curves[-1]
    ran.clear()
    race_on(race, again, [0, 1], 300, lambda: None)
    assert ran == expected[-1:]


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_the_files_are_what_the_page_says(race) -> None:
    config = parse(RLConfig, ["@", str(ROOT / race.file)], prog="rl").config
    settings = config.orchestrator
    words = settings.batch_size // settings.rollouts_per_example
    page = (ROOT / peers_page.PAGE).read_text()
    assert f"{words} words × {settings.rollouts_per_example} rollouts" in page
    assert f"at most {settings.sampling.max_tokens} tokens each" in page
    assert config.max_steps == 1000 and config.trainer.ckpt.interval == 1000  # its batches stay
    if race.target:
        assert settings.batch_size == peers_page.SAMPLES_PER_STEP
        assert f"learning rate {config.trainer.optim.lr:.0e}".replace("e-0", "e-") in page
