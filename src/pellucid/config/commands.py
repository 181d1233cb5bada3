"""The configuration of each command: shared keys on top, and the sections that the command reads.

`seq_len` fills `trainer.model.seq_len` and `inference.max_model_len`; another value there is an error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from pellucid.config.base import MAX_NAME, Section, is_name
from pellucid.config.gpus import GpusConfig
from pellucid.config.orchestrator import EnvConfig, OrchestratorConfig, TeacherConfig
from pellucid.config.shared import (
    FilesystemTransportConfig,
    InferenceConfig,
    ModelConfig,
    MonitorsConfig,
    TransportConfig,
    WeightsConfig,
    base_url,
)
from pellucid.config.trainer import DataConfig, DppoLossConfig, TrainerConfig
from pellucid.errors import ConfigError

_FILLED_BY_SEQ_LEN = ("trainer.model.seq_len", "inference.max_model_len")
_ROLLOUTS_PER_SLOT = 4  # some of them wait for their environment, or for a slot


class RunConfig(Section):
    """Settings that all processes of a run share."""

    output_dir: Path = Path("outputs/run")
    """Run folder; everything a run writes is below it."""

    clean_output_dir: bool = False
    """Delete the files of an earlier run in `output_dir` first; without this or `resume`, a used folder is
    refused."""

    resume: bool = False
    """Continue the run in `output_dir` from its newest checkpoint; in an unused folder, start a new run. Wins
    over `clean_output_dir`: nothing is deleted."""

    run_id: str | None = None
    """Name of the run in ledger and exports; default: the name of `output_dir`. At most 200 printable
    characters, without `/` and without a dot at its beginning."""

    seed: int = Field(default=0, ge=0)
    """Seed of data order, sampling and initialisation."""

    seq_len: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens; fills `trainer.model.seq_len` and `inference.max_model_len`."""

    model: ModelConfig
    """The model."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where metrics go besides `metrics/PROCESS.jsonl`."""

    @property
    def run_name(self) -> str:
        return self.run_id or self.output_dir.resolve().name

    @model_validator(mode="before")
    @classmethod
    def _fill_from_seq_len(cls, data: Any) -> Any:
        """Copies `seq_len` into the sections of this command; refuses another value there."""
        if isinstance(data, Mapping) and (seq_len := data.get("seq_len")) is not None:
            for key in _FILLED_BY_SEQ_LEN:
                if key.partition(".")[0] in cls.model_fields:
                    data = _fill(data, key.split("."), seq_len, key)
        return data

    def problems(self) -> Iterator[str]:
        # A trainer of many runs makes a folder of this name for each run.
        if not is_name(self.run_name) or self.run_name.startswith("."):
            said = "run_id =" if self.run_id else "run_id is not set, and the name of output_dir,"
            yield (
                f"{said} {self.run_name[:MAX_NAME]!r} cannot name the run: give run_id at most {MAX_NAME} "
                "printable characters, without `/` and without a dot at its beginning"
            )


def _fill(section: Any, path: list[str], seq_len: Any, key: str) -> Any:
    """Returns `section` with `seq_len` at `path`; raises ValueError if another value is there."""
    section = _plain(section)
    if not isinstance(section, Mapping):
        return section
    name, *rest = path
    if rest:
        return {**section, name: _fill(section.get(name, {}), rest, seq_len, key)}
    found = section.get(name)
    if found is not None and str(found) != str(seq_len):
        raise ValueError(
            f"{key} = {found} contradicts seq_len = {seq_len}; set one of them, or both to the same value"
        )
    return {**section, name: seq_len if found is None else found}


