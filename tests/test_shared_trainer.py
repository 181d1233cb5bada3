"""A run with an adapter, in a trainer that serves many: the processes as a user starts them."""

import json
import signal

import pytest

import warm
from pellucid.metrics import read_metrics
from test_end_to_end import STEPS, command
from tolerance import logprob_bound, mismatch_kl_bound

pytestmark = pytest.mark.slow


def test_a_run_joins_a_trainer_and_ends_like_any_other(tiny_model, tmp_path) -> None:
    shared = tmp_path / "shared"
    lora = ("--model.lora.rank", "4")
    trainer = warm.start(
        [
            *("trainer", "--model.name", str(tiny_model), *lora),
            *("--output-dir", str(shared), "--seq-len", "256", "--trainer.many-runs.max-runs", "2"),
        ]
    )
    try:
        flags = (*lora, "--trainer.join", str(shared), "--max-async-level", "0", "--export")
        result = warm.run(command(tiny_model, tmp_path / "joined", *flags))
        assert result.returncode == 0, result.stdout + result.stderr
        assert "balanced: every one of the" in result.stdout
    finally:
        trainer.send_signal(signal.SIGTERM)
        log = trainer.communicate()[1]
    assert trainer.returncode == 128 + signal.SIGTERM
    assert f"run joined done at step {STEPS}" in log
    metrics = list(read_metrics(tmp_path / "joined" / "metrics" / "trainer.jsonl"))
    assert [record["step"] for record in metrics] == list(range(STEPS))
    # On-policy: what the engine adds to its weights is what the trainer computes beside them.
    allowed = mismatch_kl_bound(logprob_bound(tiny_model, 256))
    assert all(record["mismatch_kl/all/mean"] <= allowed for record in metrics)
    assert warm.run(["replay", str(tmp_path / "joined")]).returncode == 0
    config = json.loads((tmp_path / "joined" / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")
