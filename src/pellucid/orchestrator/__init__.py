"""The orchestrator: rollouts, groups, advantages, batches. Its process does without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError
from pellucid.orchestrator.advantage import AdvantageInputs, AdvantageOutputs, ScoredRollout
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.evaluation import Evaluation, load_evaluation
from pellucid.orchestrator.loop import Orchestrator
from pellucid.orchestrator.session import Session
from pellucid.orchestrator.signals import run_until_signalled
from pellucid.transport import open_sender

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
    """Sends `max_steps` batches from the server at `inference.host:port` into the run folder.

    Told to stop by SIGTERM or Ctrl-C, it winds down, closes its books and exits with 128 + the signal.
    """
    if config.inference.port == 0:
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
    from pellucid.inference.http import HttpInferenceClient

    client = HttpInferenceClient(base_url(config.inference.host, config.inference.port))
    try:
        await client.wait_until_ready()
        sender = open_sender(config.transport, config.output_dir)
        await Orchestrator(config, environments, tokenizer, client, sender, evaluations).run()
    finally:
        await client.close()


def base_url(host: str, port: int) -> str:
    """`http://127.0.0.1:8000`, `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
