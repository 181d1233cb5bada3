"""`--dry-run`: the configuration as it would run, and what is wrong with files and folders."""

import socket
import sys
import tomllib

import pytest

from pellucid.cli import COMMANDS, main
from pellucid.config.parse import parse
from pellucid.launch import preflight
from pellucid.launch.preflight import resolved
from pellucid.transport.zmq_link import make_keys

ENVIRONMENTS = (
    '[{"id": "reverse-text"}, {"id": "arithmetic", "name": "sums", "sampling": {"temperature": 0.5}}]'
)
SAMPLING = ["--orchestrator.env", ENVIRONMENTS, "--orchestrator.eval", '[{"id": "arithmetic"}]']
SAMPLING += ["--orchestrator.sampling.max-tokens", "32", "--orchestrator.rollouts-per-example", "4"]


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Exit code, configuration and errors of a dry run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "num_cores", lambda: 6)
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def run(command: str, *flags: str):
        code = main([command, "--model.name", "m", *flags, "--dry-run"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        (
            "rl",
            [*SAMPLING, "--seq-len", "128", "--inference.max-concurrent", "8", "--monitors.wandb"],
            {
                "run_id": "run",
                "monitors.wandb.name": "run",
                "monitors.wandb.group": "run",
                "trainer.threads": 3,
                "trainer.micro_batch_max_tokens": 128,
                "inference.threads": 3,
                "inference.record_experts": False,
                "inference.port": 0,
                "orchestrator.max_inflight_rollouts": 32,
                "orchestrator.env.0.name": "reverse-text",
                "orchestrator.env.0.sampling": {"temperature": 1.0, "max_tokens": 32},
                "orchestrator.env.1.sampling": {"temperature": 0.5, "max_tokens": 32},
                "orchestrator.eval.0.name": "arithmetic",
                "orchestrator.eval.0.max_tokens": 32,
            },
        ),
        ("rl", [*SAMPLING, "--trainer.enable-router-replay"], {"inference.record_experts": True}),
        ("rl", [*SAMPLING, "--orchestrator.token-batch-size", "64"], {"orchestrator.token_batch_size": 64}),
        (
            "sft",
            ["--data.path", "rows.jsonl", "--output-dir", "outputs/mine"],
            {"run_id": "mine", "trainer.threads": 6, "trainer.micro_batch_max_tokens": 2048},
        ),
        ("sft", ["--data.path", "."], {"data.split": "train"}),
        ("trainer", [], {"trainer.threads": 6, "trainer.micro_batch_max_tokens": 2048}),
        ("trainer", ["--trainer.data.fake"], {"trainer.threads": 6}),
        (
            "orchestrator",
            [*SAMPLING, "--inference.servers", '["http://a:1", "http://b:2"]'],
            {"orchestrator.max_inflight_rollouts": 512, "orchestrator.env.1.name": "sums"},
        ),
        (
            "inference",
            ["--inference.port", "8000"],
            {"inference.threads": 6, "inference.record_experts": False},
        ),
    ],
)
def test_it_prints_the_values_that_would_run(dry_run, tmp_path, command, flags, expected):
    code, out, err = dry_run(command, *flags)
    assert (code, err) == (0, "")

    def value(key):
        found = tomllib.loads(out)
        for part in key.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    assert {key: value(key) for key in expected} == expected
    (tmp_path / "printed.toml").write_text(out)
    config = parse(COMMANDS[command].config, ["@", str(tmp_path / "printed.toml")], prog="p").config
    assert resolved(config) == config
    assert not (tmp_path / "outputs").exists()


def test_threads_that_are_set_stay(dry_run):
    _, out, _ = dry_run("rl", *SAMPLING, "--trainer.threads", "7")
    assert tomllib.loads(out)["trainer"]["threads"] == 7


NO_MODEL = ["--model.name", "./nowhere"]
ZMQ = ["--transport.type", "zmq", "--transport.port", "5555"]


@pytest.mark.parametrize(
    ("command", "flags", "code", "complaint"),
    [
        ("sft", ["--data.path", "none.jsonl"], 1, "data.path = 'none.jsonl' does not exist"),
        ("sft", ["--data.path", "rows.jsonl", *NO_MODEL], 1, "model.name = './nowhere': no such folder"),
        ("trainer", NO_MODEL, 1, "model.name = './nowhere': no such folder"),
        ("inference", [*NO_MODEL, "--port", "8000"], 1, "model.name = './nowhere': no such folder"),
        ("orchestrator", [*SAMPLING, *NO_MODEL, "--inference.port", "1"], 1, "'./nowhere': no such folder"),
        (
            "orchestrator",
            ["--orchestrator.env", '[{"id": "no:Way"}]', "--inference.port", "1"],
            2,
            "'no:Way'",
        ),
        ("inference", [], 2, "inference.port = 0: the server on its own needs a port"),
        (
            "inference",
            ["--port", "1", "--inference.key-file", "none"],
            2,
            "inference.key_file: none cannot be",
        ),
        ("orchestrator", SAMPLING, 2, "inference.port = 0 does not say where the server is"),
        ("trainer", ["--transport.type", "zmq"], 2, "transport.port = 0 does not say where the trainer is"),
        ("trainer", ["--weights.transport", "http"], 2, 'weights.port = 0 with weights.transport = "http"'),
        ("trainer", ["--weights.key-file", "none"], 2, "weights.key_file: none cannot be read"),
        ("trainer", [*ZMQ, "--transport.keys", "none"], 2, "transport.keys: none/trainer.secret holds no"),
        ("rl", [*SAMPLING, "--transport", '{"type": "zmq", "keys": "none"}'], 2, "none/orchestrator.secret"),
        ("rl", [*SAMPLING, "--output-dir", "rows.jsonl"], 2, "output_dir = rows.jsonl is not a folder"),
    ],
)
def test_it_looks_at_files_and_addresses(dry_run, command, flags, code, complaint):
    found, out, err = dry_run(command, *flags)
    assert (found, out[:10]) == (code, "output_dir")
    assert complaint in err and err.count("\n") == 1


def test_keys_that_are_there_are_accepted(dry_run, tmp_path):
    make_keys(tmp_path / "keys")
    assert dry_run("trainer", *ZMQ, "--transport.keys", "keys")[0] == 0


@pytest.mark.parametrize(("command", "flags"), [("rl", SAMPLING), ("sft", ["--data.path", "rows.jsonl"])])
def test_a_folder_with_another_run_is_refused_and_left_alone(dry_run, tmp_path, command, flags):
    page = tmp_path / "outputs" / "run" / "page.html"
    page.parent.mkdir(parents=True)
    page.touch()
    code, _, err = dry_run(command, *flags)
    assert (code, "output_dir = outputs/run already holds a run (page.html)" in err) == (2, True)
    assert dry_run(command, *flags, "--clean-output-dir")[0] == 0
    assert dry_run(command, *flags, "--resume")[0] == 0
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_a_port_that_is_taken_is_refused(dry_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = dry_run("rl", *SAMPLING, "--inference.port", str(port))
    assert (code, f"inference.port = {port} cannot be used" in err) == (2, True)


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named(dry_run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, _, err = dry_run("trainer", f"--monitors.{name}")
    assert (code, f"monitors.{name} needs the package {name}" in err) == (2, True)
