"""Rollout dumps of other systems, read as pellucid's saved rollouts: verl, TRL, prime-rl, inspect.

A format is a row of `FORMATS`: the keys by which a record is known, and a table of its names in ours. Formats
are recognised by content; a file's name only tells how it is packed.

    STEP.jsonl                         verl, `trainer.rollout_data_dir`: an object per rollout
    completions/completions_*.parquet  TRL, `log_completions`: a row per completion
    */traces.jsonl, *_rollouts.jsonl   prime-rl and verifiers: an object per rollout, trace or episode
    *.json, *.eval                     inspect: a log of samples, as one object or as a zip archive of objects

Traces of prime-rl hold token ids, masks and logprobs, too: `token_records` has them as records of an export,
one per branch of the conversation. Everything else is text and numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import orjson

from pellucid.errors import DataError

Rollout = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    title: str
    known_by: frozenset[str]
    """Keys that every record has."""

    fields: Mapping[str, str]
    """Foreign name, dotted where it is nested -> name in a saved rollout; of several the first that
    is there. `prompt` and `reply` become messages."""

    lacks: str
    """Says what the dump does not hold, and how to get it."""

    outcome: str = "sent"
    """Outcome of rollouts that did not fail: sent to the trainer."""

    others: bool = False
    """Whether numbers under other names are parts of the reward or metrics, and texts worth showing."""


_RECORDER = "pellucid.integrations' TokenRecorder, called by the training loop, records every token."

FORMATS: Mapping[str, Format] = {
    "verl": Format(
        "verl's rollout dump",
        frozenset({"input", "output", "score", "step"}),
        {
            "input": "prompt",
            "output": "reply",
            "score": "reward",
            "step": "step",
            "uid": "group_id",
            "request_id": "rollout_id",
            "data_source": "env_name",
        },
        "verl's rollout dump has texts and scores, but no tokens, logprobs, advantages or masks. "
        + _RECORDER,
        others=True,
    ),
    "trl": Format(
        "TRL's completions log",
        frozenset({"step", "prompt", "completion", "advantage"}),
        {"step": "step", "prompt": "prompt", "completion": "reply", "advantage": "advantage"},
        "TRL's completions log has no tokens, logprobs or masks, and of several reward functions not the "
        "weights, so that rewards are shown by function. With pellucid.integrations.trl's "
        "ExportingGRPOTrainer you get every token.",
        others=True,
    ),
    "episode": Format(
        "prime-rl's traces",
        frozenset({"traces", "task"}),
        {
            "env.name": "env_name",
            "env.id": "env_name",
            "group.id": "group_id",
            "run.work.step": "step",
            "run.step": "step",
        },
        "",
    ),
    "trace": Format(
        "prime-rl's traces",
        frozenset({"nodes", "rewards"}),
        {
            "id": "rollout_id",
            "task.key": "example_id",
            "task.data.idx": "example_id",
            "task.idx": "example_id",
            "task.example_id": "example_id",
            "info.env_name": "env_name",
            "env_name": "env_name",
            "info.group_id": "group_id",
            "group_id": "group_id",
            "info.advantage": "advantage",
            "run.work.step": "step",
            "run.step": "step",
            "stop_condition": "stop_reason",
            "metrics": "metrics",
        },
        "prime-rl's traces have texts and rewards; where they have tokens, `pellucid view` of one "
        "traces.jsonl shows them with the sampler's logprobs. What the trainer made of them (its logprobs, "
        "ratios, masks) is in prime-rl's token export: [trainer.experimental.token_export].",
    ),
    "verifiers": Format(
        "prime-rl's rollouts",
        frozenset({"prompt", "completion", "reward"}),
        {
            "prompt": "prompt",
            "completion": "reply",
            "reward": "reward",
            "advantage": "advantage",
            "trajectory_id": "rollout_id",
            "example_id": "example_id",
            "env_name": "env_name",
            "env_id": "env_name",
            "task": "env_name",
            "group_id": "group_id",
            "step": "step",
            "stop_condition": "stop_reason",
            "error": "error",
            "metrics": "metrics",
            "token_usage.output_tokens": "num_tokens",
        },
        "prime-rl's saved rollouts have texts and rewards, but no logprobs or masks of the trainer; its "
        "token export has them: [trainer.experimental.token_export].",
    ),
    "inspect": Format(
        "an inspect log",
        frozenset({"id", "epoch", "input", "target", "output"}),
        {
            "id": "example_id",
            "uuid": "rollout_id",
            "messages": "reply",
            "error.message": "error",
            "output.choices.0.stop_reason": "stop_reason",
            "output.usage.output_tokens": "num_tokens",
        },
        "An inspect log has no token ids, advantages or masks: it is an evaluation. Where the model returned "
        "logprobs, their mean is shown beside the scores.",
        outcome="eval",
    ),
}


def format_of(record: Any) -> str | None:
    """Returns the name of a record's format; None for pellucid's own and for what nobody here writes."""
    if not isinstance(record, Mapping) or "token_ids" in record or {"outcome", "rollout_id"} <= record.keys():
        return None
    return next((name for name, form in FORMATS.items() if form.known_by <= record.keys()), None)


def as_rollouts(record: Mapping[str, Any]) -> list[Rollout]:
    """Converts one record of a known format; an episode has several traces."""
    name = format_of(record)
    if name is None:
        keys = sorted(map(str, record))[:8]
        raise DataError(f"expected a rollout of {', '.join(sorted(FORMATS))}, got the keys {keys}")
    if name == "episode":
        shared = _translate(record, FORMATS[name])
        traces = [trace for trace in list_of(record["traces"]) if format_of(trace) == "trace"]
        return [{**shared, **_as_rollout(trace, "trace")} for trace in traces]
    return [_as_rollout(record, name)]


def _as_rollout(record: Mapping[str, Any], name: str) -> Rollout:
    form = FORMATS[name]
    found = _translate(record, form)
    prompt, reply = found.pop("prompt", None), found.pop("reply", None)
    found["messages"] = [*_messages(prompt, "user"), *_messages(reply, "assistant")]
    metrics, extra = _numbers(found.get("metrics")), {}
    if form.others:
        used = {key.partition(".")[0] for key in form.fields}
        rest = {key: value for key, value in record.items() if key not in used}
        metrics |= _numbers(rest)
        extra = {key: value for key, value in rest.items() if isinstance(value, str) and value}
    if name == "trace":
        _add_trace(record, found, metrics)
    elif name == "inspect":
        _add_sample(record, found, metrics, extra)
    elif name == "trl" and len(metrics) == 1:
        found["reward"] = next(iter(metrics.values()))  # one reward function: its value is the reward
    error = found.get("error")
    if isinstance(error, Mapping):
        found["error"] = next((error[key] for key in ("message", "error", "type") if key in error), None)
    found |= {
        "metrics": metrics,
        "extra": extra,
        "outcome": "failed_rollout" if found.get("error") else form.outcome,
    }
    if found.get("group_id") is None and found["messages"] and name in ("verl", "trl"):
        text = "\0".join(one["content"] for one in found["messages"] if one["role"] != "assistant")
        found["group_id"] = f"prompt-{crc32(text.encode(errors='replace')):08x}"
    return found


def _add_trace(record: Mapping[str, Any], found: Rollout, metrics: dict[str, float]) -> None:
    """Adds what a trace says in lists: its messages, its rewards with their weights, its last error."""
    nodes = [node for node in list_of(record["nodes"]) if isinstance(node, Mapping)]
    found["messages"] = [message for node in nodes for message in _messages([node.get("message")], "user")]
    found["num_tokens"] = sum(sum(map(bool, list_of(node.get("mask")))) for node in nodes)
    rewards = record["rewards"] if isinstance(record["rewards"], Mapping) else {}
    total = 0.0
    for name, reward in rewards.items():
        score = number_in(at(reward, "score") if isinstance(reward, Mapping) else reward)
        if score is not None:
            weight = number_in(at(reward, "weight")) if isinstance(reward, Mapping) else 1.0
            total += score * (1.0 if weight is None else weight)
            metrics[f"reward/{name}"] = score
    own = number_in(record.get("reward"))
    found["reward"] = total if own is None and rewards else own
    errors = [error for error in list_of(record.get("errors")) if isinstance(error, Mapping)]
    if errors and record.get("ok") is not True:
        found["error"] = str(errors[-1].get("message") or errors[-1].get("type") or "failed")


_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Letters that inspect's scorers give: correct, partially, incorrect, no answer."""


