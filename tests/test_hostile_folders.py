"""Damaged and hostile run folders, given to every command that reads one.

Whatever lies in a folder, a command says in one line what is wrong with which file, or shows what it can.
There is no traceback, nothing that a folder names is run, nobody waits for a pipe or takes memory for what
only claims to be large, and no control character reaches the terminal.
"""

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

import pellucid.export
from hostile import (
    added,
    bounded,
    edit,
    instead,
    linked_away,
    outside,
    removed,
    replaced,
    sparse,
    unix_socket,
)
from pellucid.cli import main
from pellucid.config import RLConfig
from pellucid.config.base import save
from pellucid.errors import PellucidError
from pellucid.orchestrator.records import FILE
from pellucid.transport import stable_steps
from pellucid.viewer.access import Exports
from pellucid.viewer.server import make_app
from pellucid.viewer.source import ServedRun
from small_run import MAX_STEPS, SOURCES, stop_after_four_steps
from token_exports import write_run

pytestmark = pytest.mark.slow

READERS = ("ledger", "story", "replay", "page", "terminal", "server", "rewind")
EXPORT = "token_exports/step_1/rank_0.jsonl"
NEWER = "99"
ESCAPE = "\x1b]0;pwned\x07\x1b[31m\x9b31m"


def settings_of(folder: Path) -> RLConfig:
    return RLConfig.model_validate(
        {
            "output_dir": folder,
            "run_id": "run",
            "model": {"name": "none"},
            "max_steps": MAX_STEPS,
            "seq_len": 200,
            "orchestrator": {"env": [{"id": "x:Env", "name": source.env_name} for source in SOURCES]},
        }
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of real parts that was stopped after four steps, with exports of two."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    stop_after_four_steps(folder)
    write_run(folder)
    export = pellucid.export.open(folder)
    losses = [
        float(np.nansum(export.step(step).column("token_loss"), dtype=np.float64)) / 3
        for step in export.steps
    ]
    metrics = [{"step": step, "loss": loss, "skipped_steps": 0} for step, loss in enumerate(losses)]
    (folder / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    config = settings_of(folder)
    for name in ("rl", "trainer", "orchestrator"):
        save(config, folder / "configs" / f"{name}.toml")
    main(["view", str(folder), "-o", str(folder.parent / "page.html")])  # what it imports is no damage
    return folder


SNAPSHOTS = ("checkpoints/orchestrator.bin", "checkpoints/orchestrator.before.bin")


def parquet(table: Any, **options: Any) -> Callable[[Path], object]:
    def write(run: Path) -> None:
        (run / EXPORT).unlink()
        pq.write_table(table, (run / EXPORT).with_suffix(".parquet"), **options)

    return write


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['HOSTILE_RAN']}",)


def deep(depth: int) -> bytes:
    return b'{"step": 1, "token_ids": ' + b"[" * depth + b"]" * depth + b"}\n"


def hostile_checkpoint(run: Path) -> None:
    for step in stable_steps(run / "checkpoints"):
        state = run / "checkpoints" / f"step_{step}" / "state"
        (state / ".metadata").write_bytes(pickle.dumps(Bomb()))
        (state / "weights").write_bytes(pickle.dumps(Bomb()))


def custom_code(run: Path) -> None:
    (run / "evil.py").write_text(f"open({os.environ['HOSTILE_RAN']!r}, 'w')\ndef loss(inputs): ...")
    text = '[model]\nname = "none"\n[trainer.loss]\ntype = "custom"\nimport_path = "evil:loss"\n'
    for path in (run / "configs").rglob("trainer.toml"):
        path.write_text(text)


def hostile_model(run: Path) -> None:
    """A tokenizer and a model with code of their own, and a template that reads a file."""
    folder = run / "model"
    folder.mkdir()
    code = f"open({os.environ['HOSTILE_RAN']!r}, 'w')\n"
    (folder / "evil.py").write_text(code)
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto, "tokenizer_class": "T", "chat_template": "{{ ''.__class__.__mro__ }}"})
    )


