"""`pellucid env try`: an environment alone, with replies of one's own or of a model."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pellucid.cli import main
from pellucid.model.tiny import make_tiny_model

ENVIRONMENTS = """
import asyncio
from typing import ClassVar

from pellucid.data import Example
from pellucid.orchestrator import Environment, Score, SingleTurnEnvironment


class Echo(SingleTurnEnvironment):
    def __init__(self, *, seed, greeting="hi"):
        super().__init__(seed=seed)
        self.greeting = greeting

    def example(self, index):
        return Example(str(index), [{"role": "user", "content": f"{self.greeting} {index}"}])

    def reward(self, example, text):
        return Score(float(text == example.messages[0]["content"]), {"length": len(text)})


class Brief(Echo):
    requires_group_scoring: ClassVar[bool] = True

    async def score_group(self, rollouts):
        lengths = [len(rollout.turns[-1].text) for rollout in rollouts]
        return [Score(float(length == min(lengths))) for length in lengths]


class Unfair(Brief):
    async def score_group(self, rollouts):
        return [1.0, 0.0]


class Broken(Echo):
    def reward(self, example, text):
        return Score(example.info["answer"])


class Twice(Environment):
    def example(self, index):
        return Example(str(index), [{"role": "user", "content": "first"}])

    async def rollout(self, example, session):
        first = await session.respond(example.messages)
        then = [{"role": "assistant", "content": first}, {"role": "user", "content": "second"}]
        second = await session.respond([*example.messages, *then])
        await session.respond([{"role": "user", "content": "elsewhere"}])
        return Score(float(len(first) + len(second)))


