"""The Kubernetes objects of a run: a StatefulSet of servers, a Job for the orchestrator, one for the trainer.

Kubernetes restarts a dead pod by the same command, so every command has `--resume`: in a folder without a
run, that begins one. Pods of the servers and of the trainer have names that are known beforehand, by which
the others find them. The configuration is in a ConfigMap.

    mounted at /pellucid          with a shared disk      without
    trainer                       cluster.volume_claim    cluster.volume_claim
    orchestrator                  the same                a claim of its own
    each server                   the same                a claim of its own

Without a shared disk the keys are in a Secret, of which each pod sees those that it needs.
"""

import os
import re
import secrets
import shlex
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pellucid.config import RLConfig
from pellucid.config.tools import ClusterConfig
from pellucid.errors import ConfigError
from pellucid.launch.cluster import KEY_FILE, Part, part_flags, shares_folder
from pellucid.transport.zmq_link import make_keys

_MOUNT = "/pellucid"
_CONFIG = "/etc/pellucid/run.toml"
_KEYS = "/etc/pellucid-keys"
_KEYS_OF: dict[Part, tuple[str, ...]] = {
    "trainer": (KEY_FILE, "trainer.secret", "trainer.public", "orchestrator.public"),
    "orchestrator": (KEY_FILE, "orchestrator.secret", "orchestrator.public", "trainer.public"),
    "inference": (KEY_FILE,),
}
_OBJECT_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40
_MAX_RESTARTS = 6

Object = dict[str, Any]


def kubernetes_manifests(run: RLConfig, cluster: ClusterConfig, config: str) -> dict[str, str]:
    """Returns the files to apply, by name, but for the keys."""
    manifests = _Manifests(run, cluster)
    objects = [
        manifests.named("v1", "ConfigMap", "", {"data": {"run.toml": config}}),
        manifests.headless("inference", cluster.port),
        manifests.headless("trainer", cluster.rendezvous_port),
        manifests.servers(),
        manifests.job("orchestrator", manifests.orchestrator(), num_pods=1),
        manifests.job("trainer", manifests.trainer(), num_pods=cluster.trainer_nodes),
    ]
    if shares_folder(run):
        return {"run.yaml": _yaml(objects)}
    claim = manifests.named("v1", "PersistentVolumeClaim", "orchestrator", {"spec": manifests.claim_spec})
    return {"run.yaml": _yaml([*objects, claim]), "books.yaml": _yaml([manifests.books()])}


def write_secret(run: RLConfig, cluster: ClusterConfig, path: Path) -> None:
    """Makes the keys of a run whose parts share no folder. Those that are there stay: pods know them."""
    manifests = _Manifests(run, cluster)
    if path.exists():
        made_for = yaml.safe_load(path.read_text())["metadata"]
        if made_for != (wanted := manifests.named("v1", "Secret", "keys", {})["metadata"]):
            raise ConfigError(
                f"{path} holds the keys of {made_for}, not of {wanted}; choose another folder with `files`, "
                "or delete it"
            )
        return
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder))
        keys = {file.name: file.read_text() for file in sorted(Path(folder).iterdir())}
    keys[KEY_FILE] = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(_yaml([manifests.named("v1", "Secret", "keys", {"stringData": keys})]))


def _yaml(objects: list[Object]) -> str:
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


