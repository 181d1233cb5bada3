"""Finds mistakes in a run before anything is made, deleted or started.

`check_…` comes before a run: it takes a fraction of a second, loads no torch and runs no code of the user's;
the processes of the run check again, with what they really load. A run that is refused leaves its output
folder as it was. `rehearse_…` is for `--dry-run`: it imports and makes what the command would, code of the
user's included.
"""

import os
import subprocess
from pathlib import Path

from tokenizers import Tokenizer

from pellucid.config import (
    CustomAdvantageConfig,
    CustomLossConfig,
    EnvConfig,
    InferenceConfig,
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    SFTConfig,
    TrainerRunConfig,
    VerifyConfig,
)
from pellucid.config.imports import load_function, require_package
from pellucid.config.inference import VLLM_REMEDY, require_vllm
from pellucid.config.tools import EnvSettings
from pellucid.data.model_folder import check_model_folder
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.inference.servers import other_vocabulary
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.environment import check_environment, draw_example, load_environment
from pellucid.orchestrator.evaluation import load_evaluation
from pellucid.orchestrator.filters import load_filter


def is_torchrun() -> bool:
    """Whether this is one of several processes that were started together."""
    return "RANK" in os.environ


def rehearse_rl(config: RLConfig) -> None:
    """`--dry-run`: checks the run, and imports and makes what its processes would."""
    check_rl(config)
    rehearse_orchestrator(config)
    rehearse_trainer(config)


def rehearse_verify(config: VerifyConfig) -> None:
    if config.model.name != config.model.DEMO:
        no_servers = config.inference.model_copy(update={"servers": ()})  # verify asks none
        rehearse_rl(config.model_copy(update={"inference": no_servers}))


def rehearse_orchestrator(config: OrchestratorRunConfig) -> None:
    """Makes environments with their first examples, advantage and filters; this runs code of the user's."""
    own = config.orchestrator
    for each in own.env:
        draw_example(load_environment(each, config.seed), each.label, 0)
    for evaluation in own.eval:
        load_evaluation(evaluation, config.seed)
    load_advantage(own.advantage)
    for each_filter in own.filter:
        load_filter(each_filter)
    check_model_folder(config.model.name, chats=True)


def rehearse_trainer(config: TrainerRunConfig) -> None:
    """Imports a loss of the user's."""
    loss = config.trainer.loss
    if isinstance(loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "trainer.loss")
    check_model_folder(config.model.name, chats=False, routes=config.trainer.enable_router_replay)


def rehearse_inference(config: InferenceRunConfig) -> None:
    check_model_folder(config.model.name, chats=False)


def rehearse_env(settings: EnvSettings) -> None:
    """Makes the environment, and its first example."""
    config = EnvConfig(id=settings.id, args=settings.args)
    draw_example(load_environment(config, settings.seed), config.label, settings.start)


def check_rl(config: RLConfig) -> None:
    own, loss = config.orchestrator, config.trainer.loss
    if config.inference.servers:
        raise ConfigError(
            f"inference.servers = {list(config.inference.servers)}: `pellucid rl` starts the policy's server "
            "itself, and nobody would use it; leave the key out, or start the parts on their own (`pellucid "
            "inference`, `pellucid orchestrator`, `pellucid trainer`), which share output_dir = "
            f"{config.output_dir}"
        )
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
            raise ConfigError(other_vocabulary(f"the teacher {teacher!r}", f"model.name = {model!r}"))


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
