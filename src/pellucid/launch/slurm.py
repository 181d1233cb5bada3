"""The Slurm job of a run: the first machines train, the first of them has the orchestrator, the others serve.

A job that Slurm starts again goes on. Without a shared disk the script needs no file but itself: it holds
the settings and makes the keys, and srun's standard input takes them to the machines, into a folder that goes
when the job ends. The books of the servers come back by srun's standard output.
"""

import shlex
from pathlib import Path

from pellucid.config import RLConfig
from pellucid.config.tools import ClusterConfig
from pellucid.launch.cluster import KEY_FILE, Part, part_flags, shares_folder
from pellucid.launch.gpus import VISIBLE

_SCRIPT = """\
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${{nodes[@]:0:{num_trainers}}}")
servers=("${{nodes[@]:{num_trainers}}}")

# Takes the place of the subshell that it is called in, so that killing this ends the step.
on() {{ exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${{@:2}}"; }}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

{prepare}
addresses=""
hosts=()
for host in "${{servers[@]}}"; do
    for place in {places}; do
        number=${{#hosts[@]}}
        hosts+=("$host")
        address=$host:$(({port} + number % {num_servers}))
        addresses+="${{addresses:+, }}\\"http://$address\\""
        start "$host" {environment}pellucid inference "${{resume[@]}}" --inference.host "$host" \\
            --inference.port "${{address##*:}}" --inference.replica "$number"{inference_flags} &
    done
done

parts=()
start "${{trainers[0]}}" pellucid orchestrator "${{resume[@]}}" \\
    --inference.servers "[$addresses]"{orchestrator_flags} &
parts+=($!)
for number in "${{!trainers[@]}}"; do
    start "${{trainers[$number]}}" torchrun --nnodes {num_trainers} --node-rank "$number" \\
        --nproc-per-node {num_processes} --master-addr "${{trainers[0]}}" --master-port {rendezvous_port} \\
        -m pellucid.cli trainer "${{resume[@]}}"{trainer_flags} &
    parts+=($!)
done

# The first that fails ends the job; the servers end with it. Of parts that have ended, bash would complain.
for _ in "${{parts[@]}}"; do
    wait -n "${{parts[@]}}" 2> /dev/null
done
"""

_WITH_ONE_FOLDER = """\
config={config_path}
resume=()
if [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 ]]; then
    pellucid rewind @ "$config"
    resume=(--resume)
fi
start() {{ on "$1" "${{@:2}}" @ "$config"; }}  # HOST COMMAND…
"""

_WITH_FOLDERS_OF_THEIR_OWN = """\
# Every start of the job makes its own keys. A machine gets the settings, and those of the keys that it needs.
own=$(mktemp -d)
cat > "$own/run.toml" <<'END OF run.toml'
{config}
END OF run.toml
pellucid keys "$own/keys" > /dev/null
(umask 077 && od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' > "$own/keys/{key_file}")
give() {{  # HOST FILE…
    tar -c -C "$own" "${{@:2}}" | (on "$1" bash -c 'mkdir -m 700 "$0" && tar -x -C "$0"' "$own-$1")
}}
forget() {{
    for host in "${{nodes[@]}}"; do (on "$host" rm -rf "$own-$host") || true; done
    rm -rf "$own"
}}
trap 'kill $(jobs -p) 2>/dev/null || true; forget' EXIT
for host in "${{trainers[@]}}"; do give "$host" run.toml keys; done
for host in "${{servers[@]}}"; do give "$host" run.toml keys/{key_file}; done

resume=()
if [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 ]]; then
    resume=(--resume)
fi
start() {{ on "$1" "${{@:2}}" @ "$own-$1/run.toml"; }}  # HOST COMMAND…
"""

_BOOKS = """
# A server writes its books four times a second. Those of all parts balance together.
sleep 1
kill $(jobs -p) 2>/dev/null || true
wait
mkdir -p {output}-all/ledger
for number in "${{!hosts[@]}}"; do
    (on "${{hosts[$number]}}" tar -c -C {output}-inference-"$number" ledger) | tar -x -C {output}-all
done
cp {output}/ledger/* {output}-orchestrator/ledger/* {output}-all/ledger
pellucid ledger {output}-all
"""


def slurm_script(run: RLConfig, cluster: ClusterConfig, config: str, config_path: Path) -> str:
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
    prepare = _WITH_ONE_FOLDER if shares_folder(run) else _WITH_FOLDERS_OF_THEIR_OWN
    output = shlex.quote(str(run.output_dir))
    script = _SCRIPT.format(
        prepare=prepare.format(
            config=config.rstrip("\n"), config_path=shlex.quote(str(config_path.resolve())), key_file=KEY_FILE
        ),
        num_trainers=cluster.trainer_nodes,
        num_processes=cluster.num_processes,
        num_servers=cluster.servers_per_node(size),
        places=" ".join(places),
        environment=f"env {VISIBLE}=$place " if len(places) > 1 else "",
        port=cluster.port,
        rendezvous_port=cluster.rendezvous_port,
        inference_flags=_flags(run, "inference", "$host", f'{output}-inference-"$number"'),
        orchestrator_flags=_flags(run, "orchestrator", "${trainers[0]}", f"{output}-orchestrator"),
        trainer_flags=_flags(run, "trainer", "${trainers[$number]}", output),
    )
    books = "" if shares_folder(run) else _BOOKS.format(output=output)
    return "\n".join(["#!/bin/bash", *lines, script + books])


def _flags(run: RLConfig, part: Part, host: str, output: str) -> str:
    """Returns what the command of a part ends with, on a line of its own."""
    folder = "" if shares_folder(run) else f" --output-dir {output}"
    flags = part_flags(run, part, first_trainer='"${trainers[0]}"', keys=f'"$own-{host}/keys"')
    return f" \\\n       {folder}{flags}" if folder or flags else ""
