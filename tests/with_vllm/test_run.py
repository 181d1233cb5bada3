"""`pellucid rl` with vLLM as its engine."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics

STEPS = 4


@pytest.mark.parametrize("flags", [(), ("--model.lora.rank", "8")], ids=["whole", "adapter"])
def test_trains_on_policy(vllm_python, vllm_model, tmp_path, flags) -> None:
    """No step runs ahead, so that what is left of a mismatch is rounding, after every weight update."""
    folder = tmp_path / "run"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pellucid.cli", "rl", "--model.name", str(vllm_model)),
            *("--output-dir", str(folder), "--max-steps", str(STEPS), "--max-async-level", "0"),
            *("--inference.backend", "vllm", "--inference.python", vllm_python),
            *("--inference.vllm.kv-cache-bytes", str(64 << 20)),
            *("--seq-len", "256", "--orchestrator.env", '[{"id": "reverse-text"}]'),
            *("--orchestrator.batch-size", "32", "--orchestrator.sampling.max-tokens", "12"),
            *("--orchestrator.sampling.temperature", "0.8", "--orchestrator.rollouts-per-example", "8"),
            *("--trainer.experimental.token-export", "--trainer.optim.lr", "3e-3"),
            *("--trainer.keep-weights", str(STEPS + 1), *flags),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = reconcile(folder / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]
    metrics = list(read_metrics(folder / "metrics" / "trainer.jsonl"))
    assert [each["step"] for each in metrics] == list(range(STEPS))
    for each in metrics:
        assert each["mismatch_kl/all/mean"] <= 1e-6
        path = folder / "token_exports" / f"step_{each['step']}" / "rank_0.jsonl"
        for record in map(json.loads, path.read_text().splitlines()):
            sampled_by = {
                v for v, own in zip(record["policy_versions"], record["sampled"], strict=True) if own
            }
            assert sampled_by == {each["step"]}
    name = "adapter_model.safetensors" if flags else "model.safetensors"
    first, last = (load_file(folder / "weights" / f"step_{step}" / name) for step in (1, STEPS))
    assert max((first[key] - last[key]).abs().max().item() for key in first) > 1e-3
    assert all(torch.isfinite(weight).all() for weight in last.values())
