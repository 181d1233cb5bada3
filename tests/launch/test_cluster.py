"""`pellucid render`: the Slurm script is run with stand-ins, the Kubernetes objects against their schema."""

import os
import shlex
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from manifests import objects
from pellucid.config import RLConfig
from pellucid.config.tools import RenderConfig
from pellucid.errors import ConfigError
from pellucid.launch.render import write_files

ZMQ = {"type": "zmq", "port": 5557}
OVER_HTTP = {"transport": "http", "port": 5558}


def config(folder: Path, scheduler: str, **changes) -> RenderConfig:
    values = {
        "output_dir": "outputs/demo",
        "model": {"name": "some/model"},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
        "trainer": {"model": {"cp": 2}},
        "cluster": {
            "scheduler": scheduler,
            "trainer_nodes": 2,
            "inference_nodes": 3,
            "gpus_per_node": 8,
        },
        "inference": {"backend": "vllm", "vllm": {"tensor_parallel_size": 8}},
        "files": folder,
    }
    return RenderConfig.model_validate({**values, **changes})


STANDINS = {
    "scontrol": "printf '%s\\n' t0 t1 i0 i1 i2",
    # Drops its own options, and says where the rest is run.
    "srun": 'while [[ $1 == --* ]]; do host=${1#--nodelist=}; shift; done; HOST=$host exec "$@"',
    "pellucid": 'echo "$HOST${CUDA_VISIBLE_DEVICES+ GPU $CUDA_VISIBLE_DEVICES} pellucid $*" >> "$CALLS"; '
    '[[ $1 != inference ]] || { echo $$ >> "$CALLS.servers"; exec sleep 600; }',
    # Ends once all servers were started: they are killed then.
    "torchrun": 'echo "$HOST torchrun $*" >> "$CALLS"; '
    'until [[ $(grep -c " pellucid inference" "$CALLS") == $SERVERS ]]; do sleep 0.05; done; '
    '[[ $HOST != "$FAILS" ]]',
}


def submit(script: Path, folder: Path, **environment: str) -> tuple[int, set[str]]:
    folder.mkdir()
    for name, body in STANDINS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    ended = subprocess.run(
        ["bash", str(script)],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "t[0-1],i[0-2]",
            "CALLS": str(calls),
            "FAILS": "nobody",
            "SERVERS": "3",
            "HOST": "here",
            **environment,
        },
        timeout=300,
    )
    return ended.returncode, set(calls.read_text().splitlines())


def test_slurm_starts_every_part_where_it_belongs(tmp_path) -> None:
    toml, script = write_files(config(tmp_path / "a folder", "slurm"))
    code, calls = submit(script, tmp_path / "bin")
    assert code == 0
    at = f" @ {toml}"
    addresses = '["http://i0:8000", "http://i1:8000", "http://i2:8000"]'
    torchrun = "torchrun --nnodes 2 --node-rank {} --nproc-per-node 8 --master-addr t0 --master-port 29500"
    assert calls == {
        *(
            f"i{n} pellucid inference --inference.host i{n} --inference.port 8000 --inference.replica {n}{at}"
            for n in range(3)
        ),
        f"t0 pellucid orchestrator --inference.servers {addresses}{at}",
        *(f"t{n} {torchrun.format(n)} -m pellucid.cli trainer{at}" for n in range(2)),
    }
    head = script.read_text().split("\nset ", 1)[0].splitlines()
    assert head == [
        "#!/bin/bash",
        "#SBATCH --job-name=demo",
        "#SBATCH --nodes=5",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
    ]


