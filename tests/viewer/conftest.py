"""Runs made on the spot with known numbers, a byte-level tokenizer, and a browser."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import chromium
from pellucid.viewer import access
from pellucid.viewer.access import Exports
from pellucid.viewer.page import write_page

HOSTILE = "</script><img src=x onerror=alert(1)>"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
AXE = Path(__file__).parent / "vendor" / "axe.min.js"

Record = dict[str, Any]


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level: every byte is a token, so a character beyond ASCII takes several."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(HOSTILE, normalized=False)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encode(tokenizer_folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def make_record(encode: Callable[[str], list[int]]) -> Callable[..., Record]:
    """A conversation; the assistant's replies are trainable, with numbers drawn from a seed."""

    def make(turns: list[tuple[str, str]], seed: int = 0, version: int = 0, **changes: Any) -> Record:
        generator = np.random.default_rng(seed)
        ids: list[int] = []
        mask: list[bool] = []
        spans = []
        for role, text in turns:
            start = len(ids)
            header = encode(f"<|im_start|>{role}\n")
            body = encode(f"{text}<|im_end|>")
            tail = [] if role == "assistant" else encode("\n")
            ids += header + body + tail
            is_reply = role == "assistant"
            mask += [False] * len(header) + [is_reply] * len(body) + [False] * len(tail)
            spans.append([role, start, len(ids)])
        size = len(ids)
        trainable = np.array(mask)
        inference = np.where(trainable, -generator.exponential(1.0, size), 0).astype(np.float32)
        trainer = np.minimum(inference + generator.normal(0, 0.7, size), -1e-4).astype(np.float32)
        advantage = np.float32(changes.get("advantage", 0.5))
        log_ratio = trainer - inference
        delta = np.exp(trainer) - np.exp(inference)
        masked = trainable & ((delta > 0.2) if advantage > 0 else (delta < -0.2))
        loss = np.where(
            trainable, 1e-3 * log_ratio**2 - np.where(masked, 0, advantage * np.exp(log_ratio)), 0
        ).astype(np.float32)
        record: Record = {
            "schema_version": 1,
            "step": 0,
            "rank": 0,
            "micro_step": 0,
            "micro_sequence_idx": 0,
            "export_sequence_idx": 0,
            "env_name": "math",
            "training_mode": "rl",
            "token_ids": ids,
            "position_ids": list(range(size)),
            "loss_mask": mask,
            "advantages": [float(advantage)] * size,
            "rewards": [float(changes.get("reward", 1.0))] * size,
            "inference_logprobs": inference.tolist(),
            "trainer_logprobs": trainer.tolist(),
            "entropy": generator.uniform(0, 3, size).astype(np.float32).tolist(),
            "mismatch_kl": (np.expm1(log_ratio) - log_ratio).astype(np.float32).tolist(),
            "log_importance_ratio": log_ratio.tolist(),
            "importance_ratio": np.exp(log_ratio).tolist(),
            "prob_delta": delta.tolist(),
            "is_masked": masked.tolist(),
            "is_masked_high": (masked & (advantage > 0)).tolist(),
            "is_masked_low": (masked & (advantage < 0)).tolist(),
            "token_loss": loss.tolist(),
            "denominator": 100,
            "sampled": mask,
            "policy_versions": [version if reply else -1 for reply in mask],
            "role_spans": spans,
            "example_id": "e0",
            "group_id": "g0",
            "rollout_id": "g0-r0",
            "run_id": "run",
            "reward": 1.0,
            "advantage": float(advantage),
            "stop_reason": "stop",
        }
        return record | changes

    return make


@dataclass
class MadeRun:
    folder: Path
    steps: dict[int, list[Record]] = field(default_factory=dict)

    def write(self, step: int, records: list[Record]) -> None:
        self.steps[step] = records
        folder = self.folder / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        lines = [
            json.dumps(record | {"step": step, "export_sequence_idx": index}) + "\n"
            for index, record in enumerate(records)
        ]
        (folder / "rank_0.jsonl").write_text("".join(lines))
        (folder / "STABLE").touch()

    def column(self, step: int, name: str) -> np.ndarray[Any, Any]:
        """Of all tokens of a step, null as NaN."""
        return np.concatenate([np.array(record[name], np.float64) for record in self.steps[step]])