class Hangs(Echo):
    async def reward(self, example, text):
        await asyncio.sleep(3600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of environments and nothing else."""
    (tmp_path / "own_envs.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_envs", raising=False)
    return tmp_path


def attempts(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["env", "try", *argv, "--json"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["env", "try", *argv])
    return code, "\n".join(line.strip("│").strip() for line in capsys.readouterr().out.splitlines())


def test_replies_are_scored_in_order_and_from_the_first_again(capsys, folder: Path) -> None:
    code, rollouts = attempts(capsys, "own_envs:Echo", "-n", "3", "--reply", "hi 0", "--reply=hey, [1]: é")
    assert code == 0
    assert [(each["example_id"], each["turns"][0]["reply"], each["reward"]) for each in rollouts] == [
        ("0", "hi 0", 1.0),
        ("1", "hey, [1]: é", 0.0),
        ("2", "hi 0", 0.0),
    ]
    assert rollouts[0]["turns"][0]["prompt"] == "<|im_start|>user\nhi 0<|im_end|>\n<|im_start|>assistant\n"
    assert [each["metrics"] for each in rollouts] == [{"length": 4.0}, {"length": 11.0}, {"length": 4.0}]
    assert [path.name for path in folder.iterdir()] == ["own_envs.py"]  # nothing is written


def test_args_start_and_several_rollouts_of_an_example(capsys) -> None:
    argv = ["--args", '{"greeting": "ho"}', "--start", "7", "-n", "1", "--rollouts-per-example", "2"]
    code, rollouts = attempts(capsys, "own_envs:Echo", *argv, "--reply", "ho 7")
    assert (code, [each["rollout_id"] for each in rollouts]) == (0, ["e7-r0", "e7-r1"])
    assert [each["messages"][0]["content"] for each in rollouts] == ["ho 7", "ho 7"]


@pytest.mark.parametrize(
    ("name", "content"), [("replies.txt", "hi 0\nhi 1\n"), ("replies.jsonl", '"hi 0"\n"hi\\n1"\n')]
)
def test_replies_from_a_file(capsys, folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    code, rollouts = attempts(capsys, "own_envs:Echo", "-n", "2", "--replies", name)
    expected = ["hi 0", "hi\n1" if name.endswith("jsonl") else "hi 1"]
    assert (code, [each["turns"][0]["reply"] for each in rollouts]) == (0, expected)


def test_the_panels_show_the_conversation_turn_by_turn(capsys) -> None:
    code, text = shown(
        capsys, "own_envs:Twice", "-n", "1", "--reply", "one", "--reply", "three", "--reply", "x"
    )
    assert code == 0
    said = re.findall(r"(?m)^(user|assistant) +<\|im_start\|>\1\n(.*)<\|im_end\|>$", text)
    assert said == [
        ("user", "first"),
        ("assistant", "one"),
        ("user", "second"),
        ("assistant", "three"),
        ("user", "elsewhere"),
        ("assistant", "x"),
    ]
    assert text.index("(another conversation)") > text.index("three")
    assert "example 0 · e0-r0 · reward 8" in text
    assert text.endswith("1 rollouts: 1 scored, 0 failed; reward mean 8, min 8, max 8")


def test_a_group_is_scored_as_in_a_run(capsys) -> None:
    code, rollouts = attempts(capsys, "own_envs:Brief", "-n", "1", "--reply", "long", "--reply", "s")
    assert (code, [each["reward"] for each in rollouts]) == (0, [0.0, 1.0])
    code, rollouts = attempts(capsys, "own_envs:Unfair", "-n", "1", "--reply", "a")
    assert (code, [each["reward"] for each in rollouts]) == (1, [None, None])
    assert re.match(
        r"RolloutError: Unfair.score_group \(own_envs.py:\d+\) returned 1.0", rollouts[1]["error"]
    )


def test_a_failure_is_shown_with_its_line_and_traceback(capsys) -> None:
    code, text = shown(capsys, "own_envs:Broken", "-n", "1", "--reply", "x")
    line = 1 + ENVIRONMENTS.splitlines().index('        return Score(example.info["answer"])')
    assert code == 1
    assert f"failed     KeyError: 'answer' (own_envs.py:{line})" in text
    assert "Traceback (most recent call last):" in text and 'return Score(example.info["answer"])' in text
    assert text.endswith("1 rollouts: 0 scored, 1 failed")


def test_an_environment_that_hangs_is_given_up(capsys) -> None:
    code, rollouts = attempts(capsys, "own_envs:Hangs", "-n", "1", "--reply", "x", "--timeout-s", "0.05")
    line = 1 + ENVIRONMENTS.splitlines().index("        await asyncio.sleep(3600)")
    assert code == 1
    assert rollouts[0]["error"] == f"TimeoutError: not finished within 0.05 s (own_envs.py:{line})"


def test_a_model_of_its_own_replies(capsys, tiny_model: Path, folder: Path) -> None:
    argv = ["own_envs:Echo", "-n", "1", "--rollouts-per-example", "2", "--max-tokens", "5"]
    code, rollouts = attempts(capsys, *argv, "--model", str(tiny_model))
    assert code == 0
    assert [each["turns"][0]["num_tokens"] for each in rollouts] == [5, 5]
    replies = [each["turns"][0]["reply"] for each in rollouts]
    again = attempts(capsys, *argv, "--model", str(tiny_model))[1]
    assert [each["turns"][0]["reply"] for each in again] == replies and len(set(replies)) == 2
    assert [path.name for path in folder.iterdir()] == ["own_envs.py"]


def test_a_model_with_a_short_context_replies_within_it(capsys, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1, max_length=128)
    code, rollouts = attempts(capsys, "own_envs:Echo", "-n", "1", "--model", str(tmp_path / "model"))
    assert code == 0
    assert 1 <= rollouts[0]["turns"][0]["num_tokens"] < 128


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "nobody answers the environment; give --reply TEXT or --replies FILE, --server URL, or --model"),
        (
            ["--reply", "x", "--server", "y"],
            "reply and server cannot both answer the environment; leave one out",
        ),
        (["--replies", "none.txt"], "--replies none.txt cannot be read: [Errno 2] No such file"),
        (
            ["--replies", "own_envs.py", "--reply", "x"],
            "reply and replies cannot both answer the environment",
        ),
        (["--args", '{"greting": 1}', "--reply", "x"], "unexpected keyword argument 'greting'"),
        (["--server", "http://127.0.0.1:1"], "http://127.0.0.1:1/health cannot be reached"),
    ],
)
def test_what_cannot_be_tried_is_refused(capsys, argv: list[str], complaint: str) -> None:
    assert main(["env", "try", "own_envs:Echo", *argv]) in (1, 2)
    assert complaint in capsys.readouterr().err
