"""Finds mistakes in a run before anything is made, deleted or started.

`check_rl` and `check_sft` come before a run: they take a fraction of a second, load no torch and run no code
of the user's. The processes of the run check again, with what they really load. A run that is refused leaves
its output folder as it was. `rehearse` is for `--dry-run`: it imports and makes what the command would, code
of the user's included. `resolved` is the configuration that it prints.
"""

import os
import socket
import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from tokenizers import Tokenizer

from pellucid.config import (
    CustomAdvantageConfig,
    CustomLossConfig,
    EnvConfig,
    InferenceConfig,
    InferenceRunConfig,
    OrchestratorConfig,
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
from pellucid.config.commands import PARTS
from pellucid.config.imports import load_function, require_package
from pellucid.config.shared import VLLM_REMEDY, base_url, require_vllm
from pellucid.config.tools import EnvSettings, PlanConfig, RenderConfig
from pellucid.data.model_folder import check_lengths, check_model_folder
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.export.paths import ExportPaths
from pellucid.guard import read_key
from pellucid.inference.client import other_vocabulary
from pellucid.launch.gpus import NO_GPUS, Placement, place, visible_gpus, with_placement
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


def resolve(config: RLConfig, cores: int, placement: Placement = NO_GPUS) -> RLConfig:
    """Returns `config` with what was left open: GPUs, ports, threads, and whether experts are recorded."""
    config = with_placement(share_cores(config, cores), placement)
    return choose_ports(config, max(1, len(placement.servers)))


def share_cores(config: RLConfig, cores: int) -> RLConfig:
    """Gives server and trainer half of the cores each, and decides whether experts are recorded."""
    half = max(1, cores // 2)
    inference, trainer = config.inference, config.trainer
    records = inference.record_experts or trainer.enable_router_replay
    weighs = bool(inference.record_expert_weights or trainer.replay_expert_weights)
    inference = _with(
        inference,
        threads=inference.threads or half,
        record_experts=records or weighs,
        record_expert_weights=weighs,
    )
    return _with(config, inference=inference, trainer=_with(trainer, threads=trainer.threads or half))


def choose_ports(config: RLConfig, num_servers: int = 1) -> RLConfig:
    """Chooses a free port where none is set; raises ConfigError if one that is set cannot be used.

    The first of several servers has `inference.port`, the others have free ones; all are in
    `inference.servers` then.
    """
    inference, orchestrator, transport = config.inference, config.orchestrator, config.transport
    if (teacher := orchestrator.teacher) is not None and teacher.model is not None:
        port = free_port(inference.host, teacher.port, "orchestrator.teacher")
        orchestrator = _with(orchestrator, teacher=_with(teacher, port=port))
    if isinstance(transport, ZmqTransportConfig):
        transport = _with(transport, port=free_port(transport.host, transport.port, "transport"))
    weights = config.weights
    if weights.transport == "http":
        key_file = weights.key_file or inference.key_file  # the trainer has no [inference]
        port = free_port(weights.host, weights.port, "weights")
        weights = _with(weights, port=port, key_file=key_file)
    inference = _with(inference, port=free_port(inference.host, inference.port))
    if num_servers > 1:
        ports = [inference.port, *(free_port(inference.host, 0) for _ in range(num_servers - 1))]
        servers = tuple(base_url(inference.host, port) for port in ports)
        inference = _with(inference, servers=servers)
    return _with(config, inference=inference, orchestrator=orchestrator, transport=transport, weights=weights)


def free_port(host: str, port: int, section: str = "inference") -> int:
    """`port` if nobody listens on it; for 0 a free one, reserved for the child that will listen on it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        number = port
        if port == 0:
            with socket.socket(family) as any_port:
                any_port.bind((host, 0))
                number = any_port.getsockname()[1]
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, number))
            server.listen()
            if port == 0:
                _reserve(server)
            return number
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


def resolved(config: Section) -> Section:
    """Returns `config` as it would run: with each default that follows from other keys, or from this machine.

    A port of 0 stays, since a free one is chosen only when the run starts.
    """
    if type(config) not in (RLConfig, SFTConfig, *PARTS):
        return config
    run, cores = cast(RunConfig, config), num_cores()
    name = run.run_name
    run = _with(run, run_id=name)
    if (wandb := run.monitors.wandb) is not None:
        wandb = _with(wandb, name=wandb.name or name, group=wandb.group or name)
        run = _with(run, monitors=_with(run.monitors, wandb=wandb))
    if isinstance(run, RLConfig):
        run = with_placement(share_cores(run, cores), place(run, visible_gpus(os.environ)))
    if isinstance(run, TrainerRunConfig):
        trainer = _with(run.trainer, threads=run.trainer.threads or cores)
        if trainer.data.fake is None and trainer.join is None:  # they refuse a cap
            trainer = _with(trainer, micro_batch_max_tokens=trainer.max_tokens)
        run = _with(run, trainer=trainer)
    if isinstance(run, OrchestratorRunConfig):
        run = _with(run, orchestrator=_resolved_orchestrator(run))
    if isinstance(run, InferenceRunConfig):
        server = run.inference
        weighs = bool(server.record_expert_weights)
        records = bool(server.record_experts) or weighs
        server = _with(
            server,
            threads=server.threads or cores,
            record_experts=records,
            record_expert_weights=weighs,
        )
        run = _with(run, inference=server)
    if isinstance(run, SFTConfig) and (run.data.path is None or run.data.path.is_dir()):
        run = _with(run, data=_with(run.data, split=run.data.part[1]))
    return run


def remarks(config: Section) -> list[str]:
    """Returns what `--dry-run` says below the configuration: who has which GPUs in a run of `pellucid rl`."""
    return place(config, visible_gpus(os.environ)).lines() if type(config) is RLConfig else []


def _resolved_orchestrator(run: OrchestratorRunConfig) -> OrchestratorConfig:
    config = run.orchestrator
    environments = []
    for env in config.env:
        sampling = _with(env.sampling, **dict(config.sampling_of(env)))
        environments.append(_with(env, name=env.label, sampling=sampling))
    evaluations = []
    for each in config.eval:
        max_tokens = each.max_tokens or config.sampling.max_tokens
        evaluations.append(_with(each, name=each.label, max_tokens=max_tokens))
    return _with(
        config,
        env=tuple(environments),
        eval=tuple(evaluations),
        max_inflight_rollouts=run.max_inflight_rollouts,
    )


def _with(section: S, **values: Any) -> S:
    return section.model_copy(update=values)


def rehearse(config: Section) -> None:
    """`--dry-run`: checks the settings and the folder, and imports and makes what the command would."""
    if isinstance(config, EnvSettings):
        env = EnvConfig(id=config.id, args=config.args)
        draw_example(load_environment(env, config.seed), env.label, config.start)
        return
    if not isinstance(config, RunConfig) or isinstance(config, PlanConfig | RenderConfig):
        return
    if isinstance(config, VerifyConfig):
        if config.model.name == config.model.DEMO:
            return
        check_rl(_with(config, inference=_with(config.inference, servers=())))  # verify asks none
    elif isinstance(config, RLConfig):
        placement = place(config, visible_gpus(os.environ))
        check_rl(with_placement(config, placement))
        choose_ports(config, len(placement.servers))
        _check_run_folder(config)
    elif isinstance(config, SFTConfig):
        check_sft(config)
        _check_run_folder(config)
    elif isinstance(config, InferenceRunConfig):
        config.check_addresses()
        _rehearse_serving(config)
    elif isinstance(config, OrchestratorRunConfig):
        config.check_addresses()
        _check_batch_address(config.transport)
    elif isinstance(config, TrainerRunConfig) and config.trainer.data.fake is None:
        config.weights.check_address()
        _check_batch_address(config.transport)
    if isinstance(config, OrchestratorRunConfig):
        _rehearse_sampling(config)
    if isinstance(config, TrainerRunConfig) and not isinstance(config, SFTConfig):
        _rehearse_training(config)
    for name in ("wandb", "tensorboard"):
        if getattr(config.monitors, name) is not None:
            with optional_package(name):
                import_module(name)


def _rehearse_serving(config: InferenceRunConfig) -> None:
    if config.inference.backend == "vllm":
        require_vllm()
    _check_keys(
        {"inference.key_file": config.inference.key_file, "weights.key_file": config.weights.key_file}
    )
    check_model_folder(config.model.name, chats=False)


def _rehearse_sampling(config: OrchestratorRunConfig) -> None:
    """Makes environments with their first examples, advantage and filters; this runs code of the user's."""
    orchestrator, teacher = config.orchestrator, config.orchestrator.teacher
    for each in orchestrator.env:
        draw_example(load_environment(each, config.seed), each.label, 0)
    for evaluation in orchestrator.eval:
        load_evaluation(evaluation, config.seed)
    load_advantage(orchestrator.advantage)
    for each_filter in orchestrator.filter:
        load_filter(each_filter)
    teacher_key = None if teacher is None else teacher.key_file
    _check_keys(
        {
            "inference.key_file": config.inference.key_file,
            "orchestrator.teacher.key_file": teacher_key,
            "weights.key_file": config.weights.key_file,
        }
    )
    if isinstance(config.transport, ZmqTransportConfig) and config.transport.keys is not None:
        own_keys(config.transport.keys, "orchestrator")
        trainer_key(config.transport.keys)
    check_model_folder(config.model.name, chats=True)


def _rehearse_training(config: TrainerRunConfig) -> None:
    """Imports a loss of the user's."""
    loss = config.trainer.loss
    if isinstance(loss, CustomLossConfig):
        load_function(loss.import_path, loss.kwargs, "trainer.loss")
    if isinstance(config.transport, ZmqTransportConfig) and config.transport.keys is not None:
        own_keys(config.transport.keys, "trainer")
        allowed_keys(config.transport.keys)
    _check_keys({"weights.key_file": config.weights.key_file})
    check_model_folder(config.model.name, chats=False, routes=config.trainer.enable_router_replay)


def _check_keys(files: Mapping[str, Path | None]) -> None:
    for setting, path in files.items():
        if path is not None:
            read_key(path, setting)


def _check_run_folder(config: TrainerRunConfig) -> None:
    """Raises ConfigError where the run could not take over its folder, or write its token export."""
    check_folder(config)
    if (exports := ExportPaths.of_run(config)) is not None:
        exports.check(resume=config.resume)


def _check_batch_address(transport: TransportConfig) -> None:
    """Raises ConfigError if a part on its own is not told where batches go."""
    if isinstance(transport, ZmqTransportConfig):
        batch_address(transport)


def check_rl(config: RLConfig) -> None:
    orchestrator, loss = config.orchestrator, config.trainer.loss
    if config.inference.servers:
        raise ConfigError(
            f"inference.servers = {list(config.inference.servers)}: `pellucid rl` starts the policy's server "
            "itself; leave the key out, or start the parts on their own (`pellucid inference`, `pellucid "
            f"orchestrator`, `pellucid trainer`), which share output_dir = {config.output_dir}"
        )
    for environment in (*orchestrator.env, *orchestrator.eval):
        check_environment(environment)
    for each in orchestrator.filter:
        require_package(each.import_path, "orchestrator.filter.import_path")
    if isinstance(orchestrator.advantage, CustomAdvantageConfig):
        require_package(orchestrator.advantage.import_path, "orchestrator.advantage.import_path")
    if isinstance(loss, CustomLossConfig):
        require_package(loss.import_path, "trainer.loss.import_path")
    config.trainer.check_num_processes(config.gpus.trainer or config.trainer.num_processes)
    _check_server(config.inference)
    check_model_folder(config.model.name, chats=True, routes=config.trainer.enable_router_replay)
    check_lengths(
        config.model.name,
        trained=config.trainer.model.seq_len,
        served=config.inference.max_model_len,
    )
    if orchestrator.teacher is not None and orchestrator.teacher.model is not None:
        _check_teacher(orchestrator.teacher.model, config.model.name)


def _check_server(settings: InferenceConfig) -> None:
    """Raises ConfigError if the server's interpreter cannot be run or lacks a package; imports none."""
    if settings.python is None:
        if settings.backend == "vllm":
            require_vllm()
        return
    needed = ("pellucid", "vllm") if settings.backend == "vllm" else ("pellucid",)
    script = (
        "import importlib.util as util, sys\n"
        "print(*(name for name in sys.argv[1:] if not getattr(util.find_spec(name), 'origin', None)))"
    )
    key = f"inference.python = {str(settings.python)!r}"
    remedy = f"; {VLLM_REMEDY}" if settings.backend == "vllm" else ""
    try:
        answer = subprocess.run([settings.python, "-c", script, *needed], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"{key} cannot be run ({error.strerror}){remedy}") from error
    if answer.returncode:
        raise ConfigError(f"{key} is no Python interpreter{remedy}")
    if missing := answer.stdout.split():
        raise ConfigError(f"{key} has no {' and no '.join(missing)}; install it there{remedy}")


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