def names_with_escapes(run: Path) -> None:
    def rename(entry: dict[str, Any]) -> None:
        for key in ("env", "env_name", "rollout_id", "group_id", "example_id", "error", "run", "stop_reason"):
            if key in entry:
                entry[key] = f"{ESCAPE}[red]../../{entry[key]}"

    for path in [
        *run.glob("ledger/*.jsonl"),
        *run.glob("rollouts/*/*.jsonl"),
        *run.glob("token_exports/*/rank_*"),
    ]:
        edit(path, rename)
    for path in run.glob("token_exports/*/summary*"):
        path.unlink()


def grow(run: Path) -> None:
    def change(entry: dict[str, Any]) -> None:
        if "counts" in entry:
            entry["counts"] = dict.fromkeys(entry["counts"], 10**30)

    for path in run.glob("ledger/*.jsonl"):
        edit(path, change)


COMMANDS = {
    "ledger": ("ledger", "terminal", "server", "rewind"),
    "rollouts": ("ledger", "story", "replay", "rewind"),
    "metrics": ("story", "replay", "page", "server", "rewind"),
    "settings": ("replay", "page", "terminal", "rewind"),
    "model": ("replay", "page", "terminal"),
    "export": ("story", "replay", "page", "terminal", "server"),
    "checkpoint": ("replay", "server", "rewind"),
    "weights": ("replay", "server", "rewind"),
    "batches": ("replay", "server", "rewind"),
}
"""Those that read this part of a folder; of any other damage all of them."""


