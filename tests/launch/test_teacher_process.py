"""The fourth process of a run: the teacher's server."""

import json
import shutil
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pellucid.config import InferenceRunConfig, RLConfig
from pellucid.errors import ConfigError, ModelError
from pellucid.launch.preflight import check_rl, resolve
from pellucid.launch.rl import columns, rl_children, write_configs
from pellucid.launch.run_folder import prepare


def config(folder: Path, teacher: dict[str, Any], **changes: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            "output_dir": folder,
            "seq_len": 64,
            "model": {"name": "some/model"},
            "orchestrator": {"env": [{"id": "reverse-text"}], "teacher": teacher},
            **changes,
        }
    )


def test_it_is_an_inference_server_with_files_and_a_port_of_its_own(tmp_path: Path) -> None:
    monitors = {"tensorboard": {}}
    run = resolve(config(tmp_path, {"model": "some/teacher"}, monitors=monitors), 4)
    write_configs(run)
    children = {child.name: child for child in rl_children(run)}
    assert list(children) == ["inference", "orchestrator", "trainer", "teacher"]
    path = tmp_path / "configs" / "teacher.toml"
    assert children["teacher"].service
    assert children["teacher"].argv == (sys.executable, "-m", "pellucid.cli", "inference", "@", str(path))
    assert children["teacher"].log_path == tmp_path / "logs" / "teacher.log"
    assert children["teacher"].env["OMP_NUM_THREADS"] == "2"
    teacher = InferenceRunConfig.model_validate(tomllib.loads(path.read_text()))
    assert teacher.model.name == "some/teacher"
    assert teacher.inference.label == "teacher" and teacher.inference.max_model_len == 64
    assert teacher.monitors.tensorboard is None
    assert run.orchestrator.teacher is not None
    assert 0 < teacher.inference.port == run.orchestrator.teacher.port != run.inference.port


def test_a_teacher_that_runs_elsewhere_is_not_started(tmp_path: Path) -> None:
    run = resolve(config(tmp_path, {"servers": ["http://teacher:8000"]}), 2)
    assert [child.name for child in rl_children(run)] == ["inference", "orchestrator", "trainer"]


def test_its_port_in_use_is_refused_by_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^orchestrator\.teacher\.port = {port} cannot be used"):
            resolve(config(tmp_path, {"model": "some/teacher", "port": port}), 2)


def test_a_folder_that_is_no_model_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = config(tmp_path / "run", {"model": str(tmp_path)}, model={"name": str(tiny_model)})
    with pytest.raises(ModelError, match=r"^orchestrator\.teacher\.model = .*no config\.json"):
        check_rl(run)
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(tiny_model, tmp_path / "teacher")
    run = config(tmp_path / "run", {"model": str(teacher)}, model={"name": str(tiny_model)})
    check_rl(run)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=rf"^the teacher '{teacher}' has another vocabulary than model.name"
    ):
        check_rl(run)


@pytest.mark.parametrize(("mode", "shown"), [("opd", "teacher_kl/all"), ("sft", "off_policy_level/all/mean")])
def test_a_step_shows_how_far_the_teacher_is(tmp_path: Path, mode: str, shown: str) -> None:
    keys = [column.key for column in columns(config(tmp_path, {"model": "t", "mode": mode}))]
    assert shown in keys and len(keys) == 9


def test_cleaning_the_folder_never_takes_the_teacher_away(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    run = config(tmp_path / "run", {"model": str(model)}, clean_output_dir=True)
    with pytest.raises(
        ConfigError, match=r"would delete orchestrator\.teacher\.model = .*the teacher; choose"
    ):
        prepare(run)
    assert model.exists()
