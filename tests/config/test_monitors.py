"""`[monitors]`: present is enabled, and every process has a port of its own."""

import pytest

from pellucid.config import MonitorsConfig, PrometheusConfig, TensorboardConfig, TrainerRunConfig, WandbConfig
from pellucid.config.base import save
from pellucid.config.parse import parse
from pellucid.errors import ConfigError


def read(*words: str) -> TrainerRunConfig:
    return parse(TrainerRunConfig, ["--model.name=m", *words], prog="pellucid trainer").config


def test_nothing_is_on_by_default():
    assert read().monitors == MonitorsConfig(wandb=None, tensorboard=None, prometheus=None)


def test_a_bare_flag_enables_a_tracker():
    config = read("--monitors.wandb", "--monitors.tensorboard", "--monitors.prometheus")
    assert config.monitors == MonitorsConfig(
        wandb=WandbConfig(), tensorboard=TensorboardConfig(), prometheus=PrometheusConfig()
    )


def test_a_key_enables_its_tracker():
    assert read("--monitors.wandb.offline").monitors.wandb == WandbConfig(offline=True)


def test_a_section_without_keys_survives_saving(tmp_path):
    config = read("--monitors.tensorboard")
    save(config, tmp_path / "trainer.toml")
    assert read("@", str(tmp_path / "trainer.toml")) == config


def test_ports_differ():
    with pytest.raises(
        ConfigError,
        match="monitors.prometheus.orchestrator_port = 9101 is also monitors.prometheus.trainer_port; "
        "each process needs a port of its own",
    ):
        read("--monitors.prometheus.trainer-port=9101")