def commands_of(damage: str) -> tuple[str, ...]:
    return COMMANDS.get(damage.partition(":")[0], READERS)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda run: None,
    # --- the ledger
    "ledger: empty files": lambda run: [path.write_bytes(b"") for path in run.glob("ledger/*")],
    "ledger: a torn last line": added("ledger/trainer.jsonl", b'{"sta'),
    "ledger: binary": replaced("ledger/trainer.jsonl", bytes(range(256)) * 8),
    "ledger: NUL bytes": replaced("ledger/trainer.jsonl", b"\0" * 4096 + b"\n"),
    "ledger: not UTF-8": replaced("ledger/trainer.jsonl", b'{"stage":"trainer","env":"\xff\xfe"}\n'),
    "ledger: wrong types": replaced("ledger/trainer.jsonl", b'{"stage":"trainer","counts":[1]}\n'),
    "ledger: an unknown stage": replaced("ledger/trainer.jsonl", b'{"stage":"thief"}\n'),
    "ledger: deep nesting": replaced("ledger/trainer.jsonl", b"[" * 100_000 + b"\n"),
    "ledger: counts of 1e30": grow,
    "ledger: counts of 1e308": replaced(
        "ledger/trainer.jsonl", b'{"stage":"trainer","counts":{"received":1e308}}\n'
    ),
    "ledger: negative counts and steps": replaced(
        "ledger/trainer.jsonl", b'{"stage":"trainer","step":-3,"counts":{"received":-5}}\n'
    ),
    "ledger: a pipe": instead("ledger/trainer.jsonl", os.mkfifo),
    "ledger: a socket": instead("ledger/trainer.jsonl", unix_socket),
    "ledger: a device": instead("ledger/trainer.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "ledger: a folder": instead("ledger/trainer.jsonl", Path.mkdir),
    "ledger: a file for the folder": instead("ledger", Path.touch),
    "ledger: a loop of links": instead("ledger/trainer.jsonl", lambda path: path.symlink_to(path.name)),
    "ledger: a sparse gigabyte": instead("ledger/trainer.jsonl", sparse),
    "ledger: no permission": lambda run: (run / "ledger/trainer.jsonl").chmod(0),
    "ledger: missing": removed("ledger"),
    # --- saved rollouts
    "rollouts: binary": replaced(f"rollouts/step_1/{FILE}", b"\xff\0\n"),
    "rollouts: wrong types": replaced(f"rollouts/step_1/{FILE}", b'{"outcome": 5, "reward": "high"}\n'),
    "rollouts: numbers that are none": lambda run: edit(
        run / f"rollouts/step_1/{FILE}", lambda entry: entry.update(reward=float("nan"))
    ),
    "rollouts: a pipe": instead(f"rollouts/step_1/{FILE}", os.mkfifo),
    "rollouts: a folder": instead(f"rollouts/step_1/{FILE}", Path.mkdir),
    "rollouts: a sparse gigabyte": instead(f"rollouts/step_1/{FILE}", sparse),
    "rollouts: links out of the folder": linked_away(f"rollouts/step_*/{FILE}"),
    "rollouts: steps that are links": linked_away("rollouts/step_*"),
    "rollouts: odd step names": lambda run: [
        (run / "rollouts" / name).mkdir() for name in ("step_²", "step_-1", "step_007", "step_" + "9" * 200)
    ],
    # --- metrics
    "metrics: binary": replaced("metrics/trainer.jsonl", b"\xff\0\n"),
    "metrics: no objects": replaced("metrics/trainer.jsonl", b"[1]\n5\nnull\n"),
    "metrics: wrong types": replaced(
        "metrics/trainer.jsonl", b'{"step": "x", "loss": "y"}\n{"loss": []}\n{"step": {}, "loss": {}}\n'
    ),
    "metrics: huge numbers": replaced("metrics/trainer.jsonl", b'{"step": 1e308, "loss": 1e999}\n'),
    "metrics: a name of 10 MB": replaced(
        "metrics/trainer.jsonl", b'{"step": 1, "reward/' + b"x" * 10_000_000 + b'": 1}\n'
    ),
    "metrics: a pipe": instead("metrics/trainer.jsonl", os.mkfifo),
    "metrics: a file for the folder": instead("metrics", Path.touch),
    # --- settings
    "settings: no TOML": lambda run: [path.write_bytes(b"= [") for path in run.glob("configs/*.toml")],
    "settings: not UTF-8": lambda run: [path.write_bytes(b"\xff\xfe") for path in run.glob("configs/*.toml")],
    "settings: unknown keys": lambda run: [
        path.write_text("[trainer]\nwarp = 9\n") for path in run.glob("configs/*.toml")
    ],
    "settings: wrong types": lambda run: [
        path.write_text("trainer = 5\nmodel = [1]\norchestrator = 'x'\n")
        for path in run.glob("configs/*.toml")
    ],
    "settings: deep nesting": lambda run: [
        path.write_text("a = " + "[" * 50_000) for path in run.glob("configs/*.toml")
    ],
    "settings: pipes": lambda run: [
        instead(f"configs/{path.name}", os.mkfifo)(run) for path in list(run.glob("configs/*.toml"))
    ],
    "settings: missing": removed("configs"),
    "settings: code of their own": custom_code,
    "model: code of its own": hostile_model,
    # --- exports
    "export: truncated": lambda run: os.truncate(run / EXPORT, 700),
    "export: empty": replaced(EXPORT, b""),
    "export: binary": replaced(EXPORT, b"\x93NUMPY\0\xff\n" * 9),
    "export: not UTF-8": replaced(EXPORT, b'{"token_ids": [1], "env_name": "\xff"}\n'),
    "export: no object": replaced(EXPORT, b"[1, 2]\n"),
    "export: deep nesting": replaced(EXPORT, deep(50_000)),
    "export: one line of 50 MB": replaced(EXPORT, b'{"token_ids": "' + b"x" * 50_000_000 + b'"}\n'),
    "export: other lengths": lambda run: edit(run / EXPORT, lambda entry: entry["entropy"].append(1.0)),
    "export: wrong types": lambda run: edit(
        run / EXPORT, lambda entry: entry.update(token_ids=["a"], reward={}, env_name=5)
    ),
    "export: words for numbers": lambda run: edit(
        run / EXPORT, lambda entry: entry.update(reward="x", env_name=[1], rank=True, denominator={})
    ),
    "export: negative and huge numbers": lambda run: edit(
        run / EXPORT,
        lambda entry: entry.update(
            position_ids=[-5] * len(entry["token_ids"]),
            token_ids=[2**62] * len(entry["token_ids"]),
            policy_versions=[-(2**62)] * len(entry["token_ids"]),
            entropy=[1e308] * len(entry["token_ids"]),
            denominator=0,
        ),
    ),
    "export: a step of its own": lambda run: edit(run / EXPORT, lambda entry: entry.update(step=7)),
    "export: duplicate records": lambda run: (run / EXPORT).write_bytes((run / EXPORT).read_bytes() * 2),
    "export: no tokens": replaced(EXPORT, b'{"step": 1, "token_ids": []}\n'),
    "export: a newer schema": lambda run: edit(run / EXPORT, lambda entry: entry.update(schema_version=99)),
    "export: a pipe": instead(EXPORT, os.mkfifo),
    "export: a socket": instead(EXPORT, unix_socket),
    "export: a folder": instead(EXPORT, Path.mkdir),
    "export: a loop of links": instead(EXPORT, lambda path: path.symlink_to(path.name)),
    "export: a link to a device": instead(EXPORT, lambda path: path.symlink_to("/dev/zero")),
    "export: a link out of the folder": instead(EXPORT, lambda path: path.symlink_to("/etc/passwd")),
    "export: a sparse gigabyte": instead(EXPORT, sparse),
    "export: no permission": lambda run: (run / EXPORT).chmod(0),
    "export: missing": removed(EXPORT),
    "export: no steps": removed("token_exports"),
    "export: a file for the folder": instead("token_exports", Path.touch),
    "export: a link that leads nowhere": replaced(
        "token_exports/step_1/rank_9.link.json", b'{"path": "../../gone", "start": 0, "stop": 9}'
    ),
    "export: a link beyond its file": replaced(
        "token_exports/step_1/rank_9.link.json", b'{"path": "rank_0.jsonl", "start": 9e99, "stop": -4}'
    ),
    "export: a summary that is damaged": replaced("token_exports/step_1/summary.rank_0.json", b"\xff{"),
    "export: a summary of wrong types": replaced(
        "token_exports/step_1/summary.rank_0.json", b'{"version": 3, "parts": [{"env_name": 5}]}'
    ),
    "export: Parquet without a footer": lambda run: (
        (run / EXPORT).unlink(),
        (run / EXPORT).with_suffix(".parquet").write_bytes(b"PAR1" + b"x" * 99),
    ),
    "export: Parquet of something else": parquet(pa.table({"price": [1.0, 2.0]})),
    "export: Parquet with words for tokens": parquet(pa.table({"token_ids": ["a", "b"]})),
    "export: Parquet with other lengths": parquet(
        pa.table({"token_ids": [[1, 2]], "entropy": [[1.0]], "step": [1]})
    ),
    "export: Parquet with words for keys": parquet(pa.table({"token_ids": [[1, 2]], "step": ["x"]})),
    "export: Parquet of a newer schema": parquet(
        pa.table({"token_ids": [[1, 2]], "step": [1], "schema_version": [99]})
    ),
    "export: Parquet that unpacks to much": parquet(
        pa.table({"token_ids": [[0] * 5_000_000], "step": [1]}), compression="zstd"
    ),
    # --- checkpoints and weights
    "checkpoint: hostile pickles": hostile_checkpoint,
    "checkpoint: missing shards": lambda run: [
        shutil.rmtree(path) for path in run.glob("checkpoints/step_*/state")
    ],
    "checkpoint: wrong checksums": lambda run: [
        path.write_bytes(b"other") for path in run.glob("checkpoints/step_*/state/*")
    ],
    "checkpoint: a pipe for a shard": lambda run: [
        instead(str(path.relative_to(run)), os.mkfifo)(run)
        for path in list(run.glob("checkpoints/step_*/state/*"))
    ],
    "checkpoint: files beyond its folder": lambda run: [
        path.write_text(path.read_text().replace('"weights":', '"../../../../../etc/passwd":'))
        for path in run.glob("checkpoints/step_*/progress.json")
    ],
    "checkpoint: progress is damaged": lambda run: [
        path.write_bytes(b"{") for path in run.glob("checkpoints/step_*/progress.json")
    ],
    "checkpoint: a snapshot that is damaged": replaced("checkpoints/orchestrator.bin", b"\xc1" * 9),
    "checkpoint: a snapshot that is a pipe": instead("checkpoints/orchestrator.bin", os.mkfifo),
    "checkpoint: snapshots that are damaged": lambda run: [
        replaced(name, b"\xc1" * 9)(run) for name in SNAPSHOTS
    ],
    "checkpoint: snapshots that are pipes": lambda run: [instead(name, os.mkfifo)(run) for name in SNAPSHOTS],
    "checkpoint: a folder of links": lambda run: (
        shutil.move(run / "checkpoints", run.parent / "elsewhere"),
        (run / "checkpoints").symlink_to(run.parent / "elsewhere"),
    ),
    "weights: STABLE without files": lambda run: [
        path.unlink() for path in run.glob("weights/step_*/*.safetensors")
    ],
    "weights: pipes": lambda run: [
        instead(str(path.relative_to(run)), os.mkfifo)(run)
        for path in list(run.glob("weights/step_*/*.safetensors"))
    ],
    "weights: steps that are links": linked_away("weights/step_*"),
    "batches: damaged": lambda run: [
        path.write_bytes(b"\0" * 99) for path in run.glob("batches/step_*/*") if path.name != "STABLE"
    ],
    "batches: pipes": lambda run: [
        instead(str(path.relative_to(run)), os.mkfifo)(run)
        for path in list(run.glob("batches/step_*/*"))
        if path.name != "STABLE"
    ],
    # --- names
    "names: escape codes, markup, paths": names_with_escapes,
    "names: a run folder of a newer version": lambda run: [
        (run / "novel").mkdir(),
        *(edit(path, lambda entry: entry.update(novel=NEWER)) for path in run.glob("*/*.jsonl")),
    ],
    "a folder that is empty": lambda run: [shutil.rmtree(run), run.mkdir()],
    "a folder that is a file": lambda run: [shutil.rmtree(run), run.touch()],
    "a folder that is not there": shutil.rmtree,
    "a folder that is a pipe": lambda run: [shutil.rmtree(run), os.mkfifo(run)],
}


