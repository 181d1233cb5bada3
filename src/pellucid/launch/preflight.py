"""What is wrong with a run and can be known before anything is made, deleted or started.

It takes a fraction of a second, loads no torch and runs no code of the user's; the processes of the run
check again, with what they really load. A run that is refused here leaves its output folder as it was.
"""

import os
import subprocess
from pathlib import Path

from tokenizers import Tokenizer

from pellucid.config import CustomAdvantageConfig, CustomLossConfig, InferenceConfig, RLConfig, SFTConfig
from pellucid.config.imports import require_package
from pellucid.data.model_folder import check_model_folder
from pellucid.data.vocabulary import fingerprint
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.inference.vllm_args import VLLM_REMEDY, require_vllm
from pellucid.orchestrator.environment import check_environment
from pellucid.orchestrator.teacher import other_vocabulary


def is_torchrun() -> bool:
    """Whether this is one of several processes that were started together."""
    return "RANK" in os.environ


def check_rl(config: RLConfig) -> None:
    own, loss = config.orchestrator, config.trainer.loss
    for environment in (*own.env, *own.eval):
        check_environment(environment)
    for each in own.filter:
        require_package(each.import_path, "orchestrator.filter.import_path")
    if isinstance(own.advantage, CustomAdvantageConfig):
        require_package(own.advantage.import_path, "orchestrator.advantage.import_path")
    if isinstance(loss, CustomLossConfig):
        require_package(loss.import_path, "trainer.loss.import_path")
    config.trainer.check_num_processes(config.trainer.num_processes)
    _check_server(config.inference)
    check_model_folder(config.model.name, chats=True, routes=config.trainer.enable_router_replay)
    if own.teacher is not None and own.teacher.model is not None:
        _check_teacher(own.teacher.model, config.model.name)


def _check_server(settings: InferenceConfig) -> None:
    """Whether its interpreter is there, and has what it needs; what is in the packages is not looked at."""
    if settings.python is None:
        if settings.backend == "vllm":
            require_vllm()
        return
    needed = ("pellucid", "vllm") if settings.backend == "vllm" else ("pellucid",)
    script = (
        "import importlib.util as util, sys\n"
        "print(*(name for name in sys.argv[1:] if not getattr(util.find_spec(name), 'origin', None)))"
    )
    remedy = f"; {VLLM_REMEDY}" if settings.backend == "vllm" else ""
    try:
        answer = subprocess.run([settings.python, "-c", script, *needed], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(
            f"inference.python = {str(settings.python)!r} cannot be run ({error.strerror}){remedy}"
        ) from error
    if answer.returncode:
        raise ConfigError(f"inference.python = {str(settings.python)!r} is no Python interpreter{remedy}")
    if missing := answer.stdout.split():
        raise ConfigError(
            f"inference.python = {str(settings.python)!r} has no {' and no '.join(missing)}; install it "
            f"there{remedy}"
        )


def _check_teacher(teacher: str, model: str) -> None:
    try:
        check_model_folder(teacher, chats=False)
    except ModelError as error:
        raise ModelError(str(error).replace("model.name", "orchestrator.teacher.model")) from error
    paths = [Path(name) / "tokenizer.json" for name in (teacher, model)]
    if all(path.exists() for path in paths):
        prints = {fingerprint(Tokenizer.from_file(str(path))) for path in paths}
        if len(prints) > 1:
            raise ConfigError(other_vocabulary(repr(teacher), model))


def check_sft(config: SFTConfig) -> None:
    if not is_torchrun():
        config.trainer.check_num_processes(1)
    for data in (config.data, config.data.validation):
        if data is not None and data.path is not None and not data.path.exists():
            raise DataError(
                f"{data.KEY}.path = {str(data.path)!r} does not exist; give a JSONL file, or the folder of a "
                "data set"
            )
    check_model_folder(config.model.name, chats=False)
