"""Makes exports of a given size with plausible numbers, for `python -m benchmarks viewer`."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pellucid.data import TokenTable
from pellucid.data.schema import FIELDS
from pellucid.export.jsonl import JsonlRecords
from pellucid.export.parquet import ParquetSink
from pellucid.export.summary import NEEDED, StepSummary

VOCABULARY = 32_000
PROMPT_SHARE = 0.25
WRITE_RECORDS = 16

LEFT_OUT = {"teacher_logprobs", "temperatures", "sample_id"}


def make_batch(num_records: int, length: int, *, step: int = 0, seed: int = 0) -> TokenTable:
    """Records of one length: a quarter prompt, then a completion with a trainer a little off."""
    generator = np.random.default_rng(seed)
    size = num_records * length
    at = np.tile(np.arange(length, dtype=np.int32), num_records)
    sampled = at >= int(length * PROMPT_SHARE)
    inference = np.where(sampled, -generator.exponential(0.7, size), 0).astype(np.float32)
    trainer = np.minimum(inference + generator.normal(0, 0.02, size), -1e-6).astype(np.float32)
    advantage = generator.normal(0, 0.5, num_records).astype(np.float32)
    advantages = np.repeat(advantage, length)
    log_ratio = trainer - inference
    delta = np.exp(trainer) - np.exp(inference)
    masked = sampled & np.where(advantages > 0, delta > 0.05, delta < -0.05)
    token_loss = np.where(sampled & ~masked, -advantages * np.exp(log_ratio), 0).astype(np.float32)
    rows = np.arange(num_records)
    columns: dict[str, Any] = {
        "schema_version": np.ones(num_records, np.int64),
        "step": np.full(num_records, step, np.int64),
        "rank": np.zeros(num_records, np.int64),
        "micro_step": rows // 16,
        "micro_sequence_idx": rows % 16,
        "export_sequence_idx": rows,
        "denominator": np.full(num_records, int(sampled.sum()), np.int64),
        "token_ids": generator.zipf(1.3, size).clip(max=VOCABULARY - 1).astype(np.int64),
        "position_ids": at,
        "loss_mask": sampled,
        "sampled": sampled,
        "advantages": advantages,
        "rewards": np.repeat(np.clip(advantage + 0.5, 0, 1), length),
        "inference_logprobs": inference,
        "trainer_logprobs": trainer,
        "entropy": generator.gamma(1.5, 0.6, size).astype(np.float32),
        "log_importance_ratio": log_ratio,
        "importance_ratio": np.exp(log_ratio),
        "mismatch_kl": np.expm1(log_ratio) - log_ratio,
        "prob_delta": delta,
        "is_masked": masked,
        "is_masked_high": masked & (advantages > 0),
        "is_masked_low": masked & (advantages < 0),
        "token_loss": token_loss,
        "policy_versions": np.where(sampled, step, -1).astype(np.int64),
        "reward": np.clip(advantage + 0.5, 0, 1),
        "advantage": advantage,
    }
    words = {
        "env_name": ["math" if row % 2 else "code" for row in rows],
        "training_mode": ["rl"] * num_records,
        "example_id": [f"e{row // 8}" for row in rows],
        "group_id": [f"g{step}-{row // 8}" for row in rows],
        "rollout_id": [f"g{step}-{row // 8}-r{row % 8}" for row in rows],
        "run_id": ["bench"] * num_records,
        "precision": ["float32"] * num_records,
        "stop_reason": ["stop"] * num_records,
        "role_spans": [
            [["user", 0, int(length * PROMPT_SHARE)], ["assistant", int(length * PROMPT_SHARE), length]]
        ]
        * num_records,
    }
    for name, values in words.items():
        column = np.empty(num_records, object)
        column[:] = values
        columns[name] = column
    return TokenTable(np.full(num_records, length, np.int64), columns)


def write_file(path: Path, batch: TokenTable) -> None:
    """JSONL or Parquet, by the path's suffix."""
    fields = [field for field in FIELDS if field.name not in LEFT_OUT]
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = ParquetSink(path, fields) if path.suffix == ".parquet" else JsonlRecords(path, fields)
    for start in range(0, batch.num_sequences, WRITE_RECORDS):
        sink.write(batch.select(np.arange(start, min(start + WRITE_RECORDS, batch.num_sequences))))
    sink.close()


def write_run(folder: Path, batch: TokenTable, num_steps: int, suffix: str = ".parquet") -> None:
    """A finished run as training leaves it: a file per step, its summary, metrics and a ledger.

    Every step has all of its tokens in a file of its own; they are the same numbers in each.
    """
    summary = StepSummary()
    summary.add(TokenTable(batch.lengths, {name: batch.columns[name] for name in NEEDED}))
    for step in range(num_steps):
        own = TokenTable(batch.lengths, {**batch.columns, "step": np.full(batch.num_sequences, step)})
        path = folder / "token_exports" / f"step_{step}"
        write_file(path / f"rank_0{suffix}", own)
        (path / "summary.rank_0.json").write_bytes(orjson.dumps(summary.as_dict()))
        (path / "STABLE").touch()
    _write_metrics(folder / "metrics", num_steps)
    _write_ledger(folder / "ledger", num_steps, int(batch["sampled"].sum()))


