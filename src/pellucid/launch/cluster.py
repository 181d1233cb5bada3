"""`pellucid render @ run.toml @ cluster.toml`: the files that start a run on many machines.

    run.toml        the run as resolved, which every part reads
    run.sbatch      Slurm: one job; the first machines train, the others serve; or
    run.yaml        Kubernetes: a StatefulSet of servers, a Job for the orchestrator, and one for the trainer

A Slurm job that is started again goes on. Kubernetes restarts a dead pod by the same command, so every
command has `--resume`: in a folder without a run, that begins one. Pods of the servers and of the trainer
have names that are known beforehand, by which the others find them. The configuration is in a ConfigMap, and
the run folder on a volume that all pods share.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from pellucid.config import RLConfig
from pellucid.config.base import to_toml
from pellucid.config.tools import ClusterConfig, RenderConfig
from pellucid.data.files import replace_file
from pellucid.errors import ConfigError
from pellucid.launch.gpus import VISIBLE


def run_render(config: RenderConfig) -> None:
    for path in write_files(config):
        print(path)


def write_files(config: RenderConfig) -> list[Path]:
    run, cluster = _run_of(config), config.cluster
    text = to_toml(run)
    files = {"run.toml": text}
    if cluster.scheduler == "slurm":
        files["run.sbatch"] = slurm_script(run, cluster, config.files / "run.toml")
    else:
        files["run.yaml"] = kubernetes_manifests(run, cluster, text)
    config.files.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(config.files / name, content.encode())
    return [config.files / name for name in files]


def _run_of(config: RenderConfig) -> RLConfig:
    """Returns the configuration that all parts read; server addresses are passed when a part starts."""
    cluster, teacher = config.cluster, config.orchestrator.teacher
    num_processes = cluster.trainer_nodes * cluster.num_processes
    config.trainer.check_num_processes(num_processes)
    for key, number in config.gpus.model_dump(exclude_none=True).items():
        raise ConfigError(
            f"gpus.{key} = {number} divides the GPUs of one machine, for `pellucid rl`; leave it out, and "
            "set cluster.trainer_nodes, cluster.inference_nodes and cluster.gpus_per_node"
        )
    if cluster.gpus_per_node and config.inference.gpus_per_server > cluster.gpus_per_node:
        raise ConfigError(
            f"{config.inference.server_size} exceeds cluster.gpus_per_node = {cluster.gpus_per_node}: a "
            "server's GPUs are those of one machine; lower the former"
        )
    if config.inference.servers:
        raise ConfigError(
            "inference.servers is for servers that you start yourself; `pellucid render` starts "
            f"cluster.inference_nodes = {cluster.inference_nodes}: leave it out"
        )
    if config.transport.type == "zmq":
        raise ConfigError(
            'transport.type = "zmq" needs the address of a machine, which only the scheduler knows; use '
            '"filesystem": the run folder is on a file system that all machines see'
        )
    if config.weights.transport == "http" and not config.weights.port:
        raise ConfigError(
            'weights.port = 0 with weights.transport = "http": only `pellucid rl` picks a free port; set one '
            "that is free on the trainer's first machine"
        )
    if teacher is not None and teacher.model is not None:
        raise ConfigError(
            "orchestrator.teacher.model is served by `pellucid rl` on one machine; start a server for it and "
            "give its address as orchestrator.teacher.servers"
        )
    values = {name: getattr(config, name) for name in RLConfig.model_fields}
    values["trainer"] = config.trainer.model_copy(update={"num_processes": num_processes})
    if config.weights.transport == "http":
        key_file = config.weights.key_file or config.inference.key_file  # the trainer has no [inference]
        values["weights"] = config.weights.model_copy(update={"key_file": key_file})
    return RLConfig.model_construct(**values)


_SCRIPT = """\
set -euo pipefail

config={config}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${{nodes[@]:0:{num_trainers}}}")
servers=("${{nodes[@]:{num_trainers}}}")

resume=()
if [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 ]]; then
    pellucid rewind @ "$config"
    resume=(--resume)
fi

