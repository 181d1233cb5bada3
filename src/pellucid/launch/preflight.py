"""Finds mistakes in a run before anything is made, deleted or started.

`check_…` comes before a run: it takes a fraction of a second, loads no torch and runs no code of the user's;
the processes of the run check again, with what they really load. A run that is refused leaves its output
folder as it was. `rehearse_…` is for `--dry-run`: it imports and makes what the command would, code of the
user's included. `resolved` is the configuration that it prints.
"""

import os
import socket
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from pellucid.config import (
    CustomAdvantageConfig,
    CustomLossConfig,
    EnvConfig,
    InferenceConfig,
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    TrainerRunConfig,
    TransportConfig,
    VerifyConfig,
    ZmqTransportConfig,
)
from pellucid.config.base import Section
from pellucid.config.imports import load_function, require_package
from pellucid.config.inference import VLLM_REMEDY, require_vllm
from pellucid.config.tools import EnvSettings
from pellucid.data.model_folder import check_model_folder
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.export.paths import ExportPaths
from pellucid.guard import read_key
from pellucid.inference.client import other_vocabulary
from pellucid.launch.run_folder import check_folder
from pellucid.metrics.sinks import optional_package
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.environment import check_environment, draw_example, load_environment
from pellucid.orchestrator.group import load_evaluation
from pellucid.orchestrator.verdict import load_filter
from pellucid.transport.zmq_link import allowed_keys, batch_address, own_keys, trainer_key
from pellucid.workers import num_cores

S = TypeVar("S", bound=Section)


def is_torchrun() -> bool:
    """Whether this is one of several processes that were started together."""
    return "RANK" in os.environ


def resolve(config: RLConfig, cores: int) -> RLConfig:
    """Returns `config` with what was left open: ports, threads, and whether experts are recorded."""
    return choose_ports(share_cores(config, cores))


