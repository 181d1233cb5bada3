"""The end of a run in numbers, and as a curve."""

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pellucid.data.alarms import Bell
from pellucid.launch.console import artefacts, curve, format_duration, progress, rl_summary, token_lines
from pellucid.ledger import Difference, Report, Stage

ACCOUNT = ("demo", "reverse-text")


def report(*, differences: int = 0, running: tuple[Stage, ...] = ()) -> Report:
    return Report(
        {ACCOUNT: Counter(trained=900, masked=100)},
        {ACCOUNT: 1000},
        {ACCOUNT: Counter(computed=1650, saved=1650)},
        [Difference(ACCOUNT, "trainer", differences)] if differences else [],
        list(running),
    )


def test_a_rising_reward():
    assert curve([0, 1, 2, 4], width=8, height=2) == "4 ┤  ▁█\n0 ┤▁▅██"


def test_labels_are_aligned_and_only_on_the_outer_lines():
    assert curve([-0.5, 0.25, 1], width=20, height=3) == (
        "   1 ┤  █\n"
        "     │ ▅█\n"
        "-0.5 ┤▁██"
    )  # fmt: skip


def test_more_values_than_columns_are_averaged_on_the_same_scale():
    assert curve([0, 2, 4, 6, 8, 10], width=6, height=1) == "10 ┤▂▇"


def test_a_flat_reward_and_none():
    assert curve([0.5, 0.5], width=10, height=1) == "0.5 ┤▁▁"
    assert curve([], width=10, height=3) == ""


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(20, 100),
    st.integers(1, 8),
)
def test_a_curve_stays_in_its_box(values, width, height):
    lines = curve(values, width, height).split("\n")

    assert len(lines) == height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.34, "8.3 s"), (165, "2 min 45 s"), (3599.7, "1 h 00 min"), (3720, "1 h 02 min")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_only_artefacts_that_exist_are_listed(tmp_path):
    for step in (9, 10):
        (tmp_path / "weights" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "weights" / "step_9" / "STABLE").touch()
    (tmp_path / "logs").mkdir()

    assert artefacts(tmp_path) == [
        ("weights", str(tmp_path / "weights" / "step_9")),
        ("logs", str(tmp_path / "logs")),
        ("look at it", f"pellucid view {tmp_path}"),
    ]
    assert artefacts(tmp_path / "nowhere") == []


def test_the_panel_says_what_changed():
    out = io.StringIO()
    rewards = [0.5] * 10 + [0.75] * 80 + [1.0] * 10

    nowhere = Path("/does/not/exist")
    panel = rl_summary("demo", 165.0, 100, rewards, report(), nowhere, 120, num_packed=3300)
    Console(file=out, width=120).print(panel)

    text = out.getvalue()
    assert "duration  2 min 45 s" in text
    assert "steps     100" in text
    assert "reward    0.5000 (first 10) → 1.0000 (last 10)" in text
    assert "tokens    900 trained, 100 wasted (10.0%: sampled, not trained)" in text
    assert "          1,650 computed, 1,650 saved by sharing prompts" in text
    assert "tokens/s  20 through the trainer, prompts included, over the whole run" in text
    assert "ledger    balanced: every one of the 1,000 sampled tokens" in text
    assert max(map(len, text.splitlines())) == 100


def test_the_first_and_the_last_average_of_each_evaluation():
    records = [
        {"step": 0, "time": 1.0, "eval/a/avg@8": 0.39412, "eval/a/pass@1": 0.1, "eval/b/pass@1": 0.0},
        {"step": 50, "time": 2.0, "eval/a/avg@8": 0.6},
        {"step": 1200, "time": 3.0, "eval/a/avg@8": 0.93, "eval/b/avg@1": 0.25},
    ]
    out = io.StringIO()
    nowhere = Path("/does/not/exist")
    panel = rl_summary("demo", 1.0, 1200, [], report(), nowhere, 100, evaluations=records)
    Console(file=out, width=100).print(panel)

    assert "eval      a avg@8 0.3941 (version 0) → 0.9300 (version 1,200)" in out.getvalue()
    assert "eval      b avg@1 0.2500 (version 1,200)" in out.getvalue()


