"""`pellucid render` without a shared disk: a Slurm job runs for real, each machine in a folder of its own."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from manifests import objects
from pellucid.config.tools import RenderConfig
from pellucid.errors import ConfigError
from pellucid.guard import read_key
from pellucid.launch.preflight import free_port
from pellucid.launch.render import write_files
from pellucid.ledger.weights import read_weights_book
from pellucid.transport.zmq_link import allowed_keys, own_keys, trainer_key

NODES = ("127.0.0.1", "127.0.0.2")  # of Linux' loopback: a trainer, and a server


def config(folder: Path, scheduler: str, **changes) -> RenderConfig:
    values = {
        "output_dir": "outputs/demo",
        "max_steps": 3,
        "seq_len": 64,
        "model": {"name": "some/model"},
        "orchestrator": {
            "env": [{"id": "reverse-text"}],
            "batch_size": 8,
            "rollouts_per_example": 4,
            "sampling": {"max_tokens": 4},
        },
        "trainer": {"threads": 1},
        "inference": {"threads": 1},
        "transport": {"type": "zmq", "port": free_port("127.0.0.1", 0)},
        "weights": {"transport": "http", "port": free_port("127.0.0.1", 0)},
        "cluster": {"scheduler": scheduler, "port": free_port(NODES[1], 0)},
        "files": folder,
    }
    return RenderConfig.model_validate({**values, **changes})


STANDINS = {
    "scontrol": f"printf '%s\\n' {' '.join(NODES)}",
    "srun": 'while [[ $1 == --* ]]; do host=${1#--nodelist=}; shift; done; cd "$MACHINES/$host" && exec "$@"',
    "pellucid": f'exec {sys.executable} -m pellucid.cli "$@"',
    # One process needs no rendezvous; tests/launch/test_rendezvous.py has two.
    "torchrun": 'until [[ $1 == pellucid.cli ]]; do shift; done; shift; exec pellucid "$@"',
}


def submit(script: Path, root: Path) -> subprocess.CompletedProcess[str]:
    commands, machines = root / "bin", root / "machines"
    commands.mkdir()
    for name, body in STANDINS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    for folder in (*(machines / node for node in NODES), root / "tmp"):
        folder.mkdir(parents=True)
    return subprocess.run(
        ["bash", "-s"],  # the script's text is all that reaches the first machine
        input=script.read_text(),
        cwd=machines / NODES[0],
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "MACHINES": str(machines),
            "TMPDIR": str(root / "tmp"),
            "SLURM_JOB_NODELIST": "any",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_a_slurm_job_runs_on_machines_that_share_no_folder(tiny_model, tmp_path) -> None:
    toml, script = write_files(config(tmp_path / "files", "slurm", model={"name": str(tiny_model)}))
    toml.unlink()
    ended = submit(script, tmp_path)
    assert ended.returncode == 0, ended.stdout
    trainer, server = (tmp_path / "machines" / node / "outputs" for node in NODES)
    assert {each.name for each in trainer.iterdir()} == {"demo", "demo-orchestrator", "demo-all"}
    assert {each.name for each in server.iterdir()} == {"demo-inference-0"}
    books = {
        folder.name: {each.name for each in (folder / "ledger").iterdir()}
        for folder in (*trainer.iterdir(), *server.iterdir())
    }
    parts = [books[f"demo{part}"] for part in ("", "-orchestrator", "-inference-0")]
    assert [sorted(each) for each in parts] == [
        ["trainer.jsonl"],
        ["orchestrator.jsonl", "weights.jsonl"],
        ["inference.jsonl"],
    ]
    assert books["demo-all"] == set().union(*parts)
    assert "balanced" in ended.stdout
    verified = read_weights_book(trainer / "demo-all" / "ledger")
    assert verified is not None and verified.num_verified == verified.num_versions > 0
    assert {each.name for each in (trainer / "demo" / "weights").iterdir()} >= {"step_3"}
    assert list((tmp_path / "tmp").glob("tmp.*")) == []  # no key stays


def test_the_script_holds_no_key(tmp_path) -> None:
    _, script = write_files(config(tmp_path, "slurm"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.sbatch", "run.toml"]
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def mounts(pod: dict) -> dict[str, dict]:
    """The volumes of a pod by the path at which its container sees them."""
    (container,) = pod["containers"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    return {each["mountPath"]: volumes.get(each["name"], each) for each in container["volumeMounts"]}


def test_kubernetes_gives_each_part_a_volume_of_its_own(tmp_path) -> None:
    cluster = {"scheduler": "kubernetes", "inference_nodes": 2, "volume_size": "7Gi"}
    _, manifest, books, _ = write_files(config(tmp_path, "kubernetes", cluster=cluster))
    found = objects(manifest)
    servers = found["StatefulSet", "demo-inference"]["spec"]
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "7Gi"}}}
    assert servers["volumeClaimTemplates"] == [{"metadata": {"name": "run"}, "spec": claim}]
    assert found["PersistentVolumeClaim", "demo-orchestrator"]["spec"] == claim
    pods = {
        name: found["Job", f"demo-{name}"]["spec"]["template"]["spec"] for name in ("trainer", "orchestrator")
    }
    claims = {
        name: mounts(pod)["/pellucid"]["persistentVolumeClaim"]["claimName"] for name, pod in pods.items()
    }
    assert claims == {"trainer": "pellucid", "orchestrator": "demo-orchestrator"}
    assert mounts(servers["template"]["spec"])["/pellucid"]["name"] == "run"
    (job,) = objects(books).values()
    pod = job["spec"]["template"]["spec"]
    assert {path: each["persistentVolumeClaim"]["claimName"] for path, each in mounts(pod).items()} == {
        "/pellucid/trainer": "pellucid",
        "/pellucid/orchestrator": "demo-orchestrator",
        "/pellucid/inference-0": "run-demo-inference-0",
        "/pellucid/inference-1": "run-demo-inference-1",
    }


def test_the_books_job_puts_the_books_of_all_volumes_together(tmp_path) -> None:
    cluster = {"scheduler": "kubernetes", "inference_nodes": 2}
    *_, books, _ = write_files(config(tmp_path / "files", "kubernetes", cluster=cluster))
    (job,) = objects(books).values()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for part, name in (
        ("trainer", "trainer"),
        ("orchestrator", "orchestrator"),
        ("inference-0", "inference"),
        ("inference-1", "inference_1"),
    ):
        ledger = tmp_path / part / "outputs" / "demo" / "ledger"
        ledger.mkdir(parents=True)
        (ledger / f"{name}.jsonl").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pellucid").write_text('#!/bin/bash\necho "$@"; ls "$2/ledger"\n')
    (tmp_path / "bin" / "pellucid").chmod(0o755)
    ran = subprocess.run(
        container["command"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [
        "ledger",
        "trainer/outputs/demo-all",
        "inference.jsonl",
        "inference_1.jsonl",
        "orchestrator.jsonl",
        "trainer.jsonl",
    ]


def test_each_pod_sees_its_keys_and_they_fit(tmp_path) -> None:
    _, manifest, _, secret = write_files(config(tmp_path / "files", "kubernetes"))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    ((kind, name), kept) = next(iter(objects(secret).items()))
    assert (kind, name) == ("Secret", "demo-keys")
    found = objects(manifest)
    folders = {}
    for part in ("trainer", "orchestrator", "inference"):
        spec = found["StatefulSet" if part == "inference" else "Job", f"demo-{part}"]["spec"]["template"][
            "spec"
        ]
        mounted = mounts(spec)["/etc/pellucid-keys"]["secret"]
        assert (mounted["secretName"], mounted["defaultMode"]) == (name, 0o400)
        folders[part] = tmp_path / part
        folders[part].mkdir()
        for item in mounted["items"]:
            path = folders[part] / item["path"]
            path.write_text(kept["stringData"][item["key"]])
            path.chmod(0o400)
    assert [each.name for each in folders["inference"].iterdir()] == ["run.key"]
    assert not (folders["trainer"] / "orchestrator.secret").exists()
    assert not (folders["orchestrator"] / "trainer.secret").exists()
    assert allowed_keys(folders["trainer"]) == {own_keys(folders["orchestrator"], "orchestrator").public}
    assert trainer_key(folders["orchestrator"]) == own_keys(folders["trainer"], "trainer").public
    assert len({read_key(folder / "run.key", "key") for folder in folders.values()}) == 1
    configured = found["ConfigMap", "demo"]["data"]["run.toml"]
    assert not any(key.strip() in configured for key in kept["stringData"].values())


def test_keys_stay_when_files_are_written_again(tmp_path) -> None:
    *_, secret = write_files(config(tmp_path, "kubernetes"))
    before = secret.read_text()
    assert write_files(config(tmp_path, "kubernetes", max_steps=9))[-1].read_text() == before
    with pytest.raises(ConfigError, match=r"secret.yaml holds the keys of .*demo.*, not of .*other"):
        write_files(config(tmp_path, "kubernetes", run_id="other"))


def test_a_store_needs_no_port_of_the_trainer(tmp_path) -> None:
    weights = {"transport": "object-store", "store": "s3://bucket/demo"}
    _, manifest, *_ = write_files(config(tmp_path, "kubernetes", weights=weights))
    commands = [
        each["spec"]["template"]["spec"]["containers"][0]["command"][2]
        for each in yaml.safe_load_all(manifest.read_text())
        if each["kind"] in ("Job", "StatefulSet")
    ]
    assert [command.count("--weights.host") for command in commands] == [0, 0, 0]
    assert [command.count("--transport.host") for command in commands] == [0, 1, 1]