@pytest.fixture(scope="session")
def made_run(
    tmp_path_factory: pytest.TempPathFactory, make_record: Callable[..., Record], tokenizer_folder: Path
) -> MadeRun:
    """Three steps, two environments, groups of four, several turns, an example in every step, a ledger.

    The last group is of rank 1; the last member of each was sampled by the weights of the step before.
    """
    run = MadeRun(tmp_path_factory.mktemp("run") / "study")
    for step in range(3):
        records = []
        for group in range(4):
            env = "math" if group < 2 else "tools"
            for member in range(4):
                advantage, reward = (0.5, -0.25, 0.25, -0.5)[member], (1.0, 0.25, 0.75, 0.0)[member]
                reply = ("the answer is 4", "the answer is 5", "the sum is 4", "no idea")[member]
                turns = [("user", f"2 + {group} = ?"), ("assistant", f"{reply}, step {step}")]
                if env == "tools":
                    turns[1:1] = [("assistant", "calc(2+2)"), ("tool", "4 é🙂")]
                if (step, group, member) == (1, 0, 0):
                    turns = [("user", HOSTILE), ("assistant", f"ok {HOSTILE} \u202eno é👩‍🚀")]
                example = f"e{group}" if group < 3 else f"e{step}-{group}"
                records.append(
                    make_record(
                        turns,
                        seed=step * 100 + group * 10 + member,
                        version=max(0, step - (member == 3)),
                        rank=int(group == 3),
                        env_name=env,
                        reward=reward,
                        advantage=advantage,
                        group_id=f"s{step}g{group}",
                        example_id=example,
                        rollout_id=f"s{step}g{group}-r{member}",
                        stop_reason="length" if member == 3 else "stop",
                    )
                )
        run.write(step, records)
    (run.folder / "configs").mkdir()
    loss = 'type = "dppo"\ndppo_mask_low = 0.2\ndppo_mask_high = 0.2\nadv_tau = 1.0\nkl_tau = 0.001\n'
    config = f'[model]\nname = "{tokenizer_folder}"\n[trainer.loss]\n{loss}'
    (run.folder / "configs" / "rl.toml").write_text(config)
    (run.folder / "metrics").mkdir()
    metrics = [{"step": step, "reward/all": 0.4 + 0.1 * step, "reward/math": 0.5} for step in range(3)]
    (run.folder / "metrics" / "orchestrator.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (run.folder / "ledger").mkdir()
    counts = {
        "inference": {"sampled": 1000, "delivered": 980, "cancelled": 20},
        "orchestrator": {"received": 980, "zero_advantage": 80, "sent": 900},
        "trainer": {"received": 900, "trained": 850, "masked": 50, "computed": 900},
    }
    for stage, numbers in counts.items():
        entries = [
            {"stage": stage, "step": 0, "run": "study", "env": "math", "counts": numbers},
            {"stage": stage, "step": 0, "closed": True},
        ]
        (run.folder / "ledger" / f"{stage}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    return run


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Record]:
    """A saved rollout."""

    def make(number: int, outcome: str, **changes: Any) -> dict[str, Any]:
        return {
            "step": 0,
            "group_id": f"g{number // 2}",
            "rollout_id": f"r{number}",
            "env_name": "math",
            "example_id": "e0",
            "outcome": outcome,
            "reason": "" if outcome == "sent" else f"because of {outcome}",
            "error": None,
            "reward": number / 10,
            "advantage": 0.5,
            "metrics": {"exact": 1.0, "name": "x"},
            "num_tokens": 4,
            "stop_reason": "stop",
            "messages": [{"role": "user", "content": f"2 + {number}"}],
            "trajectory": [
                {"text": f"is {number}", "num_prompt_tokens": 6, "num_tokens": 4, "policy_versions": [[3, 4]]}
            ],
        } | changes

    return make


@pytest.fixture(scope="session")
def save_rollouts() -> Callable[..., None]:
    """Writes saved rollouts of a step."""

    def save(run: Path, step: int, *rollouts: Any) -> None:
        folder = run / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train_rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rollouts))

    return save


@pytest.fixture(scope="session")
def write_export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """One file with these records."""

    def write(*records: Record) -> Path:
        path = tmp_path_factory.mktemp("export") / "rank_0.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The address of a self-contained page."""

    def make(path: Path, **options: Any) -> str:
        output = tmp_path_factory.mktemp("page") / "page.html"
        write_page(Exports(path), output, **options)
        return output.as_uri()

    return make


@pytest.fixture(scope="session")
def study(made_run: MadeRun, page_of: Callable[..., str]) -> str:
    return page_of(made_run.folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any, served: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; an error in the page, or a refusal of its policy, fails the test.

    It needs `served` so that pages close before their server does: a live page asks it again and again.
    """
    problems: list[str] = []
    contexts = []

    def open_page(address: str, ready: str = ".view", **options: Any) -> Any:
        viewport = options.pop("viewport", {"width": 1300, "height": 850})
        context = browser.new_context(viewport=viewport, accept_downloads=True, **options)
        contexts.append(context)
        context.set_default_timeout(120_000)  # milliseconds; Chromium is slow where the cores are busy
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.wait_for_selector(ready)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def violations() -> Callable[[Any], list[Any]]:
    """What axe finds serious in a page, whose context has to bypass its policy."""

    def find(page: Any) -> list[Any]:
        if not page.evaluate("() => 'axe' in window"):
            page.evaluate(AXE.read_text(encoding="utf-8"))
        result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            (violation["id"], [node["target"] for node in violation["nodes"]][:3])
            for violation in result["violations"]
            if violation["impact"] in ("serious", "critical")
        ]

    return find


@contextmanager
def serving() -> Iterator[Callable[[Path], str]]:
    """The address of a viewer that follows a folder: one run, or several in it."""
    import uvicorn

    from pellucid.viewer.runs import RunList
    from pellucid.viewer.server import make_app, make_list_app
    from pellucid.viewer.source import ServedRun

    running: list[tuple[Any, ServedRun | None, threading.Thread]] = []

    def opened(path: Path) -> ServedRun:
        return ServedRun(access.Exports(path), home="../")

    def serve(path: Path) -> str:
        is_list = path.is_dir() and not access.is_run(path)
        run = ServedRun(access.Exports(path)) if not is_list else None
        app = make_list_app(RunList([path]), opened) if run is None else make_app(run)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        works = [server.run] if run is None else [server.run, run.summarise]
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        while not server.started:
            threads[0].join(0.01)
        running.append((server, run, threads[0]))
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

    yield serve
    for server, run, thread in running:
        if run is not None:
            run.close()
        server.should_exit = True
        thread.join(5)


@pytest.fixture
def served() -> Iterator[Callable[[Path], str]]:
    with serving() as serve:
        yield serve


@pytest.fixture(scope="module")
def served_module() -> Iterator[Callable[[Path], str]]:
    """As `served`, for a page that several tests share."""
    with serving() as serve:
        yield serve


@pytest.fixture(scope="module")
def study_page(browser: Any, study: str) -> Iterator[Any]:
    """An open page whose modules can be called; its state is nobody's."""
    page = browser.new_page()
    page.goto(study)
    page.wait_for_selector(".view")
    yield page
    page.close()