def test_weights_are_offered_by_the_first_machine_and_read_by_the_others(tmp_path) -> None:
    inference = {"backend": "vllm", "vllm": {"tensor_parallel_size": 8}, "key_file": "run.key"}
    toml, script = write_files(config(tmp_path / "files", "slurm", weights=OVER_HTTP, inference=inference))
    assert tomllib.loads(toml.read_text())["weights"]["key_file"] == "run.key"
    code, calls = submit(script, tmp_path / "bin")
    assert code == 0
    flags = {
        call.split()[0] + call.split()[2]: call.partition("--weights.host ")[2].split()[0] for call in calls
    }
    assert flags == {
        **{f"i{n}inference": "t0" for n in range(3)},
        "t0orchestrator": "t0",
        **{f"t{n}--nnodes": "0.0.0.0" for n in range(2)},
    }
    _, path = write_files(config(tmp_path / "pods", "kubernetes", weights=OVER_HTTP))
    specs = {
        name: each["spec"] for (kind, name), each in objects(path).items() if kind in ("StatefulSet", "Job")
    }
    hosts = {
        name: spec["template"]["spec"]["containers"][0]["command"][2]
        .partition("--weights.host ")[2]
        .split()[0]
        for name, spec in specs.items()
    }
    assert hosts == {
        "demo-inference": "demo-trainer-0.demo-trainer",
        "demo-orchestrator": "demo-trainer-0.demo-trainer",
        "demo-trainer": "0.0.0.0",
    }


def test_a_part_that_fails_ends_the_job_and_the_servers(tmp_path) -> None:
    _, script = write_files(config(tmp_path / "files", "slurm"))
    code, _ = submit(script, tmp_path / "bin", FAILS="t1")
    assert code == 1
    servers = [Path(f"/proc/{pid}") for pid in (tmp_path / "bin" / "calls.servers").read_text().split()]
    assert len(servers) == 3
    deadline = time.monotonic() + 60
    while any("sleep" in name_of(server) for server in servers):
        assert time.monotonic() < deadline, "a server goes on after its job"
        time.sleep(0.01)


def name_of(process: Path) -> str:
    """Returns "" for a process that has ended, and for one whose end nobody has asked for."""
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_a_job_that_is_started_again_goes_on(tmp_path) -> None:
    toml, script = write_files(config(tmp_path / "files", "slurm"))
    _, calls = submit(script, tmp_path / "bin", SLURM_RESTART_COUNT="1")
    assert f"here pellucid rewind @ {toml}" in calls
    others = [call for call in calls if "rewind" not in call]
    assert len(others) == 6 and all("--resume" in call for call in others)


