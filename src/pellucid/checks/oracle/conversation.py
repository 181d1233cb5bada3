"""Messages to prompts, a rollout's turns to training samples, a group's rewards to advantages: plain Python.

Every sampled token is trainable in exactly one sample: that of the first conversation it belongs to.

    turn 0   prompt a b       reply X Y
    turn 1   prompt a b X Y d reply Z      goes on from turn 0: the same sample, a b X Y d Z
    turn 2   prompt a b c     reply W      goes on from nothing: a sample of its own, a b c W
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sampled:
    """One request to the model and its answer."""

    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    is_trainable: bool = True


@dataclass
class Conversation:
    """A training sample: what was sampled in it, and what of that trains."""

    token_ids: list[int]
    is_sampled: list[bool]
    is_trainable: list[bool]
    logprobs: list[float]
    """log μ of sampled tokens, 0 elsewhere."""

    versions: list[int]
    """The policy version that sampled each token; −1 where none did."""


def expected_samples(turns: Sequence[Sampled]) -> list[Conversation]:
    """Builds the samples of a rollout; a turn continues the latest sample whose tokens its prompt repeats."""
    samples: list[Conversation] = []
    for turn in turns:
        if not turn.reply_ids:
            continue
        prompt = list(turn.prompt_ids)
        continued = [each for each in samples if prompt[: len(each.token_ids)] == each.token_ids]
        if not continued:
            samples.append(Conversation([], [], [], [], []))
        sample = continued[-1] if continued else samples[-1]
        added, size = prompt[len(sample.token_ids) :], len(turn.reply_ids)
        sample.token_ids += [*added, *turn.reply_ids]
        sample.is_sampled += [False] * len(added) + [True] * size
        sample.is_trainable += [False] * len(added) + [turn.is_trainable] * size
        sample.logprobs += [*[0.0] * len(added), *turn.logprobs]
        sample.versions += [*[-1] * len(added), *turn.versions]
    return samples


def prompt_ids_of(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """Renders a conversation that the model answers, and tokenises the text once."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def end_of_messages(tokenizer: Any, messages: Sequence[Any]) -> int | None:
    """Counts the tokens of a conversation without what opens the reply; None if the template does not write
    that after the conversation."""
    prompt = prompt_ids_of(tokenizer, messages)
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=False, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return len(ids) if prompt[: len(ids)] == ids else None


def _ids_after_reply(tokenizer: Any, messages: Sequence[Any], *later: Any, opens_reply: bool) -> list[int]:
    """Finds the token ids that the template writes after a reply to `messages`, which `later` ones follow."""
    mark = "marked reply"
    conversation = [*messages, {"role": "assistant", "content": mark}, *later]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=opens_reply, tokenize=False)
    ids: list[int] = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
    return ids


def response_ids_of(tokenizer: Any, messages: Sequence[Any], last: int, response: Any) -> list[int]:
    """Finds the token ids between a reply to `messages`, which ended in `last`, and the next reply."""
    ids = _ids_after_reply(tokenizer, messages, response, opens_reply=True)
    return ids[1:] if ids[:1] == [last] else ids


def response_length_of(tokenizer: Any, messages: Sequence[Any], response: Any) -> int:
    """Counts the tokens that the template writes for a response, the opening of the next reply left out."""
    before = _ids_after_reply(tokenizer, messages, opens_reply=False)
    return len(_ids_after_reply(tokenizer, messages, response, opens_reply=False)) - len(before)


def truncated(sample: Conversation, seq_len: int) -> Conversation:
    """Keeps the first `seq_len` tokens."""
    return Conversation(**{name: values[:seq_len] for name, values in vars(sample).items()})


def off_policy_levels(step: int, sample: Conversation) -> list[int]:
    """Computes how many steps old each sampled token is: the step that trains it minus its version."""
    pairs = zip(sample.versions, sample.is_sampled, strict=True)
    return [step - version for version, is_sampled in pairs if is_sampled]


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose rollouts are all back."""

    name: str
    num_trained: int
    """Rollouts that have something to train on."""

    oldest_version: int


def expected_batches(
    groups: Sequence[FinishedGroup], *, batch_size: int, max_off_policy_steps: int, num_batches: int
) -> tuple[list[list[str]], set[str]]:
    """Fills batches with whole groups, in the order in which they were finished; returns the stale ones, too.

    A batch is full with `batch_size` rollouts. A group with a token that is too old for the batch that it
    would be in is stale.
    """
    batches: list[list[str]] = []
    stale: set[str] = set()
    names: list[str] = []
    size = 0
    for group in groups:
        if len(batches) == num_batches:
            break
        if len(batches) - group.oldest_version > max_off_policy_steps:
            stale.add(group.name)
        elif group.num_trained:
            names.append(group.name)
            size += group.num_trained
        if size >= batch_size:
            batches.append(names)
            names, size = [], 0
    return batches, stale


def advantages_of(
    kind: str,
    rewards: Sequence[float],
    *,
    completion_tokens: Sequence[int],
    tool_tokens: Sequence[int],
    num_turns: Sequence[int],
    length_penalty: Mapping[str, Any] | None = None,
) -> list[float]:
    """Computes the advantages of one group; `kind` is a built-in `orchestrator.advantage.type`."""
    shaped = [float(np.float32(reward)) for reward in rewards]  # as they are recorded
    if kind == "none":
        return shaped
    if kind == "default" and length_penalty is not None and length_penalty["type"] != "none":
        if length_penalty["type"] == "turns":
            costs = [float(number) for number in num_turns]
        else:
            weights = length_penalty["completion_weight"], length_penalty["tool_response_weight"]
            pairs = zip(completion_tokens, tool_tokens, strict=True)
            costs = [weights[0] * sampled + weights[1] * tools for sampled, tools in pairs]
        shaped = _reward_short_answers(shaped, costs)
    if len(set(shaped)) == 1:
        return [0.0] * len(shaped)  # nothing to compare, whatever rounding makes of their mean
    mean = statistics.fmean(shaped)
    if kind == "default":
        return [reward - mean for reward in shaped]
    if kind == "rloo":
        return [reward - (sum(shaped) - reward) / (len(shaped) - 1) for reward in shaped]
    if kind == "grpo_std":
        return [(reward - mean) / statistics.stdev(shaped) for reward in shaped]
    if kind == "max_rl":
        return [(reward - mean) / mean if mean > 0 else 0.0 for reward in shaped]
    raise KeyError(kind)


def _reward_short_answers(rewards: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Multiplies the best rewards by 1 + the share of cost saved against the mean of the best."""
    best = max(rewards)
    correct = [reward >= best for reward in rewards]
    mean_cost = statistics.fmean([cost for cost, is_best in zip(costs, correct, strict=True) if is_best])
    if best <= 0 or mean_cost <= 0:
        return list(rewards)
    return [
        reward * (1 + min(max(1 - cost / mean_cost, 0.0), 1.0)) if is_best else reward
        for reward, cost, is_best in zip(rewards, costs, correct, strict=True)
    ]
