"""What `make identical` compares, on folders as runs write them."""

import json

import numpy as np
from safetensors.numpy import save_file

import identical


def write_run(folder, *, loss=0.5, logprob=-1.25, weight=2.0, **more):
    metrics = [{"step": step, "time": loss, "loss": loss * step, "time/wait_s": loss} for step in range(3)]
    exports = [{"step": 1, "token_ids": [5, 6], "trainer_logprobs": [-0.5, logprob], **more}]
    for name, records in (
        ("metrics/trainer.jsonl", metrics),
        ("rollouts/step_1/train_rollouts.jsonl", [{"step": 1, "reward": 1.0}]),
        ("token_exports/step_1/rank_0.jsonl", exports),
        ("ledger.json", [{"all": {"sampled": 7}}]),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(json.dumps(record) for record in records))
    (folder / "model").mkdir()
    save_file({"head": np.array([[1.0, weight]], np.float32)}, folder / "model" / "model.safetensors")
    return folder


def test_equal_runs_are_the_same_whatever_the_clock_says(tmp_path) -> None:
    folders = [write_run(tmp_path / name) for name in ("base", "here")]
    assert identical.differences(*folders) == (3 + 3 + 2 + 3 + 1 + 1, [])


def test_what_differs_is_named_with_its_first_step_and_both_values(tmp_path) -> None:
    base = write_run(tmp_path / "base", loss=0.5, weight=0.0)
    here = write_run(tmp_path / "here", loss=0.75, logprob=-1.5, weight=-0.0, position_ids=[0, 1])
    _, lines = identical.differences(base, here)
    assert lines == [
        "metrics/trainer loss, step 1: is 0.5 in BASE, 0.75 here",
        "token_exports trainer_logprobs, step 1, rank_0 line 0: [1] is -1.25 in BASE, -1.5 here",
        "weights head, at the end: [3][1] is 0.0 in BASE, -0.0 here",
        'token_exports position_ids, step 1, rank_0 line 0: is "(nothing)" in BASE, [0, 1] here',
    ]
