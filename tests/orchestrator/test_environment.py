import asyncio
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from pellucid.config import EnvConfig, EvalConfig
from pellucid.data import Example
from pellucid.errors import ConfigError, RolloutError
from pellucid.orchestrator import Environment, Score, Session, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.built_in import ReverseText
from pellucid.orchestrator.environment import check_environment, draw_example
from pellucid.orchestrator.verdict import build_samples


def reverse_text(**args: object) -> Environment:
    return load_environment(EnvConfig(id="reverse-text", args=args), seed=3)


def test_examples_depend_on_seed_name_and_index_alone() -> None:
    words = [reverse_text().example(index).messages[0]["content"] for index in (5, 6, 5)]
    assert words[0] == words[2] != words[1]
    other_seed = load_environment(EnvConfig(id="reverse-text"), seed=4)
    other_name = load_environment(EnvConfig(id="reverse-text", name="twin"), seed=3)
    assert len({words[0], *(env.example(5).messages[0]["content"] for env in (other_seed, other_name))}) == 3


def test_words_have_the_configured_letters() -> None:
    words = [reverse_text(min_letters=2, max_letters=4).example(i).messages[0]["content"] for i in range(200)]
    assert {len(word) for word in words} == {2, 3, 4}
    assert all(word.isascii() and word.islower() and word.isalpha() for word in words)


@pytest.mark.parametrize(
    ("text", "reward", "exact"), [("maerts", 1.0, 1), ("maert", 10 / 11, 0), ("", 0.0, 0), ("xyz", 0.0, 0)]
)
def test_reward(text: str, reward: float, exact: int) -> None:
    example = Example("0", [{"role": "user", "content": "stream"}], {"answer": "maerts"})
    score = ReverseText(seed=0).reward(example, text)
    assert score.reward == pytest.approx(reward)
    assert score.metrics == {"exact": exact}


def test_single_turn_asks_once_and_scores_the_answer() -> None:
    class Echo:
        async def respond(self, messages: list[dict[str, str]]) -> str:
            return messages[0]["content"][::-1]

    environment = reverse_text()
    score = asyncio.run(environment.rollout(environment.example(0), Echo()))
    assert score.reward == 1.0


class Echo(SingleTurnEnvironment):
    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": str(index)}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(float(text == example.messages[0]["content"]))


class Waits(Echo):
    async def reward(self, example: Example, text: str) -> Score:
        await asyncio.sleep(0)
        return super().reward(example, text)


class Blocks(Echo):
    """Its reward does not come before another rollout has been sampled."""

    heavy_reward: ClassVar[bool] = True

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.sampled_later = threading.Event()

    def reward(self, example: Example, text: str) -> Score:
        return Score(float(self.sampled_later.wait(timeout=120)))


class Elsewhere(Echo):
    offloads_to: ClassVar = "processes"


def test_a_reward_may_wait(attempt) -> None:
    environment = Waits(seed=0)
    assert attempt(environment, environment.example(7), ["7"]).reward == 1.0
    assert attempt(environment, environment.example(7), ["8"]).reward == 0.0


def test_a_heavy_reward_does_not_hold_up_the_sampling_of_others() -> None:
    class Scripted:
        async def respond(self, messages: list[dict[str, str]]) -> str:
            return "7"

    class Later:
        async def respond(self, messages: list[dict[str, str]]) -> str:
            await asyncio.sleep(0.01)
            environment.sampled_later.set()
            return "8"

    environment = Blocks(seed=0)

    async def both() -> list[Score]:
        async with environment.serving():
            example = environment.example(0)
            return await asyncio.gather(
                environment.rollout(example, Scripted()), environment.rollout(example, Later())
            )

    assert [score.reward for score in asyncio.run(both())] == [1.0, 1.0]


def test_a_heavy_reward_is_no_coroutine() -> None:
    with pytest.raises(TypeError, match="Both: a heavy reward is offloaded; write it as `def`"):

        class Both(Waits):
            heavy_reward: ClassVar[bool] = True


def test_work_in_another_process_and_the_death_of_one() -> None:
    environment = Elsewhere(seed=0)

    async def offload() -> tuple[int, int]:
        async with environment.serving():
            first = await environment.offload(os.getpid)
            with pytest.raises(BrokenExecutor):
                await environment.offload(os._exit, 1)
            return first, await environment.offload(os.getpid)

    pids = asyncio.run(offload())
    assert os.getpid() not in pids and len(set(pids)) == 2


def test_an_environment_travels_to_another_process() -> None:
    copy = pickle.loads(pickle.dumps(ReverseText(seed=5)))
    assert copy.example(3) == ReverseText(seed=5).example(3)


