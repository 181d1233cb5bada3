"""The settings that shaped each step, and what a resumed run may change of them."""

from pathlib import Path
from typing import Any

import pytest

from pellucid.config import TrainerRunConfig
from pellucid.errors import ConfigError
from pellucid.ledger.settings import Change, changed_settings, read_settings, record_settings, settings_at


def config(folder: Path, *, resume: bool = False, **changes: Any) -> TrainerRunConfig:
    own = {"output_dir": folder, "resume": resume, "model": {"name": "some/model"}, **changes}
    return TrainerRunConfig.model_validate(own)


def kl_taus(folder: Path) -> dict[int, float]:
    return {
        step: settings["trainer"]["loss"]["kl_tau"]
        for step, settings in read_settings(folder, "trainer").items()
    }


def loss(kl_tau: float) -> dict[str, Any]:
    return {"loss": {"type": "dppo", "kl_tau": kl_tau}}


def test_each_start_shapes_the_steps_from_its_own_on(tmp_path: Path) -> None:
    assert record_settings(config(tmp_path), "trainer", 0) == []
    (change,) = record_settings(config(tmp_path, resume=True, trainer=loss(0.01)), "trainer", 40)
    assert change.line(40) == "trainer.loss.kl_tau: 0.001 → 0.01 from step 40"
    record_settings(config(tmp_path, resume=True, trainer=loss(0.02)), "trainer", 60)
    history = kl_taus(tmp_path)
    assert history == {0: 0.001, 40: 0.01, 60: 0.02}
    assert [settings_at(history, step) for step in (0, 39, 40, 59, 60, 99)] == [
        *(0.001, 0.001),
        *(0.01, 0.01),
        *(0.02, 0.02),
    ]


def test_a_start_replaces_what_was_recorded_for_later_steps(tmp_path: Path) -> None:
    """Killed before its next checkpoint, a run goes back to the one before: those steps are trained anew."""
    for step, kl_tau in ((0, 0.001), (40, 0.01), (60, 0.02), (50, 0.03)):
        record_settings(config(tmp_path, resume=step > 0, trainer=loss(kl_tau)), "trainer", step)
    assert kl_taus(tmp_path) == {0: 0.001, 40: 0.01, 50: 0.03}


def test_parts_are_recorded_apart(tmp_path: Path) -> None:
    record_settings(config(tmp_path), "trainer", 40)
    record_settings(config(tmp_path), "orchestrator", 43)
    assert list(read_settings(tmp_path, "trainer")) == [40]
    assert list(read_settings(tmp_path, "orchestrator")) == [43]


def test_what_differs_from_start_to_start_is_no_change(tmp_path: Path) -> None:
    record_settings(config(tmp_path, trainer={"threads": 1}), "trainer", 0)
    assert changed_settings(config(tmp_path, resume=True, trainer={"threads": 2}), "trainer") == []


def test_keys_that_come_and_go_are_named(tmp_path: Path) -> None:
    record_settings(config(tmp_path, trainer={"micro_batch_max_tokens": 512}), "trainer", 0)
    own = config(tmp_path, resume=True, max_steps=200, trainer={"experimental": {"token_export": {}}})
    changes = {change.key: change for change in changed_settings(own, "trainer")}
    assert changes["max_steps"] == Change("max_steps", 100, 200)
    assert changes["trainer.micro_batch_max_tokens"].line(7) == (
        "trainer.micro_batch_max_tokens: 512 → not set from step 7"
    )
    assert changes["trainer.experimental.token_export"].before is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "other/model"}}, r"model.name = 'other/model', but .* has 'some/model', which"),
        ({"model": {"name": "some/model", "lora": {"rank": 8}}}, r"model.lora = \{.*\}, but .* has not set"),
        ({"run_id": "b"}, r"the run's name .* is 'run' and would become 'b'; resume with run_id = 'run'"),
    ],
)
def test_what_checkpoints_and_books_depend_on_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "run"
    record_settings(config(folder), "trainer", 0)
    with pytest.raises(ConfigError, match=message):
        record_settings(config(folder, resume=True, **changes), "trainer", 5)
    assert list(read_settings(folder, "trainer")) == [0]


@pytest.mark.parametrize("changed", [{"rank": 8}, {"alpha": 99.0}, {"targets": ["q_proj"]}])
def test_the_shape_of_an_adapter_is_refused_and_its_dropout_is_not(tmp_path: Path, changed: Any) -> None:
    model = {"name": "some/model", "lora": {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}}
    record_settings(config(tmp_path, model=model), "trainer", 0)
    other = {**model, "lora": {**model["lora"], **changed}}
    (key,) = changed
    with pytest.raises(ConfigError, match=rf"model.lora.{key} = .*, but .*; resume with the former value"):
        changed_settings(config(tmp_path, resume=True, model=other), "trainer")
    other = {**model, "lora": {**model["lora"], "dropout": 0.1}}
    (change,) = changed_settings(config(tmp_path, resume=True, model=other), "trainer")
    assert change.key == "model.lora.dropout"


def test_another_name_of_the_same_model_folder_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    record_settings(config(tmp_path, model={"name": str(tmp_path / "model")}), "trainer", 0)
    own = config(tmp_path, resume=True, model={"name": str(tmp_path / "link")})
    assert changed_settings(own, "trainer") == []


def test_a_folder_that_has_one_configuration_has_it_for_all_steps(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "trainer.toml").write_text("[trainer.loss]\nkl_tau = 0.5\n")
    assert kl_taus(tmp_path) == {0: 0.5}
    assert read_settings(tmp_path, "orchestrator") == {}