class TrainerRunConfig(RunConfig):
    """`pellucid trainer`: train on batches that an orchestrator sends."""

    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps; each trains one batch."""

    export: bool = False
    """Write every token of every step for `pellucid view` and `pellucid replay`: Parquet, about 26 bytes per
    token, at most `trainer.experimental.token_export.max_bytes`. Where
    `[trainer.experimental.token_export]` is set, it decides about the format."""

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""

    transport: TransportConfig = FilesystemTransportConfig()
    """How batches arrive."""

    weights: WeightsConfig = WeightsConfig()
    """How weights leave."""

    @model_validator(mode="before")
    @classmethod
    def _fill_export(cls, data: Any) -> Any:
        """Sets a Parquet export if `export` is true and `[trainer.experimental.token_export]` is not set."""
        if not isinstance(data, Mapping) or not _is_true(data.get("export")):
            return data
        trainer = _plain(data.get("trainer", {}))
        experimental = _plain(trainer.get("experimental", {})) if isinstance(trainer, Mapping) else None
        if not isinstance(experimental, Mapping) or experimental.get("token_export") is not None:
            return data
        experimental = {**experimental, "token_export": {"format": "parquet"}}
        return {**data, "trainer": {**trainer, "experimental": experimental}}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        shares = [key for key in ("many_runs", "join") if getattr(self.trainer, key) is not None]
        if shares and self.model.lora is None:
            yield f"trainer.{shares[0]} needs [model.lora]: runs that share a model have an adapter each"
        if shares and self.weights.transport != "filesystem":
            yield (
                f'trainer.{shares[0]} with weights.transport = "{self.weights.transport}": a trainer of many '
                "runs publishes to their folders only; leave one out"
            )
        if shares and self.trainer.data.fake is not None:
            yield f"trainer.{shares[0]} with trainer.data.fake: fake data are of no run; leave one out"


class OrchestratorRunConfig(RunConfig):
    """`pellucid orchestrator`: sample rollouts, score them, send batches."""

    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps; each trains one batch."""

    max_async_level: int = Field(default=1, ge=0)
    """Steps that sampling may run ahead of the weights; 0 is strictly on-policy and never overlaps."""

    orchestrator: OrchestratorConfig
    """The orchestrator."""

    inference: InferenceConfig = InferenceConfig()
    """The server that samples."""

    transport: TransportConfig = FilesystemTransportConfig()
    """How batches leave."""

    weights: WeightsConfig = WeightsConfig()
    """How weights arrive."""

    @property
    def weights_dir(self) -> Path:
        """Folder in which this part sees published versions: the trainer's, or a list of what it offers."""
        return self.output_dir / ("weights" if self.weights.transport == "filesystem" else "weights_offered")

    def check_addresses(self) -> None:
        """Raises ConfigError if an orchestrator on its own is not told where servers and trainer are."""
        self.weights.check_address()
        if self.inference.port == 0 and not self.inference.servers:
            raise ConfigError(
                "inference.port = 0 does not say where the server is; set the port of `pellucid inference`, "
                "or start all parts with `pellucid rl`"
            )
        teacher = self.orchestrator.teacher
        if teacher is not None and teacher.port == 0 and not teacher.servers:
            raise ConfigError(
                "orchestrator.teacher.model is served by `pellucid rl` alone; start `pellucid inference` "
                "with the teacher, and give its address as orchestrator.teacher.servers"
            )

    @property
    def max_inflight_rollouts(self) -> int:
        """`orchestrator.max_inflight_rollouts`, or a number that follows from the servers' slots."""
        if self.orchestrator.max_inflight_rollouts is not None:
            return self.orchestrator.max_inflight_rollouts
        num_slots = self.inference.max_concurrent * len(self.inference.urls)
        return max(_ROLLOUTS_PER_SLOT * num_slots, self.orchestrator.rollouts_per_example)

    @property
    def max_held_requests(self) -> int:
        """Requests that the servers hold at a time, running or waiting; others wait in the orchestrator."""
        each = self.inference.max_concurrent + self.inference.max_queued
        return each * len(self.inference.urls)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.orchestrator.env:
            yield "orchestrator.env = [] but a run needs an environment; add [[orchestrator.env]] with an id"
        hwm, ahead = self.transport.hwm, self.max_async_level
        if hwm <= ahead:
            yield (
                f"transport.hwm = {hwm} has to exceed max_async_level = {ahead}: sampling would stand still "
                "while batches wait for the trainer; raise the former or lower the latter"
            )
        if (bound := self.orchestrator.max_off_policy_steps) < ahead:
            yield (
                f"orchestrator.max_off_policy_steps = {bound} is below max_async_level = {ahead}: what is "
                "sampled that far ahead would be dropped as stale; raise the former or lower the latter"
            )
        if self.orchestrator.teacher is not None:
            yield from self._teacher_problems(self.orchestrator.teacher)

    def _teacher_problems(self, teacher: TeacherConfig) -> Iterator[str]:
        inference = self.inference
        policy = "inference.servers" if inference.servers else "inference.host and inference.port"
        for url in teacher.servers:
            if url in inference.urls:
                yield (
                    f"orchestrator.teacher.servers has {url}, and so has the policy ({policy}), whose "
                    "servers are given new weights; start a server for each"
                )
        if teacher.port and not teacher.servers and base_url(inference.host, teacher.port) in inference.urls:
            yield (
                f"orchestrator.teacher.port = {teacher.port} is the port of the policy's server ({policy}), "
                "which is given new weights; give the teacher another one"
            )
        temperature = self.orchestrator.sampling.temperature
        scores_by_vllm = inference.backend == "vllm" and teacher.model is not None and teacher.mode != "sft"
        if scores_by_vllm and temperature != 1:
            yield (
                f"orchestrator.sampling.temperature = {temperature} with a teacher on vLLM, which scores "
                'tokens at temperature 1 only; set it to 1, or inference.backend = "embedded"'
            )