class Stateful(Echo):
    def reward(self, example: Example, text: str) -> Score:
        if text == "fail":
            raise ValueError("no")
        return Score(0.0, state={"seen": {1: text}, "odd": {2}, "unwanted": object(), "reward": "mine"})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("x", {"seen": '{"1":"x"}', "odd": '"{2}"', "reward": '"mine"', "missing": "null"}),
        ("fail", {"seen": "null", "odd": "null", "reward": "null", "missing": "null"}),
    ],
)
def test_state_is_kept_as_far_as_it_is_asked_for(attempt, reply, expected) -> None:
    environment = Stateful(seed=0)
    columns = ["seen", "odd", "reward", "missing", "seen"]
    rollout = attempt(environment, environment.example(0), [reply], state_columns=columns)
    assert rollout.state == expected


class Talks(Environment):
    """The model plays its own judge."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "hi"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        answer = await session.sample(example.messages)
        verdict = await session.sample([{"role": "user", "content": answer.text}], trainable=False)
        return Score(float(verdict.text == "good"))


def test_turns_that_shall_not_train_are_sampled_but_masked(attempt) -> None:
    environment = Talks(seed=0)
    rollout = attempt(environment, environment.example(0), ["ho", "good"])
    own, judged = build_samples(rollout, run_id="run", advantage=1.0)
    assert rollout.reward == 1.0
    assert (own.num_sampled, own.num_trainable) == (3, 3)
    assert (judged.num_sampled, judged.num_trainable) == (5, 0)


def test_import_path() -> None:
    path = "pellucid.orchestrator.built_in:ReverseText"
    assert isinstance(load_environment(EnvConfig(id=path), seed=0), ReverseText)


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        (
            "reverse-txt",
            r"'reverse-txt' is not a built-in environment \(.*reverse-text\).*mean 'reverse-text'\?",
        ),
        ("no.such.module:Class", r"'no.such.module:Class' cannot be imported: No module named 'no'"),
        ("pellucid.errors:Nothing", r"cannot be imported: .*has no attribute 'Nothing'"),
        ("pellucid.errors:ConfigError", r"has to be a subclass of pellucid\.orchestrator\.Environment"),
    ],
)
def test_unknown_environment(env_id: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"orchestrator\.env\.id = .*{complaint}"):
        load_environment(EnvConfig(id=env_id), seed=0)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"letters": 4}, "unexpected keyword argument 'letters'"),
        ({"min_letters": 9}, "min_letters = 9 has to be at least 1 and at most max_letters = 8"),
    ],
)
def test_wrong_args_name_the_environment_and_the_args(args: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match="environment 'reverse-text' refuses") as caught:
        reverse_text(**args)
    assert complaint in str(caught.value) and str(args) in str(caught.value)


def test_orchestrator_does_without_torch() -> None:
    program = "import sys, pellucid.orchestrator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Unmakeable(ReverseText):
    def __init__(self, *, seed: int, path: str) -> None:
        raise FileNotFoundError(path)


def test_a_constructor_that_raises_is_named_with_its_line() -> None:
    config = EnvConfig(id=f"{__name__}:Unmakeable", args={"path": "words.txt"})
    with pytest.raises(ConfigError) as refused:
        load_environment(config, seed=0)
    assert str(refused.value).startswith(
        f"environment {config.id!r} cannot be made with orchestrator.env.args = "
    )
    assert (
        "{'path': 'words.txt'}: FileNotFoundError: words.txt (tests/orchestrator/test_environment.py:"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (EnvConfig(id="reverse-txt"), "orchestrator.env.id = 'reverse-txt' is not a built-in environment"),
        (
            EvalConfig(id="no.such:Env"),
            "orchestrator.eval.id = 'no.such:Env' cannot be imported: No module named",
        ),
        (
            EnvConfig(id="reverse-text", args={"letters": 4}),
            "refuses .*unexpected keyword argument 'letters'",
        ),
    ],
)
def test_what_cannot_work_is_known_beforehand(env: EnvConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_environment(env)


def test_nobody_elses_code_is_run_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_env.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    check_environment(EnvConfig(id="own_env:Env"))


class Answers(Echo):
    """Returns what it is told to."""

    answer: object = None

    def reward(self, example: Example, text: str) -> Score:
        return self.answer  # type: ignore[return-value]


WRITTEN = r"\(tests/orchestrator/test_environment.py:\d+\)"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (0.5, r"0\.5 \(float\); return a Score, such as Score\(1\.0\)"),
        (None, r"None \(NoneType\); return a Score, such as Score\(1\.0\)"),
        (Score("0.5"), r"reward = '0\.5' \(str\); return a finite number"),
        (Score(None), r"reward = None \(NoneType\); return a finite number"),
        (Score(float("nan")), r"reward = nan \(float\); return a finite number"),
        (Score(1.0, {"exact": "yes"}), r"metrics\['exact'\] = 'yes' \(str\); return a number"),
        (
            Score(1.0, [1.0]),
            r"Score\(.*\) \(Score\); return a Score whose metrics, state and weights are dicts by name",
        ),
        (
            Score(1.0, weights=[1.0]),
            r"Score\(.*\) \(Score\); return a Score whose metrics, state and weights are dicts by name",
        ),
        (
            Score(1.0, {"exact": 1}, weights={"exact": "half"}),
            r"weights\['exact'\] = 'half' \(str\); return a finite number",
        ),
        (
            Score(1.0, {"exact": 1}, weights={"exact": float("inf")}),
            r"weights\['exact'\] = inf \(float\); return a finite number",
        ),
        (
            Score(1.0, {"exact": 1}, weights={"brief": 0.5}),
            r"weights\['brief'\] = 0\.5 \(float\); return its value in metrics\['brief'\], too",
        ),
        ("x" * 200, r"'x{78}… \(str\); return a Score, such as Score\(1\.0\)"),
    ],
)
def test_a_wrong_answer_of_a_reward_is_named(attempt, answer, complaint) -> None:
    environment = Answers(seed=0)
    environment.answer = answer
    rollout = attempt(environment, environment.example(0), ["x"])
    assert rollout.error_type == "RolloutError"
    assert re.fullmatch(rf"RolloutError: Answers\.reward {WRITTEN} returned {complaint}", rollout.error)
    assert rollout.reward is None


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0), torch.tensor(1.0)])
def test_a_reward_may_be_a_number_of_any_kind(attempt, reward) -> None:
    environment = Answers(seed=0)
    environment.answer = Score(reward, {"same": reward})
    rollout = attempt(environment, environment.example(0), ["x"])
    assert (rollout.error, rollout.reward, rollout.metrics) == (None, 1.0, {"same": 1.0})
    assert type(rollout.reward) is float


class Together(Echo):
    """Scores groups with what it is told to."""

    requires_group_scoring: ClassVar[bool] = True
    answer: object = None

    async def score_group(self, rollouts):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, r"None \(NoneType\); return a list of 1 Scores, one per rollout"),
        ([], r"\[\] \(list\); return one Score per rollout, here 1, not 0"),
        ([1.0], r"1\.0 \(float\); return a Score, such as Score\(1\.0\)"),
    ],
)
def test_a_wrong_answer_of_group_scoring_is_named(attempt, answer, complaint) -> None:
    environment = Together(seed=0)
    environment.answer = answer
    rollout = attempt(environment, environment.example(0), ["x"])
    assert re.fullmatch(rf"RolloutError: Together\.score_group {WRITTEN} returned {complaint}", rollout.error)


class Draws(Echo):
    drawn: object = None

    def example(self, index: int) -> Example:
        return self.drawn  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("drawn", "complaint"),
    [
        ("hi", r"'hi' \(str\); return an Example\(example_id, messages, info\)"),
        (Example("0", "hi"), r"messages = 'hi' \(str\); return a list of dicts such as .*"),
        (Example("0", [{"content": "hi"}]), r"messages = .* \(list\); return a list of dicts such as .*"),
    ],
)
def test_a_wrong_example_is_named(drawn, complaint) -> None:
    environment = Draws(seed=0)
    environment.drawn = drawn
    with pytest.raises(RolloutError) as caught:
        draw_example(environment, "draws", 0)
    assert re.fullmatch(rf"Draws\.example {WRITTEN} returned {complaint}", str(caught.value))


class Fails(Echo):
    def reward(self, example: Example, text: str) -> Score:
        return example.info["answer"]


class Misuses(Environment):
    """A session takes messages, not text: pellucid raises, but this line is to be mended."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "hi"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        return Score(float(bool(await session.respond([1, 2, 3]))))


class Hangs(Echo):
    async def reward(self, example: Example, text: str) -> Score:
        await asyncio.sleep(3600)
        return Score(1.0)


@pytest.mark.parametrize(
    ("kind", "error_type", "line"),
    [
        (Fails, "KeyError", 'return example.info["answer"]'),
        (Misuses, "TypeError", "await session.respond([1, 2, 3])"),
        (Hangs, "TimeoutError", "await asyncio.sleep(3600)"),
    ],
)
def test_a_failure_names_the_line_of_the_environment(attempt, kind, error_type, line) -> None:
    environment = kind(seed=0)
    timeout_s = 0.05 if kind is Hangs else 60.0
    rollout = attempt(environment, environment.example(0), ["x"], timeout_s=timeout_s)
    place = re.fullmatch(rf"{error_type}: .*\((.*):(\d+)\)", rollout.error)
    assert rollout.error_type == error_type
    assert place is not None and Path(place[1]).samefile(__file__)
    assert line in Path(__file__).read_text().splitlines()[int(place[2]) - 1]
    assert line in rollout.traceback