def test_only_what_was_sampled_to_train_on_can_be_wasted():
    other = ("demo", "other")
    states = {ACCOUNT: Counter(trained=60, eval=500, in_flight=7), other: Counter(masked=15, stale=25)}
    beside = {ACCOUNT: Counter(computed=80), other: Counter(saved=9)}

    assert token_lines(Report(states, {}, beside, [], [])) == [
        ("tokens", "60 trained, 40 wasted (40.0%: sampled, not trained)"),
        ("", "  25 stale: sampled too many policy versions ago"),
        ("", "  15 masked: outside of the trust region"),
        ("", "80 computed, 9 saved by sharing prompts"),
        ("", "500 sampled for evaluation"),
    ]


def test_a_resumed_run_tells_its_own_time_and_speed():
    out = io.StringIO()
    panel = rl_summary("demo", 20.0, 62, [], report(), Path("/no"), 100, num_packed=1000, is_resumed=True)
    Console(file=out, width=100).print(panel)

    assert "duration  20.0 s since the resume" in out.getvalue()
    assert "tokens/s  50 through the trainer, prompts included, since the resume" in out.getvalue()


def test_padding_is_told():
    padding = {("demo", ""): Counter(padding=10, computed=10), ACCOUNT: Counter(computed=60, saved=30)}
    lines = token_lines(Report({}, {}, padding, [], []))

    assert [text for _, text in lines[1:]] == [
        "70 computed, 30 saved by sharing prompts",
        "10 of the computed ones only fill up",
    ]


def test_the_token_lines_of_a_large_run_fit():
    states = {ACCOUNT: Counter(trained=10**13, stale=10**12, eval=10**12)}
    beside = {ACCOUNT: Counter(computed=10**14, saved=10**13, padding=10**13)}
    lines = token_lines(Report(states, {}, beside, [], []))

    assert len(lines) == 5 and max(len(text) for _, text in lines) <= 84
    assert token_lines(Report({}, {}, {}, [], []))[0][1].startswith("0 trained, 0 wasted (0.0%")


def test_waste_is_explained_by_reason_the_largest_first():
    states = {
        ACCOUNT: Counter(trained=60, masked=3, failed_rollout=5, in_flight=7),
        ("demo", "other"): Counter(zero_advantage=900, failed_rollout=10, eval=4),
    }
    lines = token_lines(Report(states, {}, {}, [], []))
    assert [text for _, text in lines[:4]] == [
        "60 trained, 918 wasted (93.9%: sampled, not trained)",
        "  900 zero_advantage: an advantage of 0: nothing to learn from",
        "  15 failed_rollout: the environment raised or timed out",
        "  3 masked: outside of the trust region",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([4.0], "4.0000 (first 1) → 4.0000 (last 1)"),
        ([4.0, 3.0, 2.0], "4.0000 (first 1) → 2.0000 (last 1)"),
        ([4.0, 3.0, 2.0, 1.0], "3.5000 (first 2) → 1.5000 (last 2)"),
    ],
)
def test_the_beginning_and_the_end_of_a_short_run_do_not_overlap(values, text):
    assert progress(1.0, len(values), "loss", values)[-1] == ("loss", text)


def test_alarms_are_in_the_summary(tmp_path):
    console = Console(file=io.StringIO(), width=100)
    Bell(tmp_path, {"frozen": "A copy."}).ring("frozen", 8, "share", value=0.0, threshold=0.0, example="")
    console.print(rl_summary("demo", 1.0, 9, [], report(), tmp_path, 100))
    assert "frozen at step 8: share: 0 (threshold 0). A copy." in console.file.getvalue()
