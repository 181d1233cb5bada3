"""One Slurm job: the first machines train, the others serve. A job that Slurm starts again goes on."""

import shlex
from pathlib import Path

from pellucid.config import RLConfig
from pellucid.config.cluster import ClusterConfig

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
for number in "${{!servers[@]}}"; do
    host=${{servers[$number]}}
    addresses+="${{addresses:+, }}\\"http://$host:{port}\\""
    on "$host" pellucid inference @ "$config" "${{resume[@]}}" \\
        --inference.host "$host" --inference.port {port} --inference.replica "$number" &
done

parts=()
on "${{trainers[0]}}" pellucid orchestrator @ "$config" "${{resume[@]}}" --inference.servers "[$addresses]" &
parts+=($!)
for number in "${{!trainers[@]}}"; do
    on "${{trainers[$number]}}" torchrun --nnodes {num_trainers} --node-rank "$number" \\
        --nproc-per-node {num_processes} --master-addr "${{trainers[0]}}" --master-port {rendezvous_port} \\
        -m pellucid.cli trainer @ "$config" "${{resume[@]}}" &
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
    script = _SCRIPT.format(
        config=shlex.quote(str(config_path.resolve())),
        num_trainers=cluster.trainer_nodes,
        num_processes=cluster.processes_per_node,
        port=cluster.port,
        rendezvous_port=cluster.rendezvous_port,
    )
    return "\n".join(["#!/bin/bash", *lines, script])