class InferenceRunConfig(RunConfig):
    """`pellucid inference`: serve the model, follow its weights."""

    inference: InferenceConfig = InferenceConfig()
    """The server."""

    weights: WeightsConfig = WeightsConfig()
    """How weights arrive."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _transfer_problems(self.weights, self.inference, self.model)

    def check_addresses(self) -> None:
        """Raises ConfigError if a server on its own is not told where to listen, or where the trainer is."""
        self.weights.check_address()
        if self.inference.port == 0:
            raise ConfigError("inference.port = 0: the server on its own needs a port; set inference.port")


def _transfer_problems(
    weights: WeightsConfig, inference: InferenceConfig, model: ModelConfig
) -> Iterator[str]:
    transfer = f'weights.transfer = "{weights.transfer}"'
    if weights.transfer == "files":
        return
    if inference.backend != "vllm":
        yield (
            f'{transfer} is for vLLM, and inference.backend = "{inference.backend}"; leave it out, or set '
            'inference.backend = "vllm"'
        )
    if model.lora is not None:
        yield f"{transfer} with [model.lora]: vLLM reads adapters from files; leave one of them out"
    if weights.transfer == "ipc" and inference.gpus_per_server > 1:
        yield (
            f"{transfer} is for one GPU that trainer and server share, and a server has "
            f'{inference.server_size}; set weights.transfer = "nccl"'
        )


class RLConfig(OrchestratorRunConfig, TrainerRunConfig):
    """`pellucid rl`: inference, orchestrator and trainer of one run on this machine."""

    gpus: GpusConfig = GpusConfig()
    """GPUs of this machine, and who has how many of them."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _no_fake_data(self.trainer, "rl trains on what its orchestrator sends")
        yield from self._gpu_problems()
        yield from _transfer_problems(self.weights, self.inference, self.model)
        if self.trainer.many_runs is not None:
            yield "trainer.many_runs is for `pellucid trainer`, which runs join by trainer.join; leave it out"
        keep, ahead = self.trainer.keep_weights, self.max_async_level
        if keep <= ahead:
            yield (
                f"trainer.keep_weights = {keep} has to exceed max_async_level = {ahead}: weights could be "
                "deleted while the server loads them; raise the former or lower the latter"
            )
        teacher, loss = self.orchestrator.teacher, self.trainer.loss
        tau = getattr(loss, "teacher_tau", None)
        if teacher is None and tau:
            yield (
                f"trainer.loss.teacher_tau = {tau} weighs the logprobs of a teacher, but there is none; add "
                '[orchestrator.teacher] with mode = "rl", or leave it out'
            )
        if teacher is not None and teacher.mode == "rl" and tau == 0:
            yield (
                'orchestrator.teacher.mode = "rl" with trainer.loss.teacher_tau = 0: the teacher would '
                'change nothing; set teacher_tau above 0, or another mode ("opd", "sft")'
            )
        if teacher is not None and teacher.mode != "rl" and loss != DppoLossConfig():
            yield (
                f'orchestrator.teacher.mode = "{teacher.mode}" has a loss of its own, and [trainer.loss] '
                'would have no effect; leave it out, or set mode = "rl"'
            )
        replay = "trainer.enable_router_replay = true"
        if not self.trainer.enable_router_replay:
            return
        if self.inference.record_experts is False:
            yield f"inference.record_experts = false contradicts {replay}, which needs it; leave one out"
        if self.trainer.replay_expert_weights:
            weights = "trainer.replay_expert_weights = true"
            if self.inference.record_expert_weights is False:
                yield f"inference.record_expert_weights = false contradicts {weights}; leave one out"
            if self.inference.backend == "vllm":
                yield (
                    f'{weights} with inference.backend = "vllm", which tells experts without their weights; '
                    'leave it out, or set the backend to "embedded"'
                )
        if teacher is not None and teacher.mode == "sft":
            yield (
                f'{replay} with orchestrator.teacher.mode = "sft": the tokens were sent to the experts of '
                "the teacher, not of the policy; leave one of them out"
            )

    @property
    def serves_teacher(self) -> bool:
        """Whether `pellucid rl` starts a server for a teacher."""
        return self.orchestrator.teacher is not None and self.orchestrator.teacher.model is not None

    def _gpu_problems(self) -> Iterator[str]:
        gpus, num_processes, size = self.gpus, self.trainer.num_processes, self.inference.gpus_per_server
        if gpus.trainer is not None and num_processes not in (1, gpus.trainer):
            yield (
                f"gpus.trainer = {gpus.trainer} contradicts trainer.num_processes = {num_processes}: the "
                "trainer has a process on each of its GPUs; leave one of them out"
            )
        if gpus.inference is not None and gpus.inference % size:
            yield (
                f"gpus.inference = {gpus.inference} is no multiple of {self.inference.server_size}, the GPUs "
                "of one server; change one of them"
            )
        if gpus.teacher is not None and not self.serves_teacher:
            yield (
                f"gpus.teacher = {gpus.teacher}, but there is no orchestrator.teacher.model to serve; leave "
                "it out"
            )
        if gpus.teacher is not None and gpus.teacher != size:
            yield (
                f"gpus.teacher = {gpus.teacher}, but the teacher has one server, on "
                f"{self.inference.server_size} GPU(s); set it to {size} or leave it out"
            )

    def part(self, kind: type[RunConfig], **changes: Any) -> RunConfig:
        """Returns the settings that one process of this run reads."""
        values = {name: _plain(getattr(self, name)) for name in kind.model_fields}
        return kind.model_validate({**values, **changes})


