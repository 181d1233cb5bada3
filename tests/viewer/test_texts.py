"""Texts of ids, roles of tokens, and the terminal form."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from exported_steps import observed
from pellucid.config.tools import ViewSettings
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError, DataError
from pellucid.export import TokenExporter
from pellucid.ledger import State
from pellucid.viewer import access, run_view
from pellucid.viewer.access import Exports, Selection
from pellucid.viewer.page import Size, choose_spread, write_page
from pellucid.viewer.roles import RoleFinder, cover
from pellucid.viewer.source import ServedRun
from pellucid.viewer.terminal import show, visible
from pellucid.viewer.vocabulary import Vocabulary, open_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tokenizer_folder: Path) -> Vocabulary:
    return Vocabulary(load_tokenizer(str(tokenizer_folder)))


def batch_of(ids: list[int], **columns: Any) -> TokenTable:
    return TokenTable(np.array([len(ids)]), {"token_ids": np.array(ids), **columns})


def test_a_token_is_text_or_the_bytes_of_a_part(vocabulary: Vocabulary, encode: Any) -> None:
    assert [vocabulary.text(token) for token in encode("é a")] == [[0xC3], [0xA9], " ", "a"]
    assert vocabulary.words(encode("é🙂")) == "é🙂"
    special = encode("<|im_end|>")[0]
    assert vocabulary.texts([special, 10**6]) == {
        "ids": [special, 10**6],
        "texts": ["<|im_end|>", f"#{10**6}"],
        "special": [special],
    }
    assert Vocabulary().text(7) == "#7"


def test_sentencepiece_tokens_keep_their_space_and_bytes() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = {"<unk>": 0, "▁two": 1, "<0xF0>": 2, "two": 3}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [vocabulary.text(token) for token in (1, 2, 3)] == [" two", [0xF0], "two"]


def test_recorded_roles_come_first_and_gaps_are_filled(vocabulary: Vocabulary, encode: Any) -> None:
    ids = encode("<|im_start|>user\nhi")
    spans = np.empty(1, object)
    spans[0] = [["assistant", 2, 4], ["bad"], ["user", 3, 900]]
    segments = RoleFinder(vocabulary).segments(batch_of(ids, role_spans=spans))
    assert segments == [[("", 0, 2), ("assistant", 2, 4), ("user", 4, len(ids))]]
    assert cover([], 3) == [("", 0, 3)]


def test_chatml_is_known_without_a_template(vocabulary: Vocabulary, encode: Any) -> None:
    ids = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo")
    at = ids.index(ids[0], 1)
    assert RoleFinder(vocabulary).segments(batch_of(ids)) == [[("user", 0, at), ("assistant", at, len(ids))]]


@pytest.mark.parametrize(
    ("template", "text", "first"),
    [
        (
            "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot|>{% endfor %}",
            "<|start|>user<|end|>\n\nhi<|eot|><|start|>assistant<|end|>\n\nyo<|eot|>",
            "<|eot|>",
        ),
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
            "<|user|>hi<|assistant|>yo",
            "hi",
        ),
    ],
)
def test_roles_from_the_headers_of_a_chat_template(
    vocabulary: Vocabulary, template: str, text: str, first: str, tokenizer_folder: Path
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    specials = ["<|start|>", "<|end|>", "<|eot|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = template
    ids = tokenizer.encode(text, add_special_tokens=False)
    split = len(tokenizer.encode(text[: text.index(first) + len(first)], add_special_tokens=False))
    segments = RoleFinder(Vocabulary(tokenizer)).segments(batch_of(ids))
    assert segments == [[("user", 0, split), ("assistant", split, len(ids))]]


def test_steps_are_spread_evenly() -> None:
    sizes = {step: Size(records=10, tokens=100) for step in range(10)}
    assert sorted(choose_spread(sizes, Size(records=30, tokens=10_000)).steps) == [0, 4, 9]
    assert choose_spread(sizes, Size(records=100, tokens=1_000)).steps == frozenset(range(10))
    cut = choose_spread(sizes, Size(records=1_000, tokens=50))
    assert sorted(cut.steps) == [0, 9] and cut.tokens_per_step == 25


def test_the_terminal_shows_records_outliers_and_ledger(made_run: Any, hostile: str) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=False)
    show(Exports(made_run.folder), tokenizer=None, record_index=1, console=console)
    text = output.getvalue()
    assert "step 2  16 records" in text and "record 1 of 16" in text
    assert "the·answer·is·5,·step·2<|im_end|>" in text.replace("\n", "")
    assert re.search(r"trained +850 +85\.0 %", text) and "every one of the 1,000 sampled tokens" in text
    record = made_run.steps[2][1]
    kl = max(value for value, mask in zip(record["mismatch_kl"], record["loss_mask"], strict=True) if mask)
    assert f"{np.float32(kl):.3g}" in text.partition("outliers")[2]


def test_a_reward_that_nobody_gave_is_a_dash(tmp_path: Path) -> None:
    table = TokenTable.from_samples([TrainingSample.from_turn([1], [2], [-1.0], env_name="a")])
    exporter = TokenExporter(tmp_path)
    exporter.add(table, observed(table.num_tokens), step=0, micro_step=0, denominator=1)
    exporter.finish(0)
    exporter.mark_stable(0)
    exporter.close()
    assert "reward –" in shown_in_terminal(Exports(tmp_path))


def shown_in_terminal(exports: Exports) -> str:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=False)
    show(exports, tokenizer=None, record_index=0, console=console)
    return output.getvalue()


def test_steps_without_a_record_of_the_selection_are_left_out(tmp_path: Path, make_record: Any) -> None:
    """In every form: the terminal, a page, the server."""
    for step, env in enumerate(("math", "tools")):
        folder = tmp_path / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        record = make_record([("user", "2 + 2"), ("assistant", "4")], step=step, env_name=env)
        (folder / "rank_0.jsonl").write_text(json.dumps(record) + "\n")
        (folder / "STABLE").touch()
    math = Exports(tmp_path, Selection(env="math"))
    assert (math.steps(), math.has(0), math.has(1)) == ([0], True, False)
    assert "step 0  1 records" in shown_in_terminal(math)
    page = write_page(math, tmp_path / "page.html")
    assert (page.num_records, len(page.sizes)) == (1, 1)
    served = ServedRun(math)
    assert (served.pulse()["steps"], served.pulse()["summarised"]) == (1, 0)
    with pytest.raises(DataError, match="there is no finished step 1"):
        served.step(1)
    for settings in ({"env_name": "math", "step": 1}, {"env_name": "mth"}, {"rank": 3}):
        with pytest.raises(DataError, match="holds no records of .*(environment|rank) "):
            run_view(ViewSettings(path=tmp_path, terminal=True, **settings))


def test_a_token_is_not_called_trained_where_masks_are_not_recorded(
    write_export: Any, make_record: Any
) -> None:
    recorded = make_record([("user", "2 + 2"), ("assistant", "4")])
    assert "trained" in shown_in_terminal(Exports(write_export(recorded))).partition("outliers")[2]
    bare = {name: value for name, value in recorded.items() if not name.startswith("is_masked")}
    states = shown_in_terminal(Exports(write_export(bare))).partition("outliers")[2]
    assert "trainable" in states and "trained" not in states


def test_a_page_is_a_file(made_run: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        run_view(ViewSettings(path=made_run.folder, output=tmp_path))
    assert str(refused.value) == (
        f"--output {tmp_path} is a folder; name a file, such as {tmp_path / 'page.html'}"
    )
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match=r"is below .*notes, which is a file; name a file in a folder"):
        run_view(ViewSettings(path=made_run.folder, output=tmp_path / "notes" / "deep" / "page.html"))


def test_no_control_character_reaches_the_terminal() -> None:
    assert visible("a\x1b[31m b\u202e\n") == "a⟨U+001B⟩[31m·b⟨U+202E⟩⏎"
    assert visible([0xC3]) == "⟨C3⟩"


def test_code_of_a_tokenizer_is_trusted_only_if_it_was_asked_for(tokenizer_folder: Path) -> None:
    """transformers would ask on the terminal, or run it, where it is not told."""
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    folder = tokenizer_folder.parent / "with-code"
    shutil.copytree(tokenizer_folder, folder)
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n    is_own = True\n"
    )
    found, _ = open_vocabulary(None, str(folder), trust_remote_code=True)
    assert not getattr(found.tokenizer, "is_own", False)
    asked, _ = open_vocabulary(str(folder), None, trust_remote_code=True)
    assert asked.tokenizer.is_own


def test_the_flow_knows_every_state_of_the_ledger() -> None:
    """The browser draws them by stage, with a meaning for each; what it does not name would vanish."""
    source = (Path(access.__file__).parent / "assets" / "draw" / "sankey.js").read_text()
    drawn = [
        name for names in re.findall(r"states: \[(.*?)\]", source) for name in re.findall(r'"(\w+)"', names)
    ]
    (meanings,) = re.findall(r"const MEANING = .*?\{(.*?)\n\}\)", source, re.DOTALL)
    assert sorted(drawn) == sorted(re.findall(r'(\w+): "', meanings)) == sorted(State)
