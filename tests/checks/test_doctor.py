"""`pellucid doctor`: every part is there or says why not, and nothing private leaves the machine."""

import json
import subprocess
import sys
import time

import pytest

from pellucid.checks import doctor
from pellucid.checks.doctor import all_reduce, devices, examine, failures, links, scrubbed, shown_environment
from pellucid.config.tools import DoctorSettings

PRIVATE = {"/home/ada": "~", "ada": "USER", "box17.example.org": "HOST", "box17": "HOST"}


def test_a_part_that_fails_is_recorded_and_ends_nothing() -> None:
    def broken() -> None:
        raise OSError(5, "no device in /home/ada/x")

    found = examine({"first": broken, "second": lambda: {"on": "box17"}}, PRIVATE)
    assert (found["first"]["ok"], found["first"]["error"]) == (False, "OSError: [Errno 5] no device in ~/x")
    assert (found["second"]["ok"], found["second"]["value"]) == (True, {"on": "HOST"})
    assert all(part["seconds"] >= 0 for part in found.values())


def test_errors_of_the_network_have_no_addresses() -> None:
    def unreachable() -> None:
        raise ConnectionError("connect [10.0.0.5]:29500, fe80::a00:27ff:fe4e:66a1: no route")

    found = examine({"all_reduce": unreachable}, PRIVATE)
    assert found["all_reduce"]["error"] == "ConnectionError: connect [ADDRESS]:29500, ADDRESS: no route"


def test_a_measure_that_fails_is_named_among_those_that_do_not() -> None:
    part = {"ok": True, "value": {"cuda:0": {"copy": {"ok": False, "error": "e"}, "matmul": {"ok": True}}}}
    assert list(failures(part)) == ["cuda:0 copy failed: e"]
    assert list(failures({"ok": False, "error": "too slow"})) == ["failed: too slow"]
    assert list(failures({"ok": True, "value": {"ok": 1}})) == []


def test_private_words_are_replaced_wherever_they_are() -> None:
    value = {"/home/ada/run": ["box17.example.org", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 3, None)]}
    assert scrubbed(value, PRIVATE) == {"~/run": ["HOST", ["GPU-SERIAL", 3, None]]}


def test_the_environment_has_what_changes_a_run_and_no_secrets() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_COMM_ID": "10.0.0.5:29500",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "VLLM_API_KEY": "sk-1",
        "TORCH_TOKEN": "t",
        "WANDB_API_KEY": "w",
        "HF_TOKEN": "h",
        "PATH": "/usr/bin",
        "OMP_NUM_THREADS": "4",
    }
    assert shown_environment(environment) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_COMM_ID": "ADDRESS:29500",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "4",
    }


def test_links_and_devices_are_told_without_gpus(monkeypatch, tmp_path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert links() == {
        "topology": "nvidia-smi is not installed",
        "nvlink": "nvidia-smi is not installed",
        "infiniband": {"mlx5_0/1": "400 Gb/sec (4X NDR)"},
    }
    found = devices()
    assert found["gpus_of_machine"] == len(found["gpus"]) == 0
    assert found["memory_bytes"] > 1 << 28
    assert 0 < found["disk_bytes"]["free"] <= found["disk_bytes"]["total"]


def test_the_file_has_every_part(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "benchmark", lambda: 1 / 0)
    path = tmp_path / "report.json"
    assert doctor.run_doctor(DoctorSettings(output=path, verify=False)) == 0
    report = json.loads(path.read_text())
    assert list(report["parts"]) == ["versions", "devices", "links", "environment", "benchmark"]
    assert report["parts"]["benchmark"]["error"] == "ZeroDivisionError: division by zero"
    assert report["parts"]["versions"]["value"]["torch"]
    assert "benchmark" in capsys.readouterr().out


def test_a_process_that_does_not_end_is_killed() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done after 0.2 s"):
        doctor._ended([child], 0.2)
    assert child.returncode == -9
    assert time.monotonic() - started < 300


@pytest.mark.slow
def test_processes_add_up_their_arrays() -> None:
    assert all_reduce(2, timeout_s=600) > 0
