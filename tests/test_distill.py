"""A tiny model learns from another one: with all parts in one process, and as a user starts it."""

import asyncio
import json
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from pellucid.config import ModelConfig, OrchestratorRunConfig, RLConfig, TrainerRunConfig
from pellucid.data import NOT_OURS, Completion, Example
from pellucid.data.tokenizer import load_tokenizer
from pellucid.inference.client import GenerateRequest
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread
from pellucid.ledger import Journal, Stage, reconcile
from pellucid.metrics import JsonlSink, read_metrics
from pellucid.model import load_policy, packed_layout
from pellucid.orchestrator import Orchestrator, Score, SingleTurnEnvironment
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.transport import MemoryChannel
from tolerance import logprob_bound, mismatch_kl_bound

STEPS = 16


class Letters(SingleTurnEnvironment):
    """Whatever is answered is worth nothing: all there is to learn from is the teacher."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "abcd"[index % 4]}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(0.0)


class EngineClient:
    """An engine on its thread as a client, without a server between them."""

    def __init__(self, model: Path, run_dir: Path, name: str) -> None:
        journal = Journal(run_dir / "ledger" / f"{name}.jsonl", Stage.INFERENCE)
        engine = Engine(load_policy(ModelConfig(name=str(model))), num_slots=64, max_length=64)
        sink = JsonlSink(run_dir / "metrics" / f"{name}.jsonl")
        self._thread = EngineThread(engine, journal, sink, on_failure=lambda error: None)
        self.update_weights = self._thread.update_weights
        self.abort = self._thread.abort
        self._thread.start()

    async def wait_until_ready(self) -> None:
        """It is."""

    async def watch(self) -> None:
        await asyncio.Event().wait()  # never

    async def generate(self, prompt_ids, params, account, request_id) -> Completion:
        asked = GenerateRequest(list(prompt_ids), params, account, request_id)
        [completion] = await self._thread.complete([asked])
        return completion

    async def score(self, token_ids, temperature, request_id) -> list[float]:
        return await self._thread.score(token_ids, temperature)

    def close(self) -> None:
        self._thread.stop()


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory, tiny_model) -> Path:
    """The student after a few steps on one text: it prefers some letters, and knows where they come."""
    folder = tmp_path_factory.mktemp("teacher")
    policy = load_policy(ModelConfig(name=str(tiny_model)), trainable=True)
    tokenizer = load_tokenizer(str(tiny_model))
    ids = torch.tensor(tokenizer.encode("abcabcabdabcabcabd" * 2, add_special_tokens=False))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    ones = torch.ones(len(ids))
    for _ in range(20):
        output = policy(ids, torch.arange(len(ids)), ones, packed_layout([len(ids)]))
        optimizer.zero_grad()
        (-output.logprobs[1:].mean()).backward()
        optimizer.step()
    policy.hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def distill(student: Path, teacher: Path, run_dir: Path, mode: str, **trainer: Any) -> list[dict[str, float]]:
    """The trainer's metrics of a run in which the ledger balances."""
    config = RLConfig.model_validate(
        {
            "output_dir": run_dir,
            "run_id": "run",
            "max_steps": STEPS,
            "seq_len": 2048,
            "model": {"name": str(student)},
            "orchestrator": {
                "env": [{"id": "x:Letters", "name": "letters"}],
                "batch_size": 32,
                "rollouts_per_example": 8,
                "sampling": {"max_tokens": 12},
                "teacher": {"mode": mode, "model": str(teacher), "port": 1},
            },
            "trainer": {"threads": 1, "optim": {"lr": 1e-2}, **trainer},
        }
    )
    channel = MemoryChannel()
    journal = Journal(run_dir / "ledger" / "trainer.jsonl", Stage.TRAINER)
    part, batches = config.part(TrainerRunConfig), OrchestratorBatches(channel)
    run = build_run(part, batches, journal, [], publishes=True)
    training = threading.Thread(target=train, args=[run], daemon=True)
    with ExitStack() as stack:
        policy = stack.enter_context(closing(EngineClient(student, run_dir, "inference")))
        taught_by = stack.enter_context(closing(EngineClient(teacher, run_dir, "inference_teacher")))
        orchestrator = Orchestrator(
            config.part(OrchestratorRunConfig),
            {"letters": Letters(seed=0)},
            load_tokenizer(str(student)),
            policy,
            channel,
            teacher=taught_by,
        )
        training.start()
        asyncio.run(orchestrator.run())
        training.join()
    run.close()
    report = reconcile(run_dir / "ledger")
    assert report.balanced and not report.running, report.differences
    return list(read_metrics(run_dir / "metrics" / "trainer.jsonl"))


