"""Kubernetes objects: a StatefulSet of servers, a Job for the orchestrator, and one for the trainer.

Pods of the servers and of the trainer have names that are known beforehand, by which the others find them.
The configuration is in a ConfigMap, and the run folder on a volume that all pods share.

Kubernetes restarts a dead pod by the same command, so every command has `--resume`: in a folder without a
run, that begins one.
"""

import re
from typing import Any

import yaml

from pellucid.config import RLConfig
from pellucid.config.cluster import ClusterConfig
from pellucid.errors import ConfigError

_MOUNT = "/pellucid"
_CONFIG = "/etc/pellucid/run.toml"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40
_MAX_RESTARTS = 6

Object = dict[str, Any]


def kubernetes_manifests(run: RLConfig, cluster: ClusterConfig, config: str) -> str:
    name = _name(run)
    labels = {"app.kubernetes.io/name": "pellucid", "app.kubernetes.io/instance": name}
    pods = _Pods(name, cluster, labels)
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"run.toml": config}},
        pods.headless("inference", cluster.port),
        pods.headless("trainer", cluster.rendezvous_port),
        pods.servers(),
        pods.job("orchestrator", [pods.orchestrator()], num_pods=1),
        pods.job("trainer", [pods.trainer()], num_pods=cluster.trainer_nodes),
    ]
    for each in objects:
        each["metadata"] |= {"labels": labels} | (
            {"namespace": cluster.namespace} if cluster.namespace else {}
        )
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


class _Pods:
    def __init__(self, name: str, cluster: ClusterConfig, labels: dict[str, str]) -> None:
        self._name = name
        self._cluster = cluster
        self._labels = labels

    def headless(self, part: str, port: int) -> Object:
        """Gives the pods of a part names of their own."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{self._name}-{part}"},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": self._selector(part),
                "ports": [{"port": port, "name": part}],
            },
        }

    def servers(self) -> Object:
        port = self._cluster.port
        command = (
            f"exec pellucid inference @ {_CONFIG} --resume --inference.host 0.0.0.0 --inference.port {port} "
            '--inference.replica "${HOSTNAME##*-}"'
        )
        container = self._container("inference", command)
        container["ports"] = [{"containerPort": port}]
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": port}}
        return {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": f"{self._name}-inference"},
            "spec": {
                "serviceName": f"{self._name}-inference",
                "replicas": self._cluster.inference_nodes,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": self._selector("inference")},
                "template": self._template("inference", [container]),
            },
        }

    def orchestrator(self) -> Object:
        addresses = ", ".join(
            f'"http://{self._name}-inference-{number}.{self._name}-inference:{self._cluster.port}"'
            for number in range(self._cluster.inference_nodes)
        )
        return self._container(
            "orchestrator",
            f"exec pellucid orchestrator @ {_CONFIG} --resume --inference.servers '[{addresses}]'",
        )

    def trainer(self) -> Object:
        cluster = self._cluster
        command = (
            f'exec torchrun --nnodes {cluster.trainer_nodes} --node-rank "$JOB_COMPLETION_INDEX" '
            f"--nproc-per-node {cluster.processes_per_node} "
            f"--master-addr {self._name}-trainer-0.{self._name}-trainer "
            f"--master-port {cluster.rendezvous_port} -m pellucid.cli trainer @ {_CONFIG} --resume"
        )
        return self._container("trainer", command)

    def job(self, part: str, containers: list[Object], *, num_pods: int) -> Object:
        template = self._template(part, containers)
        template["spec"] |= {"restartPolicy": "OnFailure", "subdomain": f"{self._name}-{part}"}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{self._name}-{part}"},
            "spec": {
                "completionMode": "Indexed",
                "completions": num_pods,
                "parallelism": num_pods,
                "backoffLimit": _MAX_RESTARTS * num_pods,  # one that dies takes all pods of its job along
                "template": template,
            },
        }

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
        if part != "orchestrator" and (gpus := self._cluster.gpus_per_node):
            container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        return container

    def _template(self, part: str, containers: list[Object]) -> Object:
        return {
            "metadata": {"labels": {**self._labels, **self._selector(part)}},
            "spec": {
                "containers": containers,
                "volumes": [
                    {"name": "run", "persistentVolumeClaim": {"claimName": self._cluster.volume_claim}},
                    {"name": "config", "configMap": {"name": self._name}},
                ],
            },
        }

    def _selector(self, part: str) -> dict[str, str]:
        return {"pellucid/run": self._name, "pellucid/part": part}


def _name(run: RLConfig) -> str:
    name = run.run_name.lower().replace("_", "-").replace(".", "-")
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"run_id = {run.run_name!r} cannot name Kubernetes objects: at most {_MAX_NAME} letters, digits "
            "and dashes, a letter first; set another run_id"
        )
    return name
