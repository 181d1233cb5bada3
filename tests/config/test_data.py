"""Where examples come from: one place, said once."""

from pathlib import Path

import pytest

from pellucid.config import SFTConfig
from pellucid.config.base import to_toml
from pellucid.config.parse import parse
from pellucid.config.trainer import ValidationConfig
from pellucid.errors import ConfigError


def sft(*argv: str) -> SFTConfig:
    return parse(SFTConfig, ["--model.name", "m", *argv], prog="pellucid sft").config


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        sft(*argv)
    return str(caught.value)


def test_a_path_or_a_name() -> None:
    assert sft("--data.path", "d.jsonl").data.path == Path("d.jsonl")
    data = sft("--data.name", "user/chats", "--data.subset", "de").data
    assert (data.name, data.part) == ("user/chats", ("de", "train"))
    assert problem("--data.path", "d", "--data.name", "n") == (
        "data.path = d and data.name = n are both set; keep one"
    )
    assert problem("--data.split", "test") == (
        "data.path is missing; set it to a file or folder, or data.name to a hub name"
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--data.validation"],
            "data.validation does not say where examples come from; set path, name or split, or hold "
            "examples out of the training data with fraction or num_examples",
        ),
        (
            ["--data.validation.path", "v", "--data.validation.fraction", "0.1"],
            "data.validation.path and data.validation.fraction are both set; examples come from one place: "
            "keep one",
        ),
        (
            ["--data.validation.num-examples", "5", "--data.validation.split", "test"],
            "data.validation.num_examples and data.validation.split are both set; examples come from one "
            "place: keep one",
        ),
        (
            ["--data.validation.split", "train"],
            "data.validation reads what the run trains on (n, split train); choose another split or data "
            "set, or hold examples out with data.validation.fraction",
        ),
        (
            ["--data.validation.fraction", "1.0"],
            "data.validation.fraction = '1.0': should be less than 1",
        ),
    ],
)
def test_validation_comes_from_one_other_place(flags, line) -> None:
    assert problem("--data.name", "n", *flags) == line


def test_a_split_alone_is_one_of_the_training_data() -> None:
    data = sft("--data.name", "n", "--data.subset", "de", "--data.validation.split", "test").data
    source = data.validation_source()
    assert (source.name, source.path, source.part) == ("n", None, ("de", "test"))
    other = sft("--data.path", "d", "--data.validation.path", "v").data.validation_source()
    assert (other.path, other.part) == (Path("v"), (None, "train"))
    assert sft("--data.path", "d", "--data.validation.fraction", "0.5").data.validation_source() is None


def test_what_is_saved_reads_back_the_same(tmp_path) -> None:
    config = sft("--data.path", "d", "--data.validation.num-examples", "7")
    (tmp_path / "saved.toml").write_text(to_toml(config))
    again = parse(SFTConfig, ["@", str(tmp_path / "saved.toml")], prog="pellucid sft").config
    assert again == config
    assert again.data.validation == ValidationConfig(num_examples=7)