def mean(records: list[dict[str, float]], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


def test_on_policy_distillation_makes_the_policy_agree_with_the_teacher(
    tiny_model, teacher_model, tmp_path
) -> None:
    """`teacher_kl` is the mean of log teacher − log π over what the policy samples: 0 once they agree."""
    records = distill(tiny_model, teacher_model, tmp_path, "opd")
    first, last = mean(records[:2], "teacher_kl/all"), mean(records[-4:], "teacher_kl/all")
    assert first < -0.2 and last > -0.09, (first, last)
    assert records[0]["mismatch_kl/all/mean"] <= mismatch_kl_bound(logprob_bound(tiny_model, 256))


def test_a_policy_learns_what_its_teacher_writes(tiny_model, teacher_model, tmp_path) -> None:
    records = distill(tiny_model, teacher_model, tmp_path, "sft")
    first, last = mean(records[:2], "nll/all"), mean(records[-4:], "nll/all")
    assert first > 4.5 and last < 4.15, (first, last)
    assert not any("mismatch_kl/all/mean" in record for record in records)


def test_the_teacher_term_of_rl_moves_the_policy_without_any_advantage(
    tiny_model, teacher_model, tmp_path
) -> None:
    loss = {"type": "dppo", "teacher_tau": 1.0}
    records = distill(tiny_model, teacher_model, tmp_path, "rl", loss=loss)
    assert mean(records[-4:], "teacher_kl/all") > -0.09 > mean(records[:2], "teacher_kl/all")


def command(student: Path, teacher: Path, run_dir: Path, mode: str) -> list[str]:
    return [
        *("rl", "--model.name", str(student)),
        *("--output-dir", str(run_dir), "--max-steps", "4", "--seq-len", "256"),
        *("--orchestrator.env", '[{"id": "reverse-text"}]', "--orchestrator.batch-size", "16"),
        *("--orchestrator.rollouts-per-example", "1", "--orchestrator.sampling.max-tokens", "8"),
        *("--orchestrator.teacher.mode", mode, "--orchestrator.teacher.model", str(teacher)),
        *("--trainer.experimental.token-export",),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["opd", "sft"])
def test_pellucid_rl_serves_the_teacher(tiny_model, teacher_model, tmp_path, mode) -> None:
    run_dir = tmp_path / "demo"
    result = warm.run(command(tiny_model, teacher_model, run_dir, mode))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "balanced: every one of the" in result.stdout
    policy, teacher = (
        list(read_metrics(run_dir / "metrics" / f"{name}.jsonl"))
        for name in ("inference", "inference_teacher")
    )
    exported = [
        json.loads(line)
        for path in (run_dir / "token_exports").glob("step_*/rank_0.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {record["training_mode"] for record in exported} == {mode}
    trained = sum(sum(record["loss_mask"]) for record in exported)
    states = reconcile(run_dir / "ledger").states["demo", "reverse-text"]
    assert trained == states["trained"] + states["masked"]
    if mode == "opd":
        assert sum(record["scored_tokens"] for record in teacher) >= sum(
            len(record["token_ids"]) for record in exported
        )
        assert not any(record["sampled_tokens"] for record in teacher)
        assert all(record["teacher_logprobs"][0] is None for record in exported)
        assert not any(None in record["teacher_logprobs"][1:] for record in exported)
    else:
        assert sum(record["sampled_tokens"] for record in teacher) == states.total()
        assert not any(record["sampled_tokens"] for record in policy)
        assert {version for record in exported for version in record["policy_versions"]} == {NOT_OURS}