def serve(run: Path) -> int:
    """Every answer that a page asks for; the code is 1 where no viewer starts."""
    try:
        served = ServedRun(Exports(run))
    except PellucidError as error:  # as the command line does it
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    client = TestClient(make_app(served), base_url="http://127.0.0.1:7357")
    served.summarise_once()
    assert client.get("/").status_code == 200
    head = client.get("/api/run")
    assert head.status_code == 200
    shown = json.loads(head.content)
    print(*shown["notes"], sep="\n")
    codes = []
    for step in shown["held"]:
        for name in ("step", "rows", "chunk"):
            answer = client.get(f"/api/{name}/{step}" + ("/0" if name == "chunk" else ""))
            codes.append(answer.status_code)
            if answer.status_code != 200:
                print("error of a step:", answer.text)
    assert set(codes) <= {200, 404}
    assert client.post("/api/query", json={"ask": "find", "ids": [1]}).status_code in (200, 404)
    assert client.get("/api/pulse").status_code == 200
    return 0


def command(name: str, run: Path, settings: Path) -> int:
    match name:
        case "ledger":
            return main(["ledger", str(run)])
        case "story":
            return main(["ledger", str(run), "--rollout", "g0-r0"])
        case "replay":
            return main(["replay", str(run)])
        case "page":
            return main(["view", str(run), "-o", str(run.parent / "page.html")])
        case "terminal":
            return main(["view", str(run), "--terminal"])
        case "rewind":
            return main(["rewind", "@", str(settings)])
    return serve(run)


