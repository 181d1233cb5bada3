"""The orchestrator: rollouts, groups, advantages, batches. Its process does without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.ledger import new_process
from pellucid.ledger.weights import WEIGHTS_BOOK, WeightsBook
from pellucid.orchestrator.advantage import AdvantageInputs, AdvantageOutputs, ScoredRollout
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.group import Evaluation, load_evaluation
from pellucid.orchestrator.loop import Orchestrator
from pellucid.orchestrator.servers import Claims, connect_policy, connect_teacher, open_offered_versions
from pellucid.orchestrator.session import Session
from pellucid.orchestrator.tasks import run_until_signalled
from pellucid.orchestrator.verdict import FilterInputs
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

    On SIGTERM or Ctrl-C it cancels running rollouts, accounts for their tokens and exits with 128 + the
    signal.
    """
    config.check_addresses()
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
    process, claims = new_process(), Claims()
    weights_book = WeightsBook(config.output_dir / "ledger" / WEIGHTS_BOOK)
    offered = open_offered_versions(config)
    client = connect_policy(config, tokenizer, claims, process, weights_book, offered)
    teacher = connect_teacher(config, tokenizer, claims, process)
    try:
        sender = open_sender(config.transport, config.output_dir, config.run_name)
        # Before the wait: what cannot work is refused at once, not when a server is there.
        orchestrator = Orchestrator(
            config,
            environments,
            tokenizer,
            client,
            sender,
            evaluations,
            teacher,
            process,
            weights_book,
            offered,
        )
        if teacher is not None:
            await teacher.wait_until_ready()
        await client.wait_until_ready()
        await orchestrator.run()
    finally:
        await client.close()
        if teacher is not None:
            await teacher.close()