class _Manifests:
    def __init__(self, run: RLConfig, cluster: ClusterConfig) -> None:
        self._name = _object_name(run)
        self._run, self._cluster = run, cluster
        self._first_trainer = f"{self._name}-trainer-0.{self._name}-trainer"
        gpus_per_server = run.inference.gpus_per_server
        # A pod has one server, and as many GPUs as it needs; the scheduler puts several on a machine.
        self._num_servers = cluster.inference_nodes * cluster.servers_per_node(gpus_per_server)
        gpus = cluster.gpus_per_node
        self._gpus = {"trainer": gpus, "inference": gpus and gpus_per_server}
        self._labels = {"app.kubernetes.io/name": "pellucid", "app.kubernetes.io/instance": self._name}
        self.claim_spec: Object = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": cluster.volume_size}},
        }
        """The volume of a server or the orchestrator, where each part has its own."""

    def named(self, version: str, kind: str, part: str, body: Object) -> Object:
        name = f"{self._name}-{part}".removesuffix("-")
        namespace = {"namespace": self._cluster.namespace} if self._cluster.namespace else {}
        metadata = {"name": name, "labels": self._labels, **namespace}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}

    def headless(self, part: Part, port: int) -> Object:
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
            f"pellucid inference @ {_CONFIG} --resume --inference.host 0.0.0.0 --inference.port {port} "
            '--inference.replica "${HOSTNAME##*-}"',
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
        if not shares_folder(self._run):
            spec["volumeClaimTemplates"] = [{"metadata": {"name": "run"}, "spec": self.claim_spec}]
        return self.named("apps/v1", "StatefulSet", "inference", {"spec": spec})

    def orchestrator(self) -> Object:
        addresses = ", ".join(
            f'"http://{self._name}-inference-{number}.{self._name}-inference:{self._cluster.port}"'
            for number in range(self._num_servers)
        )
        return self._container(
            "orchestrator",
            f"pellucid orchestrator @ {_CONFIG} --resume --inference.servers '[{addresses}]'",
        )

    def trainer(self) -> Object:
        cluster = self._cluster
        return self._container(
            "trainer",
            f'torchrun --nnodes {cluster.trainer_nodes} --node-rank "$JOB_COMPLETION_INDEX" '
            f"--nproc-per-node {cluster.num_processes} "
            f"--master-addr {self._first_trainer} --master-port {cluster.rendezvous_port} "
            f"-m pellucid.cli trainer @ {_CONFIG} --resume",
        )

    def books(self) -> Object:
        """Returns a job that copies the books of all parts to the trainer's volume and compares them."""
        output = PurePosixPath(_MOUNT) / self._run.output_dir
        if not output.is_relative_to(_MOUNT):
            raise ConfigError(
                f"output_dir = {str(output)!r} is on no volume of the pods; name a folder below {_MOUNT}, or "
                "a relative one"
            )
        folder = shlex.quote(str(output.relative_to(_MOUNT)))
        books = f"trainer/{folder}-all"
        claims = {
            "trainer": self._cluster.volume_claim,
            "orchestrator": self._claim_of("orchestrator"),
            **{
                f"inference-{number}": f"run-{self._name}-inference-{number}"
                for number in range(self._num_servers)
            },
        }
        script = (
            f"mkdir -p {books}/ledger && cp */{folder}/ledger/* {books}/ledger && pellucid ledger {books}"
        )
        container = {
            "name": "books",
            "image": self._cluster.image,
            "command": ["/bin/bash", "-c", script],
            "workingDir": _MOUNT,
            "volumeMounts": [{"name": name, "mountPath": f"{_MOUNT}/{name}"} for name in claims],
        }
        volumes = [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()
        ]
        pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
        spec = {"backoffLimit": 0, "template": {"metadata": {"labels": self._labels}, "spec": pod}}
        return self.named("batch/v1", "Job", "books", {"spec": spec})

    def job(self, part: Part, container: Object, *, num_pods: int) -> Object:
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

    def _container(self, part: Part, command: str) -> Object:
        flags = part_flags(self._run, part, first_trainer=self._first_trainer, keys=_KEYS)
        container: Object = {
            "name": part,
            "image": self._cluster.image,
            "command": ["/bin/bash", "-c", f"exec {command}{flags}"],
            "workingDir": _MOUNT,
            "volumeMounts": [
                {"name": "run", "mountPath": _MOUNT},
                {"name": "config", "mountPath": _CONFIG.rpartition("/")[0]},
            ],
        }
        if not shares_folder(self._run):
            container["volumeMounts"].append({"name": "keys", "mountPath": _KEYS})
        if gpus := self._gpus.get(part):
            container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        return container

    def _template(self, part: Part, container: Object) -> Object:
        volumes: list[Object] = [{"name": "config", "configMap": {"name": self._name}}]
        if claim := self._claim_of(part):
            volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": claim}})
        if not shares_folder(self._run):
            items = [{"key": name, "path": name} for name in _KEYS_OF[part]]
            secret = {"secretName": f"{self._name}-keys", "defaultMode": 0o400, "items": items}
            volumes.append({"name": "keys", "secret": secret})
        labels = {**self._labels, **self._selector(part)}
        return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}

    def _claim_of(self, part: Part) -> str:
        """Returns the claim of a part's volume; "" for servers whose StatefulSet makes one for each."""
        if part == "trainer" or shares_folder(self._run):
            return self._cluster.volume_claim
        return f"{self._name}-{part}" if part == "orchestrator" else ""

    def _selector(self, part: Part) -> dict[str, str]:
        return {"pellucid/run": self._name, "pellucid/part": part}


def _object_name(run: RLConfig) -> str:
    name = run.run_name.lower().replace("_", "-").replace(".", "-")
    if not _OBJECT_NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"run_id = {run.run_name!r} cannot name Kubernetes objects: at most {_MAX_NAME} letters, digits "
            "and dashes, a letter first; set another run_id"
        )
    return name