def share_cores(config: RLConfig, cores: int) -> RLConfig:
    """Gives server and trainer half of the cores each, and decides whether experts are recorded."""
    half = max(1, cores // 2)
    inference, trainer = config.inference, config.trainer
    records = inference.record_experts or trainer.enable_router_replay
    return _with(
        config,
        inference=_with(inference, threads=inference.threads or half, record_experts=records),
        trainer=_with(trainer, threads=trainer.threads or half),
    )


def choose_ports(config: RLConfig) -> RLConfig:
    """Chooses a free port where none is set; raises ConfigError if one that is set cannot be used."""
    inference, orchestrator, transport = config.inference, config.orchestrator, config.transport
    if (teacher := orchestrator.teacher) is not None and teacher.model is not None:
        port = free_port(inference.host, teacher.port, "orchestrator.teacher")
        orchestrator = _with(orchestrator, teacher=_with(teacher, port=port))
    if isinstance(transport, ZmqTransportConfig):
        transport = _with(transport, port=free_port(transport.host, transport.port, "transport"))
    inference = _with(inference, port=free_port(inference.host, inference.port))
    return _with(config, inference=inference, orchestrator=orchestrator, transport=transport)


def free_port(host: str, port: int, section: str = "inference") -> int:
    """`port` if nobody listens on it; for 0 a free one, reserved for the child that will listen on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port == 0:
            with socket.socket(family) as any_port:
                any_port.bind((host, 0))
                number: int = any_port.getsockname()[1]
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port or number))
            server.listen()
            if port == 0:
                _reserve(server)
            return port or number
    except OSError as error:
        raise ConfigError(
            f"{section}.port = {port} cannot be used on {section}.host = {host} ({error.strerror}); "
            "choose another port, or 0 for any that is free"
        ) from error


def _reserve(server: socket.socket) -> None:
    """Leaves the port of `server` in TIME_WAIT, where a connection goes whose listening side closes first.

    For a minute the kernel then gives it to no one who binds to port 0, and to whoever names it and sets
    SO_REUSEADDR, as our servers do.
    """
    with socket.create_connection(server.getsockname()[:2]):
        server.accept()[0].close()


def resolved(config: RunConfig) -> RunConfig:
    """Returns `config` as it would run: with each default that follows from other keys, or from this machine.

    A port of 0 stays, since a free one is chosen only when the run starts.
    """
    cores, name = num_cores(), config.run_name
    config = _with(config, run_id=name)
    if (wandb := config.monitors.wandb) is not None:
        wandb = _with(wandb, name=wandb.name or name, group=wandb.group or name)
        config = _with(config, monitors=_with(config.monitors, wandb=wandb))
    if isinstance(config, RLConfig):
        config = share_cores(config, cores)
    if isinstance(config, TrainerRunConfig):
        trainer = _with(config.trainer, threads=config.trainer.threads or cores)
        if trainer.data.fake is None and trainer.join is None:  # they refuse a cap
            trainer = _with(trainer, micro_batch_max_tokens=trainer.max_tokens)
        config = _with(config, trainer=trainer)
    if isinstance(config, OrchestratorRunConfig):
        orchestrator = config.orchestrator
        environments = tuple(
            _with(
                each, name=each.label, sampling=_with(each.sampling, **dict(orchestrator.sampling_of(each)))
            )
            for each in orchestrator.env
        )
        evaluations = tuple(
            _with(each, name=each.label, max_tokens=each.max_tokens or orchestrator.sampling.max_tokens)
            for each in orchestrator.eval
        )
        rollouts = config.max_inflight_rollouts
        orchestrator = _with(orchestrator, env=environments, eval=evaluations, max_inflight_rollouts=rollouts)
        config = _with(config, orchestrator=orchestrator)
    if isinstance(config, InferenceRunConfig):
        server = config.inference
        server = _with(server, threads=server.threads or cores, record_experts=bool(server.record_experts))
        config = _with(config, inference=server)
    if isinstance(config, SFTConfig) and (config.data.path is None or config.data.path.is_dir()):
        config = _with(config, data=_with(config.data, split=config.data.part[1]))
    return config


def _with(section: S, **values: Any) -> S:
    return section.model_copy(update=values)


def rehearse_rl(config: RLConfig) -> None:
    """`--dry-run`: checks the run and its folder, and imports and makes what its processes would."""
    check_rl(config)
    choose_ports(config)
    _look_at_folder(config)
    _rehearse_sampling(config)
    _rehearse_training(config)


def rehearse_verify(config: VerifyConfig) -> None:
    if config.model.name != config.model.DEMO:
        check_rl(_with(config, inference=_with(config.inference, servers=())))  # verify asks none
        _rehearse_sampling(config)
        _rehearse_training(config)


def rehearse_sft(config: SFTConfig) -> None:
    check_sft(config)
    _look_at_folder(config)
    _check_trackers(config)


def rehearse_trainer(config: TrainerRunConfig) -> None:
    if config.trainer.data.fake is None:
        _check_port(config.transport)
    _rehearse_training(config)


def rehearse_orchestrator(config: OrchestratorRunConfig) -> None:
    config.check_addresses()
    _check_port(config.transport)
    _rehearse_sampling(config)


def rehearse_inference(config: InferenceRunConfig) -> None:
    config.check_addresses()
    if config.inference.backend == "vllm":
        require_vllm()
    if config.inference.key_file is not None:
        read_key(config.inference.key_file, "inference.key_file")
    _check_trackers(config)
    check_model_folder(config.model.name, chats=False)


def rehearse_env(settings: EnvSettings) -> None:
    """Makes the environment, and its first example."""
    config = EnvConfig(id=settings.id, args=settings.args)
    draw_example(load_environment(config, settings.seed), config.label, settings.start)


def _rehearse_sampling(config: OrchestratorRunConfig) -> None:
    """Makes environments with their first examples, advantage and filters; this runs code of the user's."""
    orchestrator = config.orchestrator
    for each in orchestrator.env:
        draw_example(load_environment(each, config.seed), each.label, 0)
    for evaluation in orchestrator.eval:
        load_evaluation(evaluation, config.seed)
    load_advantage(orchestrator.advantage)
    for each_filter in orchestrator.filter:
        load_filter(each_filter)
    if config.inference.key_file is not None:
        read_key(config.inference.key_file, "inference.key_file")
    if orchestrator.teacher is not None and orchestrator.teacher.key_file is not None:
        read_key(orchestrator.teacher.key_file, "orchestrator.teacher.key_file")
    if isinstance(config.transport, ZmqTransportConfig) and config.transport.keys is not None:
        own_keys(config.transport.keys, "orchestrator")
        trainer_key(config.transport.keys)
    _check_trackers(config)
    check_model_folder(config.model.name, chats=True)


def _rehearse_training(config: TrainerRunConfig) -> None:
    """Imports a loss of the user's."""
    loss = config.trainer.loss
    if isinstance(loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "trainer.loss")
    if isinstance(config.transport, ZmqTransportConfig) and config.transport.keys is not None:
        own_keys(config.transport.keys, "trainer")
        allowed_keys(config.transport.keys)
    _check_trackers(config)
    check_model_folder(config.model.name, chats=False, routes=config.trainer.enable_router_replay)


def _look_at_folder(config: TrainerRunConfig) -> None:
    """Raises ConfigError where the run could not take over its folder, or write its token export."""
    check_folder(config)
    if (exports := ExportPaths.of_run(config)) is not None:
        exports.check(resume=config.resume)


def _check_port(transport: TransportConfig) -> None:
    """Raises ConfigError if a part on its own is not told where batches go."""
    if isinstance(transport, ZmqTransportConfig):
        batch_address(transport)


def _check_trackers(config: RunConfig) -> None:
    for name in ("wandb", "tensorboard"):
        if getattr(config.monitors, name) is not None:
            with optional_package(name):
                import_module(name)


def check_rl(config: RLConfig) -> None:
    orchestrator, loss = config.orchestrator, config.trainer.loss
    if config.inference.servers:
        raise ConfigError(
            f"inference.servers = {list(config.inference.servers)}: `pellucid rl` starts the policy's server "
            "itself, and nobody would use it; leave the key out, or start the parts on their own (`pellucid "
            "inference`, `pellucid orchestrator`, `pellucid trainer`), which share output_dir = "
            f"{config.output_dir}"
        )
    for environment in (*orchestrator.env, *orchestrator.eval):
        check_environment(environment)
    for each in orchestrator.filter:
        require_package(each.import_path, "orchestrator.filter.import_path")
    if isinstance(orchestrator.advantage, CustomAdvantageConfig):
        require_package(orchestrator.advantage.import_path, "orchestrator.advantage.import_path")
    if isinstance(loss, CustomLossConfig):
        require_package(loss.import_path, "trainer.loss.import_path")
    config.trainer.check_num_processes(config.trainer.num_processes)
    _check_server(config.inference)
    check_model_folder(config.model.name, chats=True, routes=config.trainer.enable_router_replay)
    if orchestrator.teacher is not None and orchestrator.teacher.model is not None:
        _check_teacher(orchestrator.teacher.model, config.model.name)


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
