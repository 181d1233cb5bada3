"""Starts and supervises the processes of a run on one machine. No torch here: it has to start at once."""

from pellucid.launch.rl import run_rl
from pellucid.launch.run_folder import prepare, run_rewind
from pellucid.launch.sft import run_sft
from pellucid.launch.supervisor import Child, supervise

__all__ = ["Child", "prepare", "run_rewind", "run_rl", "run_sft", "supervise"]
