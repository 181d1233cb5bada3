"""The orchestrator: rollouts, groups, advantages, batches. Its process does without torch."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.ledger import new_process
from pellucid.ledger.settings import changed_settings
from pellucid.ledger.weights import WEIGHTS_BOOK, WeightsBook
from pellucid.orchestrator.advantage import AdvantageInputs, AdvantageOutputs, ScoredRollout
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment, load_environment
from pellucid.orchestrator.group import Evaluation, load_evaluation
from pellucid.orchestrator.loop import Orchestrator
from pellucid.orchestrator.servers import Claims, connect_policy, connect_teacher, open_offered_versions
from pellucid.orchestrator.session import Session
from pellucid.orchestrator.snapshot import check_max_steps, has_trainers_part, read_snapshot
from pellucid.orchestrator.tasks import run_until_signalled
from pellucid.orchestrator.verdict import FilterInputs
from pellucid.transport import BatchSender, open_sender
from pellucid.transport.zmq_sender import ZmqSender

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

log = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_AFTER_S = 10.0


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
        # Before each wait: what cannot work is refused at once, not when trainer and server are there.
        _check_resume(config)
        sender = open_sender(config.transport, config.output_dir, config.run_name)
        missing = await _missing_batch(config, sender)
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
            missing,
        )
        if teacher is not None:
            await teacher.wait_until_ready()
        await client.wait_until_ready()
        await orchestrator.run()
    finally:
        await client.close()
        if teacher is not None:
            await teacher.close()


def _check_resume(config: OrchestratorRunConfig) -> None:
    """Raises ConfigError if a run cannot be resumed with these settings, whatever its trainer has."""
    if config.resume:
        changed_settings(config, "orchestrator")
        snapshot = read_snapshot(config.output_dir)
        if snapshot is not None and not has_trainers_part(config.output_dir):
            check_max_steps(config, snapshot.batches_sent, "sampled")


async def _missing_batch(config: OrchestratorRunConfig, sender: BatchSender) -> int | None:
    """Waits until the trainer says which batch it has not stored, where that decides how a run resumes.

    A trainer that works in the same folder is not asked: what it has is to be seen there.
    """
    folder = config.output_dir
    if not isinstance(sender, ZmqSender) or not config.resume:
        return None
    if read_snapshot(folder) is None or has_trainers_part(folder):
        return None
    asked_s = time.monotonic()
    is_said = False
    while (missing := sender.missing_batch()) is None:
        if not is_said and time.monotonic() - asked_s > _SAY_AFTER_S:
            log.warning(
                "waiting for the trainer, which knows the batches that it has; is it running, and of "
                "the same version of pellucid?"
            )
            is_said = True
        await asyncio.sleep(_POLL_S)
    return missing
