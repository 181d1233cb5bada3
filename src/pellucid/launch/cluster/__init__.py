"""`pellucid render @ run.toml @ cluster.toml`: the files that start a run on many machines.

run.toml        the run as resolved, which every part reads
run.sbatch      Slurm: one job; or
run.yaml        Kubernetes: servers, orchestrator, trainer
"""

from pathlib import Path

from pellucid.config import RLConfig
from pellucid.config.cluster import ClusterConfig, RenderConfig
from pellucid.config.save import to_toml
from pellucid.data.files import replace_file
from pellucid.errors import ConfigError
from pellucid.launch.cluster.kubernetes import kubernetes_manifests
from pellucid.launch.cluster.slurm import slurm_script


def run_render(config: RenderConfig) -> None:
    for path in write_files(config):
        print(path)


def write_files(config: RenderConfig) -> list[Path]:
    run = _run_of(config)
    cluster, text = config.cluster, to_toml(run)
    if cluster.scheduler == "slurm":
        files = {"run.toml": text, "run.sbatch": slurm_script(run, cluster, config.files / "run.toml")}
    else:
        files = {"run.toml": text, "run.yaml": kubernetes_manifests(run, cluster, text)}
    config.files.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(config.files / name, content.encode())
    return [config.files / name for name in files]


def _run_of(config: RenderConfig) -> RLConfig:
    """Returns the configuration that all parts read; server addresses are passed when a part starts."""
    cluster, trainer = config.cluster, config.trainer
    num_processes = cluster.trainer_nodes * cluster.processes_per_node
    trainer.check_num_processes(num_processes)
    _refuse_loopback(config, cluster)
    own = {name: getattr(config, name) for name in RLConfig.model_fields}
    trainer = trainer.model_copy(update={"num_processes": num_processes})
    return RLConfig.model_construct(**{**own, "trainer": trainer})


def _refuse_loopback(config: RenderConfig, cluster: ClusterConfig) -> None:
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
    if config.orchestrator.teacher is not None and config.orchestrator.teacher.model is not None:
        raise ConfigError(
            "orchestrator.teacher.model is served by `pellucid rl` on one machine; start a server for it and "
            "give its address as orchestrator.teacher.servers"
        )
