"""Who has which GPUs: on a machine that pretends to have eight."""

import stat
import tomllib
from functools import partial

import pytest

from pellucid.cli import main
from pellucid.config import RLConfig
from pellucid.errors import ConfigError
from pellucid.launch import gpus
from pellucid.launch.gpus import VISIBLE, Placement, count_gpus, place, visible_gpus, with_placement
from pellucid.launch.preflight import resolve
from pellucid.launch.rl import parts, rl_children

EIGHT = tuple("01234567")


def config(folder="outputs/demo", **changes) -> RLConfig:
    values = {
        "output_dir": folder,
        "model": {"name": "some/model"},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    return RLConfig.model_validate({**values, **changes})


def vllm(size: int, num_ranks: int = 1) -> dict:
    return {"backend": "vllm", "vllm": {"tensor_parallel_size": size, "data_parallel_size": num_ranks}}


TEACHER = {"env": [{"id": "reverse-text"}], "teacher": {"mode": "opd", "model": "some/teacher"}}


@pytest.mark.parametrize(
    ("names", "visible"),
    [
        (None, EIGHT),
        ("2,3", ("2", "3")),
        ("GPU-8932f937, GPU-1111aaaa", ("GPU-8932f937", "GPU-1111aaaa")),
        ("MIG-7e0d", ("MIG-7e0d",)),
        ("1,9,2", ("1",)),  # CUDA ignores everything behind a device that does not exist
        ("1,-1,2", ("1",)),
        ("1,1", ("1",)),
        ("", ()),
    ],
)
def test_an_outer_choice_of_gpus_is_respected(names, visible) -> None:
    environment = {} if names is None else {VISIBLE: names}
    assert visible_gpus(environment, lambda: 8) == visible


def test_a_machine_without_gpus_has_none_whatever_the_environment_says() -> None:
    assert visible_gpus({VISIBLE: "0,1"}, lambda: 0) == ()


def test_gpus_are_counted_by_what_the_driver_lists(tmp_path, monkeypatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf 'GPU 0: A (UUID: GPU-1)\\nGPU 1: A (UUID: GPU-2)\\n'\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpus, "_PROC", tmp_path / "none")
    assert count_gpus() == 2
    command.write_text("#!/bin/sh\nexit 9\n")
    assert count_gpus() == 0
    (tmp_path / "none" / "0000:01:00.0").mkdir(parents=True)
    assert count_gpus() == 1


@pytest.mark.parametrize(
    ("changes", "trainer", "servers", "teacher", "idle"),
    [
        ({}, "0123", ["4", "5", "6", "7"], "", ""),
        ({"gpus": {"trainer": 6, "inference": 2}}, "012345", ["6", "7"], "", ""),
        ({"gpus": {"trainer": 6}}, "012345", ["6", "7"], "", ""),
        ({"gpus": {"inference": 2}}, "012345", ["6", "7"], "", ""),
        ({"gpus": {"trainer": 2, "inference": 2}}, "01", ["2", "3"], "", "4567"),
        ({"gpus": 4}, "01", ["2", "3"], "", ""),
        ({"trainer": {"num_processes": 2}}, "01", list("234567"), "", ""),
        ({"inference": vllm(2), "gpus": {"trainer": 4}}, "0123", ["45", "67"], "", ""),
        ({"inference": vllm(4), "gpus": {"trainer": 3}}, "012", ["3456"], "", "7"),
        ({"inference": vllm(2, 2), "gpus": {"trainer": 4}}, "0123", ["4567"], "", ""),
        ({"trainer": {"model": {"cp": 2, "dp_replicate": 2}}}, "0123", list("4567"), "", ""),
        ({"trainer": {"model": {"cp": 4}}, "gpus": {"inference": 2}}, "0123", ["4", "5"], "", "67"),
        ({"orchestrator": TEACHER}, "0123", ["4", "5", "6"], "7", ""),
        ({"orchestrator": TEACHER, "inference": vllm(2)}, "0123", ["45"], "67", ""),
    ],
)
def test_eight_gpus_are_divided(changes, trainer, servers, teacher, idle) -> None:
    expected = Placement(tuple(trainer), tuple(map(tuple, servers)), tuple(teacher), tuple(idle))
    assert place(config(**changes), EIGHT) == expected


def test_one_gpu_is_shared_by_all() -> None:
    placement = place(config(orchestrator=TEACHER), ["GPU-a"])
    assert placement == Placement(("GPU-a",), (("GPU-a",),), ("GPU-a",))
    assert placement.is_shared


def test_a_run_that_another_trainer_trains_leaves_all_gpus_to_its_servers() -> None:
    joins = config(model={"name": "m", "lora": {}}, trainer={"join": "outputs/shared"})
    assert place(joins, "01") == Placement((), (("0",), ("1",)))


@pytest.mark.parametrize(
    ("changes", "visible", "message"),
    [
        (
            {"gpus": {"trainer": 6}},
            0,
            r"gpus.trainer = 6, but no GPU is visible here \(`nvidia-smi`, CUDA_VISIBLE_DEVICES\); leave",
        ),
        ({"gpus": 9}, 8, r"gpus.total = 9 exceeds the 8 GPU\(s\) that are visible here"),
        (
            {"gpus": {"trainer": 6, "inference": 4}},
            8,
            r"gpus.trainer = 6 \+ gpus.inference = 4 exceeds the 8 GPU\(s\)",
        ),
        (
            {"trainer": {"num_processes": 8}},
            8,
            r"trainer.num_processes = 8 \+ 1 for a server \(inference.vllm.tensor_parallel_size = 1\)",
        ),
        (
            {"trainer": {"model": {"cp": 4}}, "inference": vllm(2)},
            4,
            r"4 for the trainer \(trainer.model.dp_replicate = 1 × trainer.model.cp = 4\) \+ 2 for a server",
        ),
        ({"orchestrator": TEACHER}, 2, r"\+ 1 for the teacher exceeds the 2 GPU\(s\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes, visible, message) -> None:
    with pytest.raises(ConfigError, match=message):
        place(config(**changes), EIGHT[:visible])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gpus": {"total": 4, "trainer": 3, "inference": 2}},
            r"= 3 \+ gpus.inference = 2 exceeds gpus.total = 4",
        ),
        ({"gpus": {"trainer": 4}, "trainer": {"num_processes": 2}}, "gpus.trainer = 4 contradicts"),
        ({"gpus": {"inference": 3}, "inference": vllm(2)}, "gpus.inference = 3 is no multiple of"),
        ({"gpus": {"teacher": 1}}, "gpus.teacher = 1, but there is no orchestrator.teacher.model"),
        ({"gpus": {"teacher": 2}, "orchestrator": TEACHER}, "set it to 1 or leave it out"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_each_process_sees_its_own_gpus(tmp_path) -> None:
    run = config(tmp_path, gpus={"trainer": 2}, inference={"threads": 8}, orchestrator=TEACHER)
    placement = place(run, ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"])
    run = resolve(run, 16, placement)
    children = {child.name: child for child in rl_children(run, placement)}
    assert {name: child.env[VISIBLE] for name, child in children.items()} == {
        "inference": "GPU-c",
        "inference_1": "GPU-d",
        "orchestrator": "",
        "trainer": "GPU-a,GPU-b",
        "trainer_1": "GPU-a,GPU-b",
        "teacher": "GPU-e",
    }
    assert [children[name].env["LOCAL_RANK"] for name in ("trainer", "trainer_1")] == ["0", "1"]
    assert [children[name].service for name in children] == [True, True, False, False, False, True]
    written = parts(run)
    servers = [written[name].inference for name in ("inference", "inference_1")]
    assert [(each.replica, each.servers, each.threads) for each in servers] == [(0, (), 4), (1, (), 4)]
    urls = tuple(f"http://127.0.0.1:{each.port}" for each in servers)
    assert written["orchestrator"].inference.servers == urls
    assert len(set(urls)) == 2
    assert written["trainer"].trainer.num_processes == 2


def test_a_single_process_on_a_gpu_has_a_process_group_and_one_on_a_cpu_has_none(tmp_path) -> None:
    placement = place(config(tmp_path), ["0"])
    run = resolve(config(tmp_path), 2, placement)
    assert {child.name: child.env.get("WORLD_SIZE") for child in rl_children(run, placement)} == {
        "inference": None,
        "orchestrator": None,
        "trainer": "1",
    }
    alone = rl_children(resolve(config(tmp_path), 2))
    assert all("WORLD_SIZE" not in child.env and VISIBLE not in child.env for child in alone)


def test_a_run_without_gpus_is_what_it_was() -> None:
    run = config()
    placement = place(run, ())
    assert with_placement(run, placement) is run
    assert placement.lines() == []


def test_a_dry_run_prints_the_placement(tmp_path, capsys, monkeypatch, tiny_model) -> None:
    monkeypatch.setattr("pellucid.launch.preflight.visible_gpus", partial(visible_gpus, count=lambda: 8))
    monkeypatch.delenv(VISIBLE, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "{tiny_model}"\n[[orchestrator.env]]\nid = "reverse-text"\n')
    words = ["rl", "@", str(path), "--output-dir", str(tmp_path / "run"), "--gpus.trainer", "6", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("# trainer: GPU 0, 1, 2, 3, 4, 5\n# inference: GPU 6\n# inference_1: GPU 7\n")
    found = tomllib.loads(printed)
    assert found["gpus"] == {"total": 8, "trainer": 6, "inference": 2}
    assert found["trainer"]["num_processes"] == 6
    assert main([*words[:5], "--gpus", "2", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["gpus"] == {"total": 2, "trainer": 1, "inference": 1}
