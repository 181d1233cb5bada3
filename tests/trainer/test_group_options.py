"""How the trainer's processes find each other, as far as a machine without GPUs can tell."""

from datetime import timedelta

import pytest
import torch

from pellucid.config import TrainerConfig
from pellucid.errors import ConfigError
from pellucid.trainer.parallel import Ranks, group_options, own_gpu


def test_nccl_is_told_the_gpu_of_the_process() -> None:
    assert group_options(torch.device("cuda", 3), 60) == {
        "backend": "nccl",
        "device_id": torch.device("cuda", 3),
        "timeout": timedelta(minutes=1),
    }
    assert group_options(torch.device("cpu"), 0.5) == {"backend": "gloo", "timeout": timedelta(seconds=0.5)}


def test_each_process_has_a_gpu_of_its_own() -> None:
    assert own_gpu(1, 2) == torch.device("cuda", 1)
    with pytest.raises(
        ConfigError, match="process 2 of the trainer on this machine has no GPU: 2 are visible"
    ):
        own_gpu(2, 2)


def test_the_timeout_is_a_setting() -> None:
    assert TrainerConfig().collective_timeout_s == 1800
    with pytest.raises(ValueError, match="greater than 0"):
        TrainerConfig(collective_timeout_s=0)


def test_a_process_alone_is_the_first() -> None:
    assert Ranks().process == 0
