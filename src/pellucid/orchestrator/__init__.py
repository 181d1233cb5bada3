"""The orchestrator: rollouts, groups, advantages, batches. Its process does without torch."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError
from pellucid.orchestrator.advantage import AdvantageInputs, AdvantageOutputs, ScoredRollout
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.loop import Orchestrator
from pellucid.orchestrator.session import Session
from pellucid.transport import FilesystemSender

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "Environment",
    "Orchestrator",
    "Score",
    "ScoredRollout",
    "Session",
    "SingleTurnEnvironment",
    "load_environment",
    "run_orchestrator",
]


def run_orchestrator(config: OrchestratorRunConfig) -> None:
    """Sends `max_steps` batches from the server at `inference.host:port` into the run folder."""
    if config.inference.port == 0:
        raise ConfigError(
            "inference.port = 0 does not say where the server is; set the port that `pellucid inference` "
            "serves on, or start all parts with `pellucid rl`"
        )
    environments = {env.label: load_environment(env, config.seed) for env in config.orchestrator.env}
    tokenizer = load_tokenizer(config.model.name)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner, suppress(asyncio.CancelledError):
        runner.run(_orchestrate(config, environments, tokenizer))


async def _orchestrate(
    config: OrchestratorRunConfig, environments: Mapping[str, Environment], tokenizer: Any
) -> None:
    from pellucid.inference.http import HttpInferenceClient

    _cancel_on_sigterm()
    client = HttpInferenceClient(f"http://{config.inference.host}:{config.inference.port}")
    try:
        await client.wait_until_ready()
        sender = FilesystemSender(config.output_dir)
        await Orchestrator(config, environments, tokenizer, client, sender).run()
    finally:
        await client.close()


def _cancel_on_sigterm() -> None:
    """Told to stop, the run winds down and closes its books."""
    task = asyncio.current_task()
    if sys.platform != "win32" and task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":  # uvloop does not exist there
        return None
    import uvloop

    return uvloop.new_event_loop
