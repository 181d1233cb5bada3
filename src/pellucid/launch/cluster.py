"""Settings and flags for the parts of a run on many machines, the same for Slurm and Kubernetes.

    transport.type    weights.transport       run folder         keys
    "filesystem"      any                     one for all        in it, or where the settings say
    "zmq"             "http", "object-store"  one for each part  made for the run and handed to each part

The trainer's processes have one folder in both cases.
"""

from typing import Literal

from pellucid.config import RLConfig
from pellucid.config.tools import RenderConfig
from pellucid.errors import ConfigError

Part = Literal["trainer", "orchestrator", "inference"]

KEY_FILE = "run.key"
"""File with the run's key, beside the CurveZMQ keys, where each part has a folder of its own."""

_EVERYWHERE = "0.0.0.0"


def shares_folder(run: RLConfig) -> bool:
    """Whether all parts work in one run folder."""
    return run.transport.type == "filesystem"


def part_flags(run: RLConfig, part: Part, *, first_trainer: str, keys: str) -> str:
    """Returns flags that the settings cannot have: where the trainer is, and where the part's keys are."""
    host = _EVERYWHERE if part == "trainer" else first_trainer
    flags = f" --weights.host {host}" if run.weights.transport == "http" else ""
    if shares_folder(run):
        return flags
    section = "weights" if part == "trainer" else "inference"
    flags += f" --{section}.key-file {keys}/{KEY_FILE}"
    return flags if part == "inference" else f"{flags} --transport.host {host} --transport.keys {keys}"


def run_of(config: RenderConfig) -> RLConfig:
    """Returns the configuration that all parts read; addresses are passed when a part starts."""
    num_processes = config.cluster.trainer_nodes * config.cluster.num_processes
    config.trainer.check_num_processes(num_processes)
    _check_machines(config)
    _check_network(config)
    values = {name: getattr(config, name) for name in RLConfig.model_fields}
    values["trainer"] = config.trainer.model_copy(update={"num_processes": num_processes})
    if not shares_folder(config):
        values["run_id"] = config.run_name  # their folders may have other names
    elif config.weights.transport == "http":
        key_file = config.weights.key_file or config.inference.key_file  # the trainer has no [inference]
        values["weights"] = config.weights.model_copy(update={"key_file": key_file})
    return RLConfig.model_construct(**values)


def _check_machines(config: RenderConfig) -> None:
    cluster, teacher = config.cluster, config.orchestrator.teacher
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
    if teacher is not None and teacher.model is not None:
        raise ConfigError(
            "orchestrator.teacher.model is served by `pellucid rl` on one machine; start a server for it and "
            "give its address as orchestrator.teacher.servers"
        )


def _check_network(config: RenderConfig) -> None:
    transport, weights = config.transport, config.weights
    if weights.transport == "http" and not weights.port:
        raise ConfigError(
            'weights.port = 0 with weights.transport = "http": only `pellucid rl` picks a free port; set one '
            "that is free on the trainer's first machine"
        )
    if transport.type != "zmq":
        return
    if weights.transport == "filesystem":
        raise ConfigError(
            'transport.type = "zmq" with weights.transport = "filesystem": batches need no shared disk, but '
            'weights do; set weights.transport to "http" or "object-store", or leave transport.type out'
        )
    if not transport.port:
        raise ConfigError(
            'transport.port = 0 with transport.type = "zmq": only `pellucid rl` picks a free port; set one '
            "that is free on the trainer's first machine"
        )
    for key, path in (
        ("transport.keys", transport.keys),
        ("weights.key_file", weights.key_file),
        ("inference.key_file", config.inference.key_file),
    ):
        if path is not None:
            raise ConfigError(
                f"{key} = {str(path)!r}: without a shared disk, `pellucid render` has keys made for the run "
                "and handed to every part; leave it out"
            )