def test_kubernetes_objects_fit_their_schema_and_each_other(tmp_path) -> None:
    toml, path = write_files(config(tmp_path, "kubernetes"))
    found = objects(path)
    assert found.keys() == {
        ("ConfigMap", "demo"),
        ("Service", "demo-inference"),
        ("Service", "demo-trainer"),
        ("StatefulSet", "demo-inference"),
        ("Job", "demo-orchestrator"),
        ("Job", "demo-trainer"),
    }
    assert found["ConfigMap", "demo"]["data"]["run.toml"] == toml.read_text()
    servers, trainer = found["StatefulSet", "demo-inference"]["spec"], found["Job", "demo-trainer"]["spec"]
    assert (servers["replicas"], trainer["completions"], trainer["parallelism"]) == (3, 2, 2)
    for kind, name in (("StatefulSet", "demo-inference"), ("Job", "demo-trainer")):
        selector = found["Service", name]["spec"]["selector"]
        labels = found[kind, name]["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
        (container,) = found[kind, name]["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    (container,) = trainer["template"]["spec"]["containers"]
    words = shlex.split(container["command"][2])
    assert words[words.index("--master-addr") + 1] == "demo-trainer-0.demo-trainer"
    assert trainer["template"]["spec"]["subdomain"] == "demo-trainer"
    (container,) = found["Job", "demo-orchestrator"]["spec"]["template"]["spec"]["containers"]
    assert '"http://demo-inference-2.demo-inference:8000"' in container["command"][2]


def test_a_pod_that_is_started_again_resumes(tmp_path) -> None:
    """Kubernetes starts it with the same command, in a folder that has books in it."""
    _, path = write_files(config(tmp_path, "kubernetes"))
    specs = [each["spec"] for each in objects(path).values() if each["kind"] in ("StatefulSet", "Job")]
    commands = [spec["template"]["spec"]["containers"][0]["command"][2] for spec in specs]
    assert len(commands) == 3 and all("--resume" in shlex.split(command) for command in commands)
    jobs = [spec for spec in specs if "completions" in spec]
    assert {job["template"]["spec"]["restartPolicy"] for job in jobs} == {"OnFailure"}
    assert sorted(job["backoffLimit"] for job in jobs) == [6, 12]


def test_what_is_written_is_the_run(tmp_path) -> None:
    toml, _ = write_files(config(tmp_path, "slurm"))
    run = RLConfig.model_validate(tomllib.loads(toml.read_text()))
    assert (run.trainer.num_processes, run.trainer.model.cp, run.run_name) == (16, 2, "demo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"model": {"cp": 3}}}, "trainer.model.cp = 3 does not divide the 16 process"),
        ({"inference": {"servers": ["http://a:1"]}}, "inference.servers is for servers that you start"),
        ({"weights": {"transport": "http"}}, 'weights.port = 0 with weights.transport = "http"'),
        ({"transport": ZMQ}, 'transport.type = "zmq" with weights.transport = "filesystem": batches need no'),
        ({"transport": {"type": "zmq"}, "weights": OVER_HTTP}, "transport.port = 0 with transport.type"),
        ({"transport": {**ZMQ, "keys": "k"}, "weights": OVER_HTTP}, "transport.keys = 'k': without a shared"),
        (
            {"transport": ZMQ, "weights": {**OVER_HTTP, "key_file": "run.key"}},
            "weights.key_file = 'run.key': without a shared disk",
        ),
        (
            {"transport": ZMQ, "weights": OVER_HTTP, "output_dir": "/scratch/demo"},
            "output_dir = '/scratch/demo' is on no volume of the pods",
        ),
        ({"run_id": "9 lives"}, "run_id = '9 lives' cannot name Kubernetes objects"),
    ],
)
def test_what_cannot_be_started_is_refused(tmp_path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        write_files(config(tmp_path, "kubernetes", **changes))


def test_a_machine_with_more_gpus_than_a_server_needs_has_several_servers(tmp_path) -> None:
    inference = {"backend": "vllm", "vllm": {"tensor_parallel_size": 4}}
    toml, script = write_files(config(tmp_path / "files", "slurm", inference=inference))
    code, calls = submit(script, tmp_path / "bin", SERVERS="6")
    assert code == 0
    at = f" @ {toml}"
    assert {call for call in calls if " inference " in call} == {
        f"i{number // 2} GPU {'4,5,6,7' if number % 2 else '0,1,2,3'} pellucid inference --inference.host "
        f"i{number // 2} --inference.port {8000 + number % 2} --inference.replica {number}{at}"
        for number in range(6)
    }
    addresses = ", ".join(f'"http://i{number // 2}:{8000 + number % 2}"' for number in range(6))
    assert f"t0 pellucid orchestrator --inference.servers [{addresses}]{at}" in calls


@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (1, 4)])
def test_pods_have_a_server_each_with_its_gpus(tmp_path, sizes) -> None:
    size, num_ranks = sizes
    vllm = {"tensor_parallel_size": size, "data_parallel_size": num_ranks}
    inference = {"backend": "vllm", "vllm": vllm}
    _, manifest = write_files(config(tmp_path / "files", "kubernetes", inference=inference))
    found = objects(manifest)
    servers = found["StatefulSet", "demo-inference"]["spec"]
    assert servers["replicas"] == 6
    (container,) = servers["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    (container,) = found["Job", "demo-trainer"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "--nproc-per-node 8 " in container["command"][2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": {"trainer": 6}}, "gpus.trainer = 6 divides the GPUs of one machine"),
        (
            {"inference": {"backend": "vllm", "vllm": {"tensor_parallel_size": 16}}},
            "inference.vllm.tensor_parallel_size = 16 exceeds cluster.gpus_per_node = 8",
        ),
        (
            {"inference": {"backend": "vllm", "vllm": {"tensor_parallel_size": 4, "data_parallel_size": 4}}},
            "inference.vllm.tensor_parallel_size = 4 × inference.vllm.data_parallel_size = 4 exceeds "
            "cluster.gpus_per_node = 8",
        ),
    ],
)
def test_gpus_that_no_machine_has_are_refused(tmp_path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        write_files(config(tmp_path, "slurm", **changes))


def test_more_processes_than_gpus_are_refused(tmp_path) -> None:
    cluster = {"scheduler": "slurm", "processes_per_node": 16, "gpus_per_node": 8}
    with pytest.raises(ValueError, match="cluster.processes_per_node = 16 exceeds cluster.gpus_per_node = 8"):
        config(tmp_path, "slurm", cluster=cluster)