def _add_sample(
    record: Mapping[str, Any], found: Rollout, metrics: dict[str, float], extra: dict[str, str]
) -> None:
    if not found["messages"]:
        found["messages"] = [
            *_messages(record["input"], "user"),
            *_messages(at(record, "output.completion"), "assistant"),
        ]
    scores = record.get("scores")
    for name, score in scores.items() if isinstance(scores, Mapping) else ():
        value = at(score, "value")
        metrics |= _numbers({f"score/{name}": _GRADES.get(value, value) if isinstance(value, str) else value})
        if isinstance(value, Mapping):
            metrics |= {f"score/{name}/{part}": number for part, number in _numbers(value).items()}
    found["reward"] = next((value for key, value in metrics.items() if key.startswith("score/")), None)
    logprobs = [
        number_in(at(one, "logprob")) for one in list_of(at(record, "output.choices.0.logprobs.content"))
    ]
    if known := [number for number in logprobs if number is not None]:
        metrics["logprob/mean"] = sum(known) / len(known)
        found.setdefault("num_tokens", len(known))
    target = record["target"]
    if text := "\n".join(map(str, target)) if isinstance(target, list) else str(target):
        extra["target"] = text
    found["group_id"] = found.get("example_id")
    if not found.get("rollout_id"):
        found["rollout_id"] = f"{record['id']}/{record['epoch']}"


