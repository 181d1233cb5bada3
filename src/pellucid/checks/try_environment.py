"""`pellucid env try ID`: an environment alone, without training and without a run folder.

    who answers            prompts are rendered by                   rollouts of a group
    --reply, --replies     --model's tokenizer, else plain ChatML    one by one: replies come in order
    --server URL           --model's tokenizer, else the server's    at once
    --model FOLDER         its own tokenizer                         at once

Sessions, attempts, scoring and their failures are those of a run (`orchestrator.group`).
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.config import EnvConfig, InferenceConfig, InferenceRunConfig, ModelConfig
from pellucid.config.tools import EnvSettings
from pellucid.data import Completion, Rollout, Turn
from pellucid.data.images import tensors_of
from pellucid.data.plain import printable, to_json
from pellucid.data.tokenizer import byte_tokenizer, fingerprint, load_tokenizer
from pellucid.errors import ConfigError, ModelError
from pellucid.guard import read_key
from pellucid.inference.client import (
    Account,
    GenerateRequest,
    InferenceClient,
    SamplingParams,
    other_vocabulary,
)
from pellucid.inference.fake import FakeInferenceClient
from pellucid.launch.console import make_console
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import Environment, draw_example, load_environment
from pellucid.orchestrator.group import GroupRun
from pellucid.orchestrator.session import Sampler

if TYPE_CHECKING:
    from pellucid.inference.engine_thread import EngineThread

MAX_TOKENS = 512
NO_LIMIT = 2**31 - 1
GROUP_SIZE = 2
"""Rollouts per example where rewards compare them."""


def run_env(settings: EnvSettings) -> int:
    """0 if every rollout has a reward, 1 if one failed."""
    config = EnvConfig(id=settings.id, args=settings.args)
    environment = load_environment(config, settings.seed)
    console = make_console()
    rollouts: list[Rollout] = []

    async def attempt_all() -> None:
        async with _open_sampler(settings) as sampler, environment.serving():
            for index in range(settings.start, settings.start + settings.num_examples):
                for rollout in await _attempt(settings, config.label, environment, index, sampler):
                    rollouts.append(rollout)
                    if settings.as_json:
                        print(to_json(_as_dict(rollout, sampler.chat.tokenizer)).decode(), flush=True)
                    else:
                        console.print(rollout_panel(rollout, sampler.chat.tokenizer))

    asyncio.run(attempt_all())
    num_failed = sum(map(_has_failed, rollouts))
    if not settings.as_json:
        rewards = [rollout.reward or 0.0 for rollout in rollouts if not _has_failed(rollout)]
        line = f"{len(rollouts)} rollouts: {len(rewards)} scored, {num_failed} failed"
        if rewards:
            mean = sum(rewards) / len(rewards)
            line += f"; reward mean {mean:.4g}, min {min(rewards):.4g}, max {max(rewards):.4g}"
        console.out(line, highlight=False)
    return 1 if num_failed else 0


async def _attempt(
    settings: EnvSettings, label: str, environment: Environment, index: int, sampler: Sampler
) -> list[Rollout]:
    """Attempts one example; given replies are handed out in order, so their rollouts run one by one."""
    size = settings.rollouts_per_example or (GROUP_SIZE if environment.requires_group_scoring else 1)
    group = GroupRun(
        group_id=f"e{index}",
        env_name=label,
        environment=environment,
        example=draw_example(environment, label, index),
        size=size,
        sampler=sampler,
        timeout_s=settings.timeout_s,
    )
    rollouts = [group.open_rollout(f"e{index}-r{member}") for member in range(size)]
    if settings.reply or settings.replies is not None:
        for rollout in rollouts:
            await group.attempt(rollout)
    else:
        await asyncio.gather(*map(group.attempt, rollouts))
    return rollouts


@asynccontextmanager
async def _open_sampler(settings: EnvSettings) -> AsyncIterator[Sampler]:
    if replies := _replies(settings):
        yield _canned(settings, replies)
    elif settings.server is not None:
        async with _served(settings, settings.server) as sampler:
            yield sampler
    elif settings.model is not None:
        async with _computed(settings, settings.model) as sampler:
            yield sampler
    else:
        raise ConfigError(
            "nobody answers the environment; give --reply TEXT or --replies FILE, --server URL, or "
            "--model FOLDER"
        )


def _sampler(settings: EnvSettings, client: InferenceClient, tokenizer: Any, max_model_len: int) -> Sampler:
    return Sampler(
        client=client,
        chat=ChatTemplate(tokenizer),
        run_id="",  # in nobody's books
        seed=settings.seed,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens or MAX_TOKENS,
        max_model_len=max_model_len,
    )


def _replies(settings: EnvSettings) -> Sequence[str]:
    if settings.replies is None:
        return settings.reply
    try:
        lines = settings.replies.read_text().splitlines()
        replies = [orjson.loads(line) for line in lines] if settings.replies.suffix == ".jsonl" else lines
    except (OSError, ValueError) as error:
        raise ConfigError(f"--replies {settings.replies} cannot be read: {error}") from error
    wrong = next((reply for reply in replies if not isinstance(reply, str)), None)
    if wrong is not None or not replies:
        found = "is empty" if wrong is None else f"has {wrong!r}"
        raise ConfigError(
            f"--replies {settings.replies} {found}; write a reply per line, as a JSON string in .jsonl"
        )
    return replies


def _canned(settings: EnvSettings, replies: Sequence[str]) -> Sampler:
    tokenizer = byte_tokenizer() if settings.model is None else load_tokenizer(settings.model)
    end_of_turn = ChatTemplate(tokenizer).end_of_turn_ids[:1]
    coming = itertools.cycle(replies)

    def respond(prompt_ids: Sequence[int], generator: object) -> list[int]:
        return [*tokenizer.encode(next(coming), add_special_tokens=False), *end_of_turn]

    sampler = _sampler(settings, FakeInferenceClient(respond), tokenizer, NO_LIMIT)
    return replace(sampler, max_tokens=settings.max_tokens or NO_LIMIT)


@asynccontextmanager
async def _served(settings: EnvSettings, url: str) -> AsyncIterator[Sampler]:
    from pellucid.inference.http import HttpInferenceClient

    key = None if settings.key_file is None else read_key(settings.key_file, "--key-file")
    client = HttpInferenceClient(url.rstrip("/"), key)
    try:
        health = await client.health()
        if health.access == "none":
            raise ConfigError(f"{url} needs its key; name `key` of its run folder with --key-file")
        name = settings.model or health.model
        try:
            tokenizer = load_tokenizer(name)
        except ModelError as error:
            raise ModelError(f"the tokenizer of {url}: {error}; name it with --model") from error
        if fingerprint(tokenizer) != health.vocabulary:
            remedy = "name the model that is served, or leave it out"
            raise ConfigError(other_vocabulary(f"--model {name}", f"{health.model!r} at {url}", remedy))
        yield _sampler(settings, client, tokenizer, health.max_model_len)
    finally:
        await client.close()


@asynccontextmanager
async def _computed(settings: EnvSettings, name: str) -> AsyncIterator[Sampler]:
    from pellucid.inference.engine_thread import EngineThread
    from pellucid.inference.server import open_engine
    from pellucid.ledger import Journal, Stage
    from pellucid.metrics import Tee
    from pellucid.model.load import context_length

    model = ModelConfig(name=name)
    default = InferenceConfig().max_model_len
    max_model_len = min(default, context_length(model) or default)
    config = InferenceRunConfig(model=model, inference=InferenceConfig(max_model_len=max_model_len))
    tokenizer = load_tokenizer(name)
    engine = open_engine(config, tokenizer)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "inference.jsonl", Stage.INFERENCE)
        thread = EngineThread(engine, journal, Tee([]), lambda error: None)  # the rollout tells of it
        thread.start()
        try:
            yield _sampler(settings, EngineClient(thread), tokenizer, max_model_len)
        finally:
            await asyncio.to_thread(thread.stop)


class EngineClient:
    """An engine of this process as an inference client: ready, with weights that stay; its maker stops it."""

    def __init__(self, thread: "EngineThread") -> None:
        self._thread = thread

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        images = tensors_of(prompt_ids)
        request = GenerateRequest(list(prompt_ids), params, account, request_id, mm_tensors=images)
        [completion] = await self._thread.complete([request])
        return completion

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        return await self._thread.score(token_ids, temperature)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._thread.abort(request_ids)

    async def wait_until_ready(self) -> None: ...

    async def close(self) -> None: ...

    async def watch(self) -> None:
        await asyncio.Event().wait()  # whoever made the engine notices

    async def update_weights(self, version: int, folder: Path) -> None:
        raise ConfigError("the weights of `env try` do not change")


def _blocks(turns: Sequence[Turn], tokenizer: Any) -> Iterator[tuple[str, str, str]]:
    """Yields role, given text and sampled text of each message as the model saw it.

    A turn that goes on from the one before adds what is new.
    """
    known: list[int] = []
    for turn in turns:
        ids, num_prompt = turn.known_ids.tolist(), turn.num_prompt_tokens
        start = len(known) if known and ids[: len(known)] == known else 0
        if known and not start:
            yield "", "(another conversation)", ""
        for role, first, last in turn.role_spans:
            if first >= start:
                prompt = tokenizer.decode(ids[first : min(last, num_prompt)])
                yield role, prompt, tokenizer.decode(ids[max(first, num_prompt) : last])
        if turn.finish_reason == "length":
            yield "", "(cut off at --max-tokens)", ""
        known = ids


def rollout_panel(rollout: Rollout, tokenizer: Any) -> RenderableType:
    """The conversation, what was sampled in bold; reward and metrics, or the failure with its traceback."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for role, given, sampled in _blocks(rollout.turns, tokenizer):
        text = Text.assemble((printable(given), "dim"), (printable(sampled), "bold"))
        text.rstrip()
        table.add_row(role, text)
    for name, value in rollout.metrics.items():
        weight = rollout.weights.get(name)
        part = "" if weight is None else f" × {weight:g}"
        table.add_row("metric" if weight is None else "reward", f"{name} {value:g}{part}")
    if rollout.error is not None:
        table.add_row("failed", Text(rollout.error, style="red"))
    name = f"example {rollout.example.example_id} · {rollout.rollout_id}"
    if not _has_failed(rollout):
        return Panel(table, title=Text(f"{name} · reward {rollout.reward:g}"), border_style="green")
    why = "failed" if rollout.error is not None else "no reward: its group was not scored"
    panel = Panel(table, title=Text(f"{name} · {why}"), border_style="red")
    return Group(panel, Text(rollout.traceback, style="dim")) if rollout.traceback else panel


def _has_failed(rollout: Rollout) -> bool:
    return rollout.reward is None or rollout.error is not None


def _as_dict(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "example_id": rollout.example.example_id,
        "messages": [dict(message) for message in rollout.example.messages],
        "turns": [
            {
                "prompt": tokenizer.decode(turn.tokens.prompt_ids.tolist()),
                "reply": turn.text,
                "num_tokens": turn.num_tokens,
                "finish_reason": turn.finish_reason,
                "trainable": turn.trainable,
            }
            for turn in rollout.turns
        ],
        "reward": None if _has_failed(rollout) else rollout.reward,
        "metrics": rollout.metrics,
        "weights": rollout.weights,
        "error": rollout.error,
        "traceback": rollout.traceback,
    }
