"""A rollout's conversation with the model: messages in, text out, every sampled token recorded.

- A turn is recorded before its text is returned, so what was sampled is known whatever happens next.
- Sampled ids are kept as sampled. A prompt that goes on from the last reply starts with the very tokens
  of the last prompt and completion; one that does not is a branch, rendered from its beginning.
- The rollouts of a group get the same prompt object, so the engine can share its prefill.
- A seed depends on the run's seed, the rollout and the turn alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.data import Rollout, Turn
from pellucid.errors import RolloutError
from pellucid.inference.client import Account, InferenceClient, SamplingParams
from pellucid.orchestrator.chat import ChatTemplate, Message, Rendered
from pellucid.orchestrator.seeds import stable_seed

RoleSpan = tuple[str, int, int]


@dataclass(slots=True)
class Sampler:
    """What all sessions of a run share."""

    client: InferenceClient
    chat: ChatTemplate
    run_id: str
    seed: int
    temperature: float
    max_tokens: int
    max_model_len: int
    closed: bool = False
    """The run is over: no session samples another turn."""


class PromptCache:
    """The first prompt of a group, rendered once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._first: tuple[list[Message], Rendered] | None = None

    def render(self, messages: Sequence[Message]) -> Rendered:
        if self._first is None:
            self._first = list(messages), self._chat.prompt(messages)
        first, rendered = self._first
        return rendered if first == list(messages) else self._chat.prompt(messages)


class Session:
    """What an environment talks to during one rollout."""

    def __init__(self, rollout: Rollout, sampler: Sampler, prompts: PromptCache) -> None:
        self._rollout = rollout
        self._sampler = sampler
        self._prompts = prompts
        self._conversation: list[Message] = []

    async def respond(self, messages: Sequence[Message]) -> str:
        """The model's reply to the whole conversation so far."""
        prompt_ids, spans = self._prompt(messages)
        completion = await self._sampler.client.generate(
            prompt_ids, self._params(len(prompt_ids)), Account(self._sampler.run_id, self._rollout.env_name)
        )
        text = self._sampler.chat.decode(completion.token_ids)
        reply_start = spans[-1][2] if spans else 0
        reply = ("assistant", reply_start, len(prompt_ids) + len(completion.token_ids))
        self._rollout.turns.append(Turn(prompt_ids, completion, text, [*spans, reply]))
        self._conversation = [*messages, {"role": "assistant", "content": text}]
        if completion.finish_reason == "abort":
            raise RolloutError(
                f"the server cut the completion short after {len(completion.token_ids)} tokens"
            )
        return text

    def _params(self, num_prompt: int) -> SamplingParams:
        sampler = self._sampler
        if sampler.closed:
            raise RolloutError("the run is over; no further turn is sampled")
        room = sampler.max_model_len - num_prompt
        if room < 1:
            raise RolloutError(
                f"the prompt has {num_prompt} tokens and leaves no room for a completion in "
                f"inference.max_model_len = {sampler.max_model_len}; raise it or shorten the prompt"
            )
        return SamplingParams(
            temperature=sampler.temperature,
            max_tokens=min(sampler.max_tokens, room),
            seed=stable_seed(sampler.seed, self._rollout.rollout_id, len(self._rollout.turns)),
            stop_token_ids=sampler.chat.end_of_turn_ids,
        )

    def _prompt(self, messages: Sequence[Message]) -> tuple[list[int], list[RoleSpan]]:
        num_known = len(self._conversation)
        if 0 < num_known < len(messages) and self._conversation == list(messages[:num_known]):
            rendered = self._sampler.chat.continuation(messages, num_known - 1)
            if rendered is not None:
                return self._extend(self._rollout.turns[-1], rendered)
        rendered = self._prompts.render(messages)
        return rendered.token_ids, _spans([], rendered.stops, 0)

    def _extend(self, last: Turn, rendered: Rendered) -> tuple[list[int], list[RoleSpan]]:
        """The tokens of the last turn and what the template puts after them."""
        known = [*last.prompt_ids, *last.completion.token_ids]
        repeated = known[-1] in self._sampler.chat.end_of_turn_ids and rendered.token_ids[:1] == known[-1:]
        offset = len(known) - repeated  # the model has closed its turn itself
        (role, reply_stop), *later = rendered.stops
        reply = (role, last.role_spans[-1][1], max(len(known), offset + reply_stop))
        spans = _spans([*last.role_spans[:-1], reply], later, offset)
        return known[:offset] + rendered.token_ids, spans


def _spans(known: list[RoleSpan], stops: list[tuple[str, int]], offset: int) -> list[RoleSpan]:
    spans = list(known)
    for role, stop in stops:
        spans.append((role, spans[-1][2] if spans else 0, offset + stop))
    return spans