class VerifyModelConfig(ModelConfig):
    DEMO: ClassVar[str] = "demo"

    name: str = DEMO
    """Hub name or local folder of a causal language model with its tokenizer; by default a tiny one that
    `verify` makes."""


class VerifyOrchestratorConfig(OrchestratorConfig):
    env: tuple[EnvConfig, ...] = (EnvConfig(id="reverse-text"),)
    """Environments; in TOML one `[[orchestrator.env]]` table each. By default the demo's."""


# fmt: off
VerifyCheck = Literal[
    "tokenizer", "columns", "packing", "ranks", "processes", "leakage", "record", "agreement",
    "precision", "experts", "sampling", "oracle", "weights", "model",
]
# fmt: on


class VerifyConfig(RLConfig):
    """`pellucid verify`: check the trainer's promises on a run's own configuration and model."""

    model: VerifyModelConfig = VerifyModelConfig()
    """The model."""

    orchestrator: VerifyOrchestratorConfig = VerifyOrchestratorConfig()
    """Its environments give the prompts, and `sampling` the temperature."""

    only: VerifyCheck | None = None
    """Make this check alone; by default all of them but `model`, which is about a model without a run."""

    rehearse: bool = False
    """Instead of the checks, train one micro batch of the model's shape on a pretend GPU, and print for each
    phase how often the host would wait for the device, launches, copies and memory. Needs no GPU and loads no
    weights."""

    as_json: bool = Field(default=False, alias="json")
    """Print one JSON object per line instead of a table."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_model(cls, data: Any) -> Any:
        """Reads `model = NAME` as `model.name = NAME` and `only = "model"`."""
        if isinstance(data, Mapping) and isinstance(data.get("model"), str):
            return {"only": "model", **data, "model": {"name": data["model"]}}
        return data


PARTS: Mapping[type[Section], str] = {
    InferenceRunConfig: "inference",
    OrchestratorRunConfig: "orchestrator",
    TrainerRunConfig: "trainer",
}
"""Config of each process of an rl run, and its section; a process reads its own keys of the run's file."""


class SFTConfig(TrainerRunConfig):
    """`pellucid sft`: the trainer's loop fed from a data set."""

    data: DataConfig
    """The data set."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _no_fake_data(self.trainer, "sft trains on its data set")
        if self.trainer.enable_router_replay:
            yield "trainer.enable_router_replay = true: sft has no engine's experts to replay; leave it out"
        for key in ("many_runs", "join"):
            if getattr(self.trainer, key) is not None:
                yield f"trainer.{key} is for rl; sft has the model to itself: leave it out"


def _no_fake_data(trainer: TrainerConfig, because: str) -> Iterator[str]:
    if trainer.data.fake is not None:
        yield f"trainer.data.fake is set, but {because}; leave it out, or use `pellucid trainer`"


def _is_true(value: Any) -> bool:
    """Returns whether validation reads `value` as true; a value that it refuses is not."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Section) else value
