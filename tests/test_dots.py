"""The example that counts dots: pictures through engine, orchestrator and trainer, until the model sees."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

import warm
from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from tolerance import logprob_bound, mismatch_kl_bound

STEPS = 40
CHANCE = 0.25
EXAMPLE = Path(__file__).parents[1] / "examples" / "dots"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dots")
    paths = os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths}
    made = [sys.executable, str(EXAMPLE / "prepare.py"), str(folder)]
    subprocess.run(made, check=True, capture_output=True, env=env)
    flags = ["--model.name", str(folder / "model"), "--output-dir", str(folder / "rl")]
    flags += ["--max-async-level", "0"]  # so that each step samples with the weights of the one before
    command = ["rl", "@", str(EXAMPLE / "rl.toml"), *flags]
    result = warm.run(command, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "rl"


def test_the_model_learns_to_count(finished) -> None:
    """256 held-out pictures: a share of them is known to 0.03, the difference of two to 0.044."""
    evaluations = {each["step"]: each for each in read_metrics(finished / "metrics" / "eval.jsonl")}
    shares = [evaluations[step]["eval/held-out/avg@1"] for step in (0, STEPS)]
    assert shares[0] > CHANCE
    assert shares[1] - shares[0] > 2 * 0.044


def test_every_token_is_accounted_for(finished) -> None:
    report = reconcile(finished / "ledger")
    sampled = sum(report.sampled.values())
    assert report.verdict() == [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]


def test_exports_tell_the_tokens_of_pictures(finished) -> None:
    """Four tokens of each picture, none of which trains; the first batch has the engine's logprobs."""
    path = finished / "token_exports" / "step_0" / "rank_0.parquet"
    records = parquet.read_table(path, columns=["mm_token_type_ids", "loss_mask"]).to_pylist()
    assert len(records) == 64
    for record in records:
        types, trains = np.array(record["mm_token_type_ids"]), np.array(record["loss_mask"])
        assert types.sum() == 4 and not (types & trains).any()
    first = next(iter(read_metrics(finished / "metrics" / "trainer.jsonl")))
    rounding = logprob_bound(finished.parent / "model", length=256)
    assert first["mismatch_kl/all/mean"] < mismatch_kl_bound(rounding)