def write_sweep(folder: Path, num_runs: int, num_steps: int) -> None:
    """Finished runs without exports, as a sweep over learning rates and seeds leaves them.

    Lines of metrics are as long as those of a real run, and rewards rise.
    """
    filler = {f"metric/{number}/all/mean": 0.123456789 for number in range(70)}
    for number in range(num_runs):
        run = folder / f"lr-{number % 5}-seed-{number}"
        optim = f"[trainer.optim]\nlr = {3e-4 * (1 + number % 5)}\n"
        others = "".join(f"[section_{each}]\nkey = 1\n" for each in range(60))
        (run / "configs" / "step_0").mkdir(parents=True)
        for path in ("rl.toml", "step_0/trainer.toml", "step_0/orchestrator.toml"):
            (run / "configs" / path).write_text(f"max_steps = {num_steps}\nseed = {number}\n{optim}{others}")
        (run / "logs").mkdir()
        (run / "logs" / "OUTCOME").write_text("finished")
        trained = [
            {"step": step, "time": 1e9 + step, "loss": -0.01, "total/trained_tokens": 900 * step, **filler}
            for step in range(num_steps)
        ]
        sampled = [
            {"step": step, "time": 1e9 + step, "reward/all": step / num_steps, **filler}
            for step in range(num_steps)
        ]
        _write_lines(run / "metrics" / "trainer.jsonl", trained)
        _write_lines(run / "metrics" / "orchestrator.jsonl", sampled)


def _write_metrics(folder: Path, num_steps: int) -> None:
    names = ["reward/all", "reward/math", "reward/code", "zero_advantage_groups/all", "loss", "grad_norm"]
    names += ["off_policy_level/all/mean", "off_policy_level/all/max"]
    values = np.random.default_rng(0).uniform(0, 1, (num_steps, len(names))).tolist()
    rows = [{"step": step, **dict(zip(names, values[step], strict=True))} for step in range(num_steps)]
    _write_lines(folder / "trainer.jsonl", rows)


def _write_ledger(folder: Path, num_steps: int, num_sampled: int) -> None:
    """Books that balance: a few tokens cancelled, without signal, masked; the others trained."""
    cancelled, flat, masked = num_sampled // 50, num_sampled // 20, num_sampled // 100
    delivered = num_sampled
    sent = delivered - flat
    counts = {
        "inference": {"sampled": delivered + cancelled, "delivered": delivered, "cancelled": cancelled},
        "orchestrator": {"received": delivered, "zero_advantage": flat, "sent": sent},
        "trainer": {"received": sent, "trained": sent - masked, "masked": masked, "computed": sent},
    }
    for stage, numbers in counts.items():
        rows = [
            {"stage": stage, "step": step, "run": "bench", "env": env, "counts": numbers}
            for step in range(num_steps)
            for env in ("math", "code")
        ]
        _write_lines(folder / f"{stage}.jsonl", [*rows, {"stage": stage, "step": num_steps, "closed": True}])


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def write_spans(folder: Path, num_steps: int) -> None:
    """Writes the spans and metrics of a run whose trainer waits for sampling in every step: 16 a step."""
    lines: dict[str, list[dict[str, Any]]] = {"trainer": [], "orchestrator": [], "inference": []}
    now = 1_760_000_000.0

    def add(process: str, name: str, start: float, end: float, step: int, **more: float) -> None:
        lines[process].append({"name": name, "start": now + start, "end": now + end, "step": step, **more})

    for process in lines:
        lines[process].append({"name": "start", "start": now, "end": now, "load": 64})
    for step in range(num_steps):
        for name, start, end in (
            ("wait", 0.0, 2.0),
            ("pack", 2.0, 2.01),
            ("compute", 2.01, 3.5),
            ("optimizer", 3.5, 3.6),
            ("publish", 3.6, 3.7),
            ("observe", 3.7, 3.75),
        ):
            add("trainer", name, start, end, step)
        for name, start, end in (
            ("wait_weights", 0.0, 0.1),
            ("sample", 0.1, 1.8),
            ("environment", 1.8, 1.9),
            ("send", 1.9, 2.0),
            ("sample", 1.9, 3.75),
            ("update", 3.7, 3.85),
        ):
            add("orchestrator", name, start, end, step + (start > 1.8), load=32.0)
        add("inference", "load", 0.0, 0.1, step)
        for start in (0.1, 1.2, 2.4):
            add("inference", "decode", start, start + 1.1, step, load=64.0 - 20 * start)
        now += 3.75
    for process, spans in lines.items():
        path = folder / "spans" / f"{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(orjson.dumps(span) + b"\n" for span in spans))
    (folder / "metrics").mkdir()
    metrics = [{"step": step, "time": now, "loss": 1 / (step + 1)} for step in range(num_steps)]
    (folder / "metrics" / "trainer.jsonl").write_bytes(
        b"".join(orjson.dumps(each) + b"\n" for each in metrics)
    )
