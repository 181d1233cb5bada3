"""The orchestrator: rollouts, groups, advantages, batches. Its process does without torch."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.config import InferenceConfig, OrchestratorRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError
from pellucid.inference.client import InferenceClient
from pellucid.inference.pool import ServerPool
from pellucid.orchestrator.advantage import AdvantageInputs, AdvantageOutputs, ScoredRollout
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.evaluation import Evaluation, load_evaluation
from pellucid.orchestrator.filters import FilterInputs
from pellucid.orchestrator.loop import Orchestrator
from pellucid.orchestrator.session import Session, group_of_request
from pellucid.orchestrator.signals import run_until_signalled
from pellucid.transport import open_sender

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "Environment",
    "FilterInputs",
    "Orchestrator",
    "Score",
    "ScoredRollout",
    "Session",
    "SingleTurnEnvironment",
    "load_environment",
    "run_orchestrator",
]


def run_orchestrator(config: OrchestratorRunConfig) -> None:
    """Sends `max_steps` batches from the server at `inference.host:port` into the run folder.

    Told to stop by SIGTERM or Ctrl-C, it winds down, closes its books and exits with 128 + the signal.
    """
    if config.inference.port == 0 and not config.inference.servers:
        raise ConfigError(
            "inference.port = 0 does not say where the server is; set the port that `pellucid inference` "
            "serves on, or start all parts with `pellucid rl`"
        )
    environments = {env.label: load_environment(env, config.seed) for env in config.orchestrator.env}
    evaluations = [load_evaluation(each, config.seed) for each in config.orchestrator.eval]
    tokenizer = load_tokenizer(config.model.name)
    run_until_signalled(lambda: _orchestrate(config, environments, evaluations, tokenizer))


async def _orchestrate(
    config: OrchestratorRunConfig,
    environments: Mapping[str, Environment],
    evaluations: Sequence[Evaluation],
    tokenizer: Any,
) -> None:
    client = _connect(config.inference)
    try:
        sender = open_sender(config.transport, config.output_dir, config.run_name)
        # Before the wait: what cannot work is refused at once, not when a server is there.
        orchestrator = Orchestrator(config, environments, tokenizer, client, sender, evaluations)
        await client.wait_until_ready()
        await orchestrator.run()
        await asyncio.to_thread(sender.close)
    finally:
        await client.close()


def _connect(config: InferenceConfig) -> InferenceClient:
    from pellucid.inference.http import HttpInferenceClient

    urls = config.servers or (base_url(config.host, config.port),)
    if len(urls) == 1:
        return HttpInferenceClient(urls[0])
    return ServerPool({url: HttpInferenceClient(url) for url in urls}, group_of_request)


def base_url(host: str, port: int) -> str:
    """`http://127.0.0.1:8000`, `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
