"""A saved config reads back as an equal config."""

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from pellucid.config.base import MAX_NAME, save, to_toml
from pellucid.config.parse import parse
from pellucid.config.tools import LedgerSettings
from pellucid.errors import ConfigError

names = st.text(min_size=1)
labels = st.text(min_size=1, max_size=MAX_NAME).filter(lambda name: name.isprintable() and "/" not in name)
run_ids = labels.filter(lambda name: not name.startswith("."))
values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.datetimes() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(st.text(), values, max_size=3)
paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
fractions = st.floats(0, 1, exclude_min=True, exclude_max=True)
losses = st.fixed_dictionaries({"type": st.just("dppo"), "kl_tau": fractions}) | st.fixed_dictionaries(
    {"type": st.just("custom"), "import_path": st.just("a:b"), "kwargs": tables}
)
exports = st.none() | st.fixed_dictionaries({}, optional={"path": paths.map("{}.jsonl".format)})
environments = st.lists(
    st.fixed_dictionaries({"id": labels, "args": tables, "weight": fractions}),
    min_size=1,
    max_size=3,
    unique_by=lambda env: env["id"],
)


@st.composite
def rl_configs(draw: st.DrawFn) -> RLConfig:
    return RLConfig.model_validate(
        {
            "output_dir": draw(paths),
            "clean_output_dir": draw(st.booleans()),
            "run_id": draw(run_ids),
            "seq_len": draw(st.none() | st.integers(2, 4096)),
            "model": {"name": draw(names)},
            "trainer": {
                "optim": {"lr": draw(fractions), "betas": [draw(fractions), draw(fractions)]},
                "loss": draw(losses),
                "experimental": {"token_export": draw(exports)},
            },
            "orchestrator": {"env": draw(environments)},
        }
    )


@settings(deadline=None, max_examples=50)
@given(rl_configs())
def test_a_saved_config_reads_back_equal(config: RLConfig):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rl.toml"
        save(config, path)
        assert parse(RLConfig, ["@", str(path)], prog="p").config == config


def test_none_is_left_out_and_defaults_are_written():
    config = TrainerRunConfig.model_validate({"model": {"name": "m"}, "output_dir": Path("a/b")})
    table = tomllib.loads(to_toml(config))
    assert table["output_dir"] == "a/b"
    assert table["trainer"]["optim"] == {
        "lr": 1e-05,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
        "max_norm": 1.0,
    }
    assert table["trainer"]["experimental"] == {}
    assert "run_id" not in table


def test_a_batch_that_is_counted_in_tokens_is_so_in_the_part_of_the_orchestrator_too(tmp_path: Path):
    orchestrator = {"env": [{"id": "reverse-text"}], "token_batch_size": 48}
    run = RLConfig.model_validate({"model": {"name": "m"}, "orchestrator": orchestrator})
    part = run.part(OrchestratorRunConfig, clean_output_dir=False)
    save(part, tmp_path / "orchestrator.toml")
    read = parse(OrchestratorRunConfig, ["@", str(tmp_path / "orchestrator.toml")], prog="p").config
    assert read == part
    assert read.orchestrator.token_batch_size == 48


def test_a_key_is_saved_under_the_name_it_is_read_by():
    saved = to_toml(LedgerSettings(run=Path("r"), json=True))
    assert saved == 'run = "r"\nby = "env"\naudit = true\njson = true\n'


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [({"a": None}, "trainer.loss.kwargs.a"), ({"a": [1, None]}, "trainer.loss.kwargs.a[1]")],
)
def test_a_null_that_toml_cannot_say_is_refused(kwargs: dict[str, Any], key: str):
    loss = {"type": "custom", "import_path": "a:b", "kwargs": kwargs}
    config = TrainerRunConfig.model_validate({"model": {"name": "m"}, "trainer": {"loss": loss}})
    with pytest.raises(ConfigError) as caught:
        to_toml(config)
    assert str(caught.value) == f"{key} = null: TOML has no null, so it cannot be saved; leave the key out"


def test_saving_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path):
    config = TrainerRunConfig.model_validate({"model": {"name": "m"}})
    path = tmp_path / "configs" / "trainer.toml"
    save(config, path)
    save(config.model_copy(update={"seed": 3}), path)
    assert tomllib.loads(path.read_text(encoding="utf-8"))["seed"] == 3
    assert list(path.parent.iterdir()) == [path]
