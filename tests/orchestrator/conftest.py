"""Attempts against scripted replies, with the real session, chat template and samples."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pellucid.data import Completion, Example, Rollout
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.group import GroupRun
from pellucid.orchestrator.session import Sampler

Attempt = Callable[..., Rollout]


class ScriptedClient(FakeInferenceClient):
    """Replies with the tokens it was given, in turn, and remembers the prompts."""

    def __init__(self, replies: Sequence[Sequence[int]], *, fails: bool) -> None:
        remaining = iter(replies)
        super().__init__(lambda prompt_ids, generator: next(remaining), fails=lambda generator: fails)
        self.prompts: list[Sequence[int]] = []

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        self.prompts.append(prompt_ids)
        return await super().generate(prompt_ids, params, account, request_id)


@pytest.fixture
def attempt() -> Attempt:
    """`attempt(environment, example, replies)` is the rollout; a reply is text, or token ids."""

    def run(
        environment: Environment,
        example: Example,
        replies: Sequence[str | Sequence[int]],
        *,
        tokenizer: Any = None,
        state_columns: Sequence[str] = (),
        server_fails: bool = False,
        timeout_s: float = 10.0,
    ) -> Rollout:
        tokenizer = tokenizer or character_tokenizer()
        token_ids = [
            [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
            if isinstance(reply, str)
            else reply
            for reply in replies
        ]
        chat = ChatTemplate(tokenizer)
        sampler = Sampler(ScriptedClient(token_ids, fails=server_fails), chat, "run", 0, 1.0, 100, 2000)
        group = GroupRun("g0", "env", environment, example, 1, sampler, timeout_s, state_columns)
        rollout = group.open_rollout("g0-r0")

        async def served() -> None:
            async with environment.serving():
                await group.attempt(rollout)

        asyncio.run(served())
        return rollout

    return run