ERRORS: dict[str, dict[str, str]] = {
    "ledger: empty files": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
    },
    "ledger: binary": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: NUL bytes": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: not UTF-8": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: wrong types": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: an unknown stage": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: deep nesting": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: counts of 1e30": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: counts of 1e308": {
        "ledger": "is not a ledger entry",
        "rewind": "is not a ledger entry",
    },
    "ledger: a pipe": {
        "ledger": "is a pipe, socket or device, where a file is expected; was t",
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "ledger: a socket": {
        "ledger": "is a pipe, socket or device, where a file is expected; was t",
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "ledger: a device": {
        "ledger": "is a pipe, socket or device, where a file is expected; was t",
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "ledger: a folder": {
        "ledger": "is a folder, where a file is expected; was the folder copied",
        "rewind": "is a folder, where a file is expected; was the folder copied",
    },
    "ledger: a file for the folder": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
        "rewind": "cannot be read",
    },
    "ledger: a sparse gigabyte": {
        "ledger": "has more than 67,108,864 bytes, which no line has",
        "rewind": "has more than 67,108,864 bytes, which no line has",
    },
    "ledger: missing": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
    },
    "rollouts: binary": {
        "ledger": "is not a saved rollout",
        "replay": "is not JSON",
    },
    "rollouts: wrong types": {
        "ledger": "is not a saved rollout",
        "replay": "is not a saved rollout; copy the file again",
    },
    "rollouts: numbers that are none": {
        "ledger": "is not a saved rollout",
        "replay": "is not JSON",
    },
    "rollouts: a pipe": {
        "ledger": "is a pipe, socket or device, where a file is expected; was t",
        "story": "is a pipe, socket or device, where a file is expected; was t",
        "replay": "is a pipe, socket or device, where a file is expected; was t",
    },
    "rollouts: a folder": {
        "ledger": "is a folder, where a file is expected; was the folder copied",
        "story": "is a folder, where a file is expected; was the folder copied",
        "replay": "is a folder, where a file is expected; was the folder copied",
    },
    "rollouts: a sparse gigabyte": {
        "ledger": "has more than 67,108,864 bytes, which no line has",
        "story": "has more than 67,108,864 bytes, which no line has",
        "replay": "has more than 67,108,864 bytes, which no line has",
    },
    "rollouts: links out of the folder": {"rewind": "is a link, and a run changes only files of its own"},
    "rollouts: steps that are links": {"rewind": "is a link, and a run changes only files of its own"},
    "metrics: binary": {
        "story": "is damaged",
        "replay": "is not JSON",
        "rewind": "is damaged",
    },
    "metrics: no objects": {
        "story": "is no object with a step; delete that line",
        "replay": "has no step and loss that are numbers; delete that line",
        "rewind": "is no object with a step; delete that line",
    },
    "metrics: wrong types": {
        "story": "is no object with a step; delete that line",
        "replay": "has no step and loss that are numbers; delete that line",
        "rewind": "is no object with a step; delete that line",
    },
    "metrics: huge numbers": {
        "story": "is damaged",
        "replay": "is not JSON",
        "rewind": "is damaged",
    },
    "metrics: a pipe": {
        "story": "is a pipe, socket or device, where a file is expected; was t",
        "replay": "is a pipe, socket or device, where a file is expected; was t",
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "settings: no TOML": {
        "replay": "is damaged",
        "rewind": "is damaged",
    },
    "settings: not UTF-8": {
        "replay": "is damaged",
        "rewind": "is damaged",
    },
    "settings: wrong types": {
        "replay": "model is not what this version reads",
    },
    "settings: deep nesting": {
        "replay": "is damaged",
        "rewind": "is damaged",
    },
    "settings: pipes": {
        "replay": "is a pipe, socket or device, where a file is expected; was t",
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "export: binary": {
        "replay": "is not JSON",
    },
    "export: not UTF-8": {
        "replay": "is not JSON",
    },
    "export: no object": {
        "replay": "expected one JSON object per line, got list",
    },
    "export: deep nesting": {
        "replay": "is not JSON",
    },
    "export: one line of 50 MB": {
        "replay": 'expected token_ids to be a list of integers, got "xxxxxxxxxx',
    },
    "export: other lengths": {
        "replay": "expected entropy to be a list of 4 entries, one per token, g",
    },
    "export: wrong types": {
        "replay": 'expected token_ids to be a list of integers, got ["a"]',
    },
    "export: words for numbers": {
        "replay": "expected env_name to be text or null, got [1]",
    },
    "export: negative and huge numbers": {
        "replay": "expected position_ids to be at least 0, got -5",
    },
    "export: a pipe": {
        "replay": "is a pipe, socket or device, where a file is expected; was t",
    },
    "export: a socket": {
        "replay": "is a pipe, socket or device, where a file is expected; was t",
    },
    "export: a folder": {
        "replay": "is a folder, where a file is expected; was the folder copied",
    },
    "export: a loop of links": {
        "replay": "cannot be read",
    },
    "export: a link to a device": {
        "replay": "is a pipe, socket or device, where a file is expected; was t",
    },
    "export: a link out of the folder": {
        "replay": "is not JSON",
    },
    "export: a sparse gigabyte": {
        "replay": "is not JSON",
    },
    "export: missing": {
        "replay": "holds no .jsonl or .parquet token export; expected rank_R.js",
    },
    "export: no steps": {
        "replay": "holds no .jsonl or .parquet token export; expected rank_R.js",
    },
    "export: a file for the folder": {
        "replay": "holds no .jsonl or .parquet token export; expected rank_R.js",
    },
    "export: a link that leads nowhere": {
        "replay": "says that the records are in",
    },
    "export: a link beyond its file": {
        "replay": "does not say where the records are",
    },
    "export: Parquet of something else": {
        "replay": "expected one row per sequence with a list column token_ids,",
    },
    "export: Parquet with words for tokens": {
        "replay": "expected token_ids to be",
    },
    "export: Parquet with other lengths": {
        "replay": "row group 0",
    },
    "export: Parquet with words for keys": {
        "replay": "expected step to be",
    },
    "checkpoint: snapshots that are damaged": {
        "rewind": "is damaged: its checksum is not what was written, and there ",
    },
    "checkpoint: snapshots that are pipes": {
        "rewind": "is a pipe, socket or device, where a file is expected; was t",
    },
    "names: escape codes, markup, paths": {
        "story": "has no rollout or group 'g0-r0' among its saved rollouts; th",
    },
    "a folder that is empty": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
        "story": "holds no saved rollouts; give the folder of an rl run",
        "replay": "holds no .jsonl or .parquet token export; expected rank_R.js",
        "page": "holds no .jsonl or .parquet token export; expected rank_R.js",
        "terminal": "holds no .jsonl or .parquet token export; expected rank_R.js",
        "server": "holds no .jsonl or .parquet token export; expected rank_R.js",
        "rewind": "holds no run that could be resumed",
    },
    "a folder that is a file": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
        "story": "holds no saved rollouts; give the folder of an rl run",
        "replay": "expected a .jsonl or .parquet file, got no suffix",
        "page": "expected a .jsonl or .parquet file, got no suffix",
        "terminal": "expected a .jsonl or .parquet file, got no suffix",
        "server": "expected a .jsonl or .parquet file, got no suffix",
        "rewind": "is not a folder; choose another path",
    },
    "a folder that is not there": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
        "story": "holds no saved rollouts; give the folder of an rl run",
        "replay": "does not exist; give a run, token_exports or step folder, or",
        "page": "does not exist; give a run, token_exports or step folder, or",
        "terminal": "does not exist; give a run, token_exports or step folder, or",
        "server": "does not exist; give a run, token_exports or step folder, or",
        "rewind": "holds no run that could be resumed",
    },
    "a folder that is a pipe": {
        "ledger": "holds no ledger; give the folder of a run (the one with ledg",
        "story": "holds no saved rollouts; give the folder of an rl run",
        "replay": "does not exist; give a run, token_exports or step folder, or",
        "page": "does not exist; give a run, token_exports or step folder, or",
        "terminal": "does not exist; give a run, token_exports or step folder, or",
        "server": "does not exist; give a run, token_exports or step folder, or",
        "rewind": "is not a folder; choose another path",
    },
    "export: Parquet of a newer schema": {
        "replay": "schema_version = 99 is of a newer pellucid",
    },
    "export: a newer schema": {
        "replay": "schema_version = 99 is of a newer pellucid",
    },
}
"""What is said of it; a command that is not named goes on without the part that is damaged."""

CASES = [(damage, name) for damage in DAMAGES for name in commands_of(damage)]


@pytest.mark.parametrize(("damage", "name"), CASES, ids=[f"{damage}-{name}" for damage, name in CASES])
def test_no_folder_does_harm(whole, tmp_path, monkeypatch, capfd, damage, name) -> None:
    if os.geteuid() == 0 and "no permission" in damage:
        pytest.skip("root may read everything")
    monkeypatch.setenv("HOSTILE_RAN", str(tmp_path / "ran"))
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    settings = tmp_path / "rl.toml"
    save(settings_of(run), settings)
    DAMAGES[damage](run)
    before = outside(run)
    capfd.readouterr()
    with bounded():
        code = command(name, run, settings)
    told = capfd.readouterr()
    assert outside(run) == before
    assert not (tmp_path / "ran").exists()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told.out + told.err)
    expected = ERRORS.get(damage, {}).get(name)
    errors = [line for line in told.err.splitlines() if line.startswith("error: ")]
    if expected is None:
        assert code in ((0, 1) if name == "replay" else (0,)) and not errors, (
            told.err
        )  # its record is made up
    else:
        assert code in (1, 2) and len(errors) <= 1, told.err
        assert expected in (errors[0] if errors else told.out)
