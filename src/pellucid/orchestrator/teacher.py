"""The teacher of a run: a model that scores what the policy samples, or samples in its place.

    mode   who samples   what the teacher adds                       samples train as
    opd    the policy    a logprob for every token                   opd
    rl     the policy    the same, for trainer.loss.teacher_tau      rl
    sft    the teacher   the rollouts                                sft

- A rollout that cannot be scored has failed, and is attempted again like any other.
- Every sample of a rollout is scored, each as the sequence that the trainer will see, at the temperature at
  which it was sampled.
- Tokens of the teacher carry no policy version, so they are never stale.
- Scoring samples nothing and is in no books. What a teacher samples is: a server that `pellucid rl` started
  writes the run's ledger itself; of any other server the run knows only what arrived, and books that as
  sampled.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.config import OrchestratorRunConfig, TeacherConfig
from pellucid.data import NOT_OURS, Completion, PackedArray, Rollout, TrainingMode
from pellucid.errors import InferenceError, TeacherError
from pellucid.inference.client import Account, InferenceClient
from pellucid.ledger import Flow, Journal, Stage, link_of
from pellucid.orchestrator.verdict import token_sequences

_FLUSH_S = 0.25


def training_mode(teacher: TeacherConfig | None) -> TrainingMode:
    return TrainingMode.RL if teacher is None else TrainingMode(teacher.mode)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Adds the teacher's logprobs to finished rollouts."""

    client: InferenceClient
    run_id: str

    async def score(self, rollout: Rollout) -> None:
        name = f"{self.run_id}/{rollout.group_id}/{rollout.rollout_id}"
        rollout.teacher_logprobs = [
            await self._score(token_ids, rollout.temperature, f"{name}/teacher-{index}")
            for index, token_ids in enumerate(token_sequences(rollout))
        ]

    async def _score(
        self, token_ids: NDArray[np.integer[Any]], temperature: float, request_id: str
    ) -> PackedArray:
        try:
            logprobs = await self.client.score(token_ids.tolist(), temperature, request_id)
        except InferenceError as error:
            raise TeacherError(f"the teacher could not score the rollout: {error}") from error
        if len(logprobs) != len(token_ids):
            raise TeacherError(f"the teacher gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
        return PackedArray.pack(np.asarray(logprobs, np.float32))


class TeacherBooks:
    """The completions of a teacher that samples in the policy's place: they carry no policy version."""

    def __init__(self, config: OrchestratorRunConfig, process: str) -> None:
        """`process`: this process's name in the ledger."""
        self._journal: Journal | None = None
        """Journal of arriving tokens; None if the teacher's server, which this run started, books them."""
        if config.orchestrator.teacher is not None and config.orchestrator.teacher.model is None:
            path = config.output_dir / "ledger" / "inference_teacher.jsonl"
            self._journal = Journal(path, Stage.INFERENCE, resume=config.resume, process=process)
        self._flushed = time.monotonic()

    def take(self, completion: Completion, account: Account) -> Completion:
        """Returns the completion as one of the teacher's; books it if its server does not."""
        num_tokens = len(completion.token_ids)
        runs = [(NOT_OURS, num_tokens)] if num_tokens else []
        link = completion.link if self._journal is None else self._book(self._journal, account, num_tokens)
        return msgspec.structs.replace(completion, policy_versions=runs, link=link)

    def _book(self, journal: Journal, account: Account, num_tokens: int) -> str:
        """Books the tokens for the server, with this process at both ends of the link; returns the link."""
        link = link_of(journal.process, journal.process)
        for flow in (Flow.SAMPLED, Flow.DELIVERED):
            journal.count(account.run, account.env, flow, num_tokens, link)
        if time.monotonic() - self._flushed > _FLUSH_S:
            journal.flush(0)
            self._flushed = time.monotonic()
        return link

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(0)