def token_records(record: Any) -> list[dict[str, Any]] | None:
    """Returns the branches of a trace, or of an episode's traces, as records of an export; None for what is
    no trace, or has no tokens. A branch runs from a root to a leaf of the conversation."""
    name = format_of(record)
    if name not in ("trace", "episode"):
        return None
    traces = list_of(record["traces"]) if name == "episode" else [record]
    rollouts = as_rollouts(record)
    found = []
    for trace, rollout in zip((one for one in traces if format_of(one) == "trace"), rollouts, strict=True):
        for branch in _branches(trace["nodes"]):
            found.append(_branch_record(branch, rollout))
    return [one for one in found if one["token_ids"]] or None


def _branches(nodes: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Yields the nodes of each path from a root to a leaf; a parent stands before its children."""
    nodes = list_of(nodes)
    if not all(isinstance(node, Mapping) for node in nodes):
        raise DataError("expected nodes to be a list of objects")
    parents = [node.get("parent") for node in nodes]
    for index, parent in enumerate(parents):
        if parent is not None and not (type(parent) is int and 0 <= parent < index):
            raise DataError(
                f"nodes[{index}]: expected parent to be the number of a node before, got {parent!r}"
            )
    inner = set(parents)
    for leaf in range(len(nodes)):
        if leaf not in inner:
            path: list[Mapping[str, Any]] = []
            place: int | None = leaf
            while place is not None:
                path.append(nodes[place])
                place = parents[place]
            yield path[::-1]


def _branch_record(branch: Sequence[Mapping[str, Any]], rollout: Rollout) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float | None] = []
    spans: list[list[Any]] = []
    for node in branch:
        own = list_of(node.get("token_ids"))
        trains = list_of(node.get("mask")) or [False] * len(own)
        if len(trains) != len(own):
            raise DataError(f"a node has {len(own)} token_ids and a mask of {len(trains)}")
        known = list_of(node.get("logprobs"))
        if len(known) == sum(map(bool, trains)) != len(own):  # of sampled tokens only
            rest = iter(known)
            known = [next(rest) if sampled else None for sampled in trains]
        elif len(known) != len(own):
            known = [None] * len(own)
        spans.append([str(at(node, "message.role") or ""), len(ids), len(ids) + len(own)])
        ids += own
        mask += map(bool, trains)
        logprobs += [number if sampled else None for number, sampled in zip(known, trains, strict=True)]
    identity = ("env_name", "example_id", "group_id", "rollout_id", "reward", "advantage", "stop_reason")
    record = {
        "step": rollout.get("step") or 0,
        **{name: rollout.get(name) for name in identity},
        "env_name": str(rollout.get("env_name") or ""),
        "token_ids": ids,
        "loss_mask": mask,
        "sampled": mask,
        "role_spans": spans,
    }
    if any(number is not None for number in logprobs):
        record["inference_logprobs"] = logprobs
    if rollout.get("advantage") is not None:
        record["advantages"] = [rollout["advantage"]] * len(ids)
    return record


def _translate(record: Mapping[str, Any], form: Format) -> Rollout:
    found: Rollout = {}
    for foreign, name in form.fields.items():
        if found.get(name) is None and (value := at(record, foreign)) is not None:
            found[name] = value
    if "env_name" in record and "env_name" not in found:
        found["env_name"] = record["env_name"]
    return found


def at(value: Any, path: str) -> Any:
    """Returns what lies at a dotted path; None where it ends early."""
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _messages(value: Any, role: str) -> Iterator[dict[str, str]]:
    """Yields the messages of a conversation, or one of plain text; calls of tools are written out."""
    if isinstance(value, str):
        yield {"role": role, "content": value}
    for message in list_of(value):
        if isinstance(message, Mapping):
            parts = message.get("content")
            texts = [_part(part) for part in (parts if isinstance(parts, list) else [parts])]
            thought = message.get("reasoning_content")
            calls = map(_call, list_of(message.get("tool_calls")))
            lines = [thought if isinstance(thought, str) else "", *texts, *calls]
            yield {
                "role": str(message.get("role") or role),
                "content": "\n".join(line for line in lines if line),
            }


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        text = next((part[key] for key in ("text", "reasoning") if isinstance(part.get(key), str)), None)
        return f"[{part.get('type')}]" if text is None else text
    return "" if part is None else str(part)


def _call(call: Any) -> str:
    inner = at(call, "function")
    about = inner if isinstance(inner, Mapping) else call if isinstance(call, Mapping) else {}
    name = about.get("name") or (inner if isinstance(inner, str) else "tool")
    arguments = about.get("arguments", "")
    text = (
        arguments
        if isinstance(arguments, str)
        else orjson.dumps(arguments, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    )
    return f"{name}({text})"


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    found = {str(name): number_in(value) for name, value in values.items()}
    return {name: number for name, number in found.items() if number is not None}


def number_in(value: Any) -> float | None:
    """Returns a value of somebody's JSON if it is a number of 64 bits, else None; a flag is 0 or 1."""
    is_number = isinstance(value, int | float) and value == value and abs(value) < 2**63
    return float(value) if is_number else None


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
