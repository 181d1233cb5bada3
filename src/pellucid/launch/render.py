"""`pellucid render @ run.toml @ cluster.toml`: the files that start a run on many machines.

    run.toml        the run as resolved, which every part reads
    run.sbatch      Slurm: one job; the first machines train, the others serve; or
    run.yaml        Kubernetes: a StatefulSet of servers, a Job for the orchestrator, and one for the trainer
    secret.yaml     Kubernetes without a shared disk: the keys, made once and kept
    books.yaml      the same: a Job that puts the books of all parts together, for when the run is over

With a shared disk, all parts work in one run folder. Without one (`launch/cluster.py` says when that is),
each has a folder of its own, and the keys of the run are made here, or by the Slurm job.
"""

from pathlib import Path

from pellucid.config.base import to_toml
from pellucid.config.tools import RenderConfig
from pellucid.data.files import replace_file
from pellucid.launch.cluster import run_of, shares_folder
from pellucid.launch.kubernetes import kubernetes_manifests, write_secret
from pellucid.launch.slurm import slurm_script


def run_render(config: RenderConfig) -> None:
    for path in write_files(config):
        print(path)


def write_files(config: RenderConfig) -> list[Path]:
    run, cluster = run_of(config), config.cluster
    text = to_toml(run)
    files = {"run.toml": text}
    if cluster.scheduler == "slurm":
        files["run.sbatch"] = slurm_script(run, cluster, text, config.files / "run.toml")
    else:
        files |= kubernetes_manifests(run, cluster, text)
    config.files.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(config.files / name, content.encode())
    paths = [config.files / name for name in files]
    if cluster.scheduler == "kubernetes" and not shares_folder(run):
        paths.append(config.files / "secret.yaml")
        write_secret(run, cluster, paths[-1])
    return paths