on() {{ srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${{@:2}}"; }}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

addresses=""
number=0
for host in "${{servers[@]}}"; do
    for place in {places}; do
        address=$host:$(({port} + number % {num_servers}))
        addresses+="${{addresses:+, }}\\"http://$address\\""
        on "$host" {environment}pellucid inference @ "$config" "${{resume[@]}}"{reads_weights} \\
            --inference.host "$host" --inference.port "${{address##*:}}" --inference.replica "$number" &
        number=$((number + 1))
    done
done

parts=()
on "${{trainers[0]}}" pellucid orchestrator @ "$config" "${{resume[@]}}"{reads_weights} \\
    --inference.servers "[$addresses]" &
parts+=($!)
for number in "${{!trainers[@]}}"; do
    on "${{trainers[$number]}}" torchrun --nnodes {num_trainers} --node-rank "$number" \\
        --nproc-per-node {num_processes} --master-addr "${{trainers[0]}}" --master-port {rendezvous_port} \\
        -m pellucid.cli trainer @ "$config" "${{resume[@]}}"{offers_weights} &
    parts+=($!)
done

# The first that fails ends the job; the servers end with it.
for _ in "${{parts[@]}}"; do
    wait -n "${{parts[@]}}"
done
"""


def slurm_script(run: RLConfig, cluster: ClusterConfig, config_path: Path) -> str:
    options = {
        "job-name": run.run_name,
        "nodes": cluster.trainer_nodes + cluster.inference_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": cluster.gpus_per_node or None,
        "partition": cluster.partition,
        "time": cluster.time_limit,
        "requeue": "",
    }
    lines = [
        f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}"
        for name, value in options.items()
        if value is not None
    ]
    size = run.inference.gpus_per_server
    places = [
        ",".join(str(server * size + gpu) for gpu in range(size))
        for server in range(cluster.servers_per_node(size))
    ]
    script = _SCRIPT.format(
        config=shlex.quote(str(config_path.resolve())),
        num_trainers=cluster.trainer_nodes,
        num_processes=cluster.num_processes,
        num_servers=cluster.servers_per_node(size),
        places=" ".join(places),
        environment=f"env {VISIBLE}=$place " if len(places) > 1 else "",
        port=cluster.port,
        rendezvous_port=cluster.rendezvous_port,
        reads_weights=_weights_at(run, '"${trainers[0]}"'),
        offers_weights=_weights_at(run, _EVERYWHERE),
    )
    return "\n".join(["#!/bin/bash", *lines, script])


_EVERYWHERE = "0.0.0.0"


def _weights_at(run: RLConfig, host: str) -> str:
    """Returns the flag that says where weights are offered; nothing unless the trainer listens for them."""
    return f" --weights.host {host}" if run.weights.transport == "http" else ""


_MOUNT = "/pellucid"
_CONFIG = "/etc/pellucid/run.toml"
_OBJECT_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40
_MAX_RESTARTS = 6

Object = dict[str, Any]


def kubernetes_manifests(run: RLConfig, cluster: ClusterConfig, config: str) -> str:
    manifests = _Manifests(_object_name(run), cluster, run)
    objects = [
        manifests.named("v1", "ConfigMap", "", {"data": {"run.toml": config}}),
        manifests.headless("inference", cluster.port),
        manifests.headless("trainer", cluster.rendezvous_port),
        manifests.servers(),
        manifests.job("orchestrator", manifests.orchestrator(), num_pods=1),
        manifests.job("trainer", manifests.trainer(), num_pods=cluster.trainer_nodes),
    ]
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


class _Manifests:
    def __init__(self, name: str, cluster: ClusterConfig, run: RLConfig) -> None:
        self._name = name
        self._cluster = cluster
        self._first_trainer = f"{name}-trainer-0.{name}-trainer"
        self._reads_weights = _weights_at(run, self._first_trainer)
        self._offers_weights = _weights_at(run, _EVERYWHERE)
        gpus_per_server = run.inference.gpus_per_server
        # A pod has one server, and as many GPUs as it needs; the scheduler puts several on a machine.
        self._num_servers = cluster.inference_nodes * cluster.servers_per_node(gpus_per_server)
        gpus = cluster.gpus_per_node
        self._gpus = {"trainer": gpus, "inference": gpus and gpus_per_server}
        self._labels = {"app.kubernetes.io/name": "pellucid", "app.kubernetes.io/instance": name}

    def named(self, version: str, kind: str, part: str, body: Object) -> Object:
        name = f"{self._name}-{part}".removesuffix("-")
        namespace = {"namespace": self._cluster.namespace} if self._cluster.namespace else {}
        metadata = {"name": name, "labels": self._labels, **namespace}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}

    def headless(self, part: str, port: int) -> Object:
        """Returns a service that gives each pod of a part a name."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._selector(part),
            "ports": [{"port": port, "name": part}],
        }
        return self.named("v1", "Service", part, {"spec": spec})

    def servers(self) -> Object:
        port = self._cluster.port
        container = self._container(
            "inference",
            f"exec pellucid inference @ {_CONFIG} --resume --inference.host 0.0.0.0 --inference.port {port} "
            f'--inference.replica "${{HOSTNAME##*-}}"{self._reads_weights}',
        )
        container["ports"] = [{"containerPort": port}]
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": port}}
        spec = {
            "serviceName": f"{self._name}-inference",
            "replicas": self._num_servers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._selector("inference")},
            "template": self._template("inference", container),
        }
        return self.named("apps/v1", "StatefulSet", "inference", {"spec": spec})

    def orchestrator(self) -> Object:
        addresses = ", ".join(
            f'"http://{self._name}-inference-{number}.{self._name}-inference:{self._cluster.port}"'
            for number in range(self._num_servers)
        )
        return self._container(
            "orchestrator",
            f"exec pellucid orchestrator @ {_CONFIG} --resume --inference.servers '[{addresses}]'"
            f"{self._reads_weights}",
        )

    def trainer(self) -> Object:
        cluster = self._cluster
        return self._container(
            "trainer",
            f'exec torchrun --nnodes {cluster.trainer_nodes} --node-rank "$JOB_COMPLETION_INDEX" '
            f"--nproc-per-node {cluster.num_processes} "
            f"--master-addr {self._first_trainer} --master-port {cluster.rendezvous_port} "
            f"-m pellucid.cli trainer @ {_CONFIG} --resume{self._offers_weights}",
        )

    def job(self, part: str, container: Object, *, num_pods: int) -> Object:
        template = self._template(part, container)
        template["spec"] |= {"restartPolicy": "OnFailure", "subdomain": f"{self._name}-{part}"}
        spec = {
            "completionMode": "Indexed",
            "completions": num_pods,
            "parallelism": num_pods,
            "backoffLimit": _MAX_RESTARTS * num_pods,  # one that dies takes all pods of its job along
            "template": template,
        }
        return self.named("batch/v1", "Job", part, {"spec": spec})

    def _container(self, part: str, command: str) -> Object:
        container: Object = {
            "name": part,
            "image": self._cluster.image,
            "command": ["/bin/bash", "-c", command],
            "workingDir": _MOUNT,
            "volumeMounts": [
                {"name": "run", "mountPath": _MOUNT},
                {"name": "config", "mountPath": _CONFIG.rpartition("/")[0]},
            ],
        }
        if gpus := self._gpus.get(part):
            container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        return container

    def _template(self, part: str, container: Object) -> Object:
        volumes = [
            {"name": "run", "persistentVolumeClaim": {"claimName": self._cluster.volume_claim}},
            {"name": "config", "configMap": {"name": self._name}},
        ]
        labels = {**self._labels, **self._selector(part)}
        return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}

    def _selector(self, part: str) -> dict[str, str]:
        return {"pellucid/run": self._name, "pellucid/part": part}


def _object_name(run: RLConfig) -> str:
    name = run.run_name.lower().replace("_", "-").replace(".", "-")
    if not _OBJECT_NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"run_id = {run.run_name!r} cannot name Kubernetes objects: at most {_MAX_NAME} letters, digits "
            "and dashes, a letter first; set another run_id"
        )
    return name
