"""Exports, run folders and tokenizers made on the spot, hostile tokens included."""

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOSTILE = "</script><img src=x onerror=alert(1)>"
VOCABULARY = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "\n", " two", "\u202e", HOSTILE]

Record = dict[str, Any]


@dataclass(frozen=True)
class Page:
    html: str
    head: dict[str, Any]
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    path: Path
    output: Path | None = None
    tokenizer: str | None = None


@pytest.fixture
def settings() -> type[Settings]:
    return Settings


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """A user turn, then an assistant turn of HOSTILE, U+202E and end of turn, which are trainable."""

    def make(step: int = 0, index: int = 0, **changes: Any) -> Record:
        ids = [1, 3, 5, 6, 2, 5, 1, 4, 5, 8, 7, 2]
        trainable = [position >= 9 for position in range(len(ids))]
        record: Record = {
            "schema_version": 1,
            "step": step,
            "rank": 0,
            "export_sequence_idx": index,
            "env_name": "reverse-text",
            "training_mode": "rl",
            "token_ids": ids,
            "position_ids": list(range(len(ids))),
            "loss_mask": trainable,
            "advantages": [0.5] * len(ids),
            "rewards": [1.0] * len(ids),
            "inference_logprobs": [-0.49625658988952637] * 11 + [-0.7682217955589294],
            "trainer_logprobs": [None, *[-0.29458317160606384] * 10, -0.34920862317085266],
            "mismatch_kl": [0.9] * 9 + [0.25, 0.0, 0.5],
            "prob_delta": [0.1] * 12,
            "is_masked": [False] * 11 + [True],
            "is_masked_high": [False] * 11 + [True],
            "is_masked_low": [False] * 12,
        }
        return record | changes

    return make


@pytest.fixture
def write_run(tmp_path: Path, make_record: Callable[..., Record]) -> Callable[..., Path]:
    """A run folder with finished steps."""

    def write(num_steps: int = 2, num_records: int = 2, name: str = "demo", **changes: Any) -> Path:
        run = tmp_path / name
        for step in range(num_steps):
            folder = run / "token_exports" / f"step_{step}"
            folder.mkdir(parents=True)
            lines = [json.dumps(make_record(step, index, **changes)) + "\n" for index in range(num_records)]
            (folder / "rank_0.jsonl").write_text("".join(lines))
            (folder / "STABLE").touch()
        return run

    return write


@pytest.fixture
def read_page() -> Callable[[Path], Page]:
    """What a browser would find in a page's data block."""

    def inflate(packed: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(packed)))

    def read(path: Path) -> Page:
        html = path.read_text(encoding="utf-8")
        block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
        assert block is not None
        data = json.loads(block[1])
        return Page(html, inflate(data["head"]), [inflate(packed) for packed in data["records"]])

    return read
