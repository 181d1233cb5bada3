"""`[orchestrator]`: rollouts, groups, advantages, batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from pellucid.config.base import MAX_NAME, ImportPath, Section, is_name
from pellucid.config.shared import ServerAddress

OWN_DISTRIBUTION = (
    "tokens are drawn from the model's own distribution, so that their logprobs are those training needs"
)
# fmt: off
RESHAPING = frozenset({
    "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens",
})
# fmt: on
"""Settings of other samplers that change the distribution; they are refused with `OWN_DISTRIBUTION`."""


class SamplingConfig(Section):
    """Training needs the sampled distribution to be the model's own: no top-p, no top-k, no penalties."""

    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this before sampling, and again in the trainer."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens."""


class EnvironmentConfig(Section):
    """An environment, its arguments and its name."""

    KEY: ClassVar[str]
    """Dotted key of this section, for messages."""

    id: str = Field(min_length=1)
    """A built-in environment (`arithmetic`, `calculator`, `reasoning-gym`, `reverse-text`), an import path
    `package.module:Class`, or `verifiers:TASKSET`, a taskset of the verifiers library."""

    name: str | None = Field(default=None, min_length=1)
    """Name in metrics, ledger and exports; default: `id`. At most 200 printable characters, without `/`."""

    args: dict[str, Any] = Field(default={})
    """Keyword arguments for the environment."""

    @property
    def label(self) -> str:
        return self.name or self.id

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, value: str | None) -> str | None:
        if value == "all":
            raise ValueError("is reserved for metrics over all environments; choose another name")
        if value is not None and not is_name(value):
            raise ValueError(
                f"is {value[:MAX_NAME]!r}; give at most {MAX_NAME} printable characters without `/`"
            )
        return value

    def problems(self) -> Iterator[str]:
        if self.name is None and not is_name(self.id):
            yield (
                f"{self.KEY}.id = {self.id[:MAX_NAME]!r} cannot be the name in metrics, which has at most "
                f"{MAX_NAME} printable characters and no `/`; set {self.KEY}.name"
            )


class EnvSamplingConfig(Section):
    """Settings of one environment that override `[orchestrator.sampling]`."""

    temperature: float | None = Field(default=None, gt=0)
    """Default: `orchestrator.sampling.temperature`."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion in tokens; default: `orchestrator.sampling.max_tokens`."""


# fmt: off
ROLLOUT_FIELDS = (
    "schema", "step", "group_id", "rollout_id", "sample_ids", "env_name", "example_id", "outcome", "reason",
    "error", "reward", "advantage", "metrics", "num_tokens", "num_tool_tokens", "stop_reason", "messages",
    "trajectory", "sampling_args",
)
# fmt: on
"""Fields of every saved rollout, in order; `OPTIONAL_ROLLOUT_FIELDS` and `state_columns` come after them."""

OPTIONAL_ROLLOUT_FIELDS = ("weights", "time_s")
"""Fields that a saved rollout has where they say something."""

_ALWAYS_SAVED = ("trajectory", "sampling_args")


class EnvConfig(EnvironmentConfig):
    KEY: ClassVar[str] = "orchestrator.env"

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that come from this environment, relative to the others. A resumed run may change
    weights and environments, for the groups sampled from then on."""

    state_columns: tuple[str, ...] = ()
    """Fields of `Score.state` to save with each rollout; `trajectory` and `sampling_args` always are. Names
    of other fields of a saved rollout (`reward`, `step`, …) are refused."""

    sampling: EnvSamplingConfig = EnvSamplingConfig()
    """Sampling in this environment, where it differs from `[orchestrator.sampling]`."""

    @field_validator("state_columns")
    @classmethod
    def _columns_are_free(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuses taken names; drops duplicates and columns that are always saved."""
        for column in value:
            if column in (*ROLLOUT_FIELDS, *OPTIONAL_ROLLOUT_FIELDS) and column not in _ALWAYS_SAVED:
                raise ValueError(
                    f"{column!r} is a field of saved rollouts; give that of Score.state another name"
                )
        return tuple(column for column in dict.fromkeys(value) if column not in _ALWAYS_SAVED)


class EvalConfig(EnvironmentConfig):
    """An environment that measures policy versions and trains none; see docs/evaluate.md."""

    KEY: ClassVar[str] = "orchestrator.eval"

    interval: int = Field(default=50, ge=1)
    """Evaluate every so many policy versions; the last version of the run is always evaluated."""

    at_start: bool = True
    """Evaluate policy version 0, too: the model before any training."""

    num_examples: int = Field(default=64, ge=1)
    """Number of examples, the same ones every time: 0, 1, … of a stream that is not used for training."""

    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy: the likeliest token. Above 0, completions are sampled."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Attempts at each example, the k of avg@k; above 1 only with a temperature."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion in tokens; default: `orchestrator.sampling.max_tokens`."""

    pass_reward: float = 1.0
    """Lowest reward with which a rollout passes, for pass@k."""

    @field_validator("rollouts_per_example")
    @classmethod
    def _attempts_differ(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("temperature") == 0:
            raise ValueError(
                "with temperature = 0 all attempts are the same; set a temperature, or 1 attempt"
            )
        return value


class LengthPenaltyConfig(Section):
    type: Literal["none", "tokens", "turns"] = "none"
    """Cost that cheaper correct rollouts are rewarded for saving: tokens, turns or nothing."""

    completion_weight: float = Field(default=1.0, ge=0)
    """Cost of one sampled token (`tokens`)."""

    tool_response_weight: float = Field(default=1.0, ge=0)
    """Cost of one token of a tool's response (`tokens`)."""


class GroupAdvantageConfig(Section):
    type: Literal["rloo", "grpo_std", "max_rl", "none"]
    """`rloo`: reward minus the mean of the others of the group; `grpo_std`: reward minus the group's mean,
    divided by its standard deviation; `max_rl`: divided by the mean instead; `none`: the reward itself."""


class DefaultAdvantageConfig(Section):
    type: Literal["default"] = "default"
    """`default`: reward minus the mean reward of the group; `rloo`, `grpo_std`, `max_rl`, `none`, and
    `custom` for a function of your own: see docs/write-an-advantage.md."""

    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    """Optional bonus for correct rollouts that cost less than their group's correct mean."""


class CustomAdvantageConfig(Section):
    type: Literal["custom"]
    """Selects a function of your own; see docs/write-an-advantage.md."""

    import_path: ImportPath
    """`package.module:function`, called once per group as `function(inputs, **kwargs)`."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for the function."""


# The default comes last: `--help` describes `type` as the last variant does.
AdvantageConfig = Annotated[
    CustomAdvantageConfig | GroupAdvantageConfig | DefaultAdvantageConfig, Field(discriminator="type")
]


class FilterConfig(Section):
    """Leaves rollouts out of the batch; see docs/write-an-advantage.md."""

    import_path: ImportPath
    """`package.module:function`, called once per group as `function(inputs, **kwargs)`."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for the function."""


class TeacherConfig(Section):
    """A model to learn from; see docs/distill.md."""

    mode: Literal["opd", "sft", "rl"] = "opd"
    """`opd`: the policy samples and learns to agree with the teacher token by token. `sft`: the policy learns
    the teacher's replies. `rl`: rewards train, and `trainer.loss.teacher_tau` weighs the teacher's
    logprobs."""

    model: str | None = Field(default=None, min_length=1)
    """The teacher, a local folder or hub name, which `pellucid rl` serves with the settings of `[inference]`.
    Its tokenizer has to be that of `model.name`."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of that server; 0 lets `pellucid rl` pick a free one."""

    servers: tuple[ServerAddress, ...] = ()
    """Instead of `model`: addresses of running servers (`http://host:port`), each a `pellucid inference` of
    the teacher with an `output_dir` of its own."""

    key_file: Path | None = None
    """File with the key of those `servers`: `key` in their run folder. Servers beyond loopback need it, and
    so does mode `sft`."""

    def problems(self) -> Iterator[str]:
        if (self.model is None) == (not self.servers):
            found = "both model and servers" if self.servers else "neither model nor servers"
            yield (
                f"orchestrator.teacher has {found}; give one of them: a model that `pellucid rl` serves, or "
                "the addresses of servers that are running"
            )
        if self.key_file is not None and not self.servers:
            yield (
                f"orchestrator.teacher.key_file = {str(self.key_file)!r} is for "
                "orchestrator.teacher.servers; `pellucid rl` gives its teacher the run's key: leave it out"
            )


class OrchestratorConfig(Section):
    env: tuple[EnvConfig, ...] = ()
    """Environments; in TOML one `[[orchestrator.env]]` table each. At least one."""

    eval: tuple[EvalConfig, ...] = ()
    """Environments that only measure; in TOML one `[[orchestrator.eval]]` table each."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per optimizer step, counted after filtering. Groups are never cut."""

    token_batch_size: int | None = Field(default=None, ge=1)
    """Instead of `batch_size`: tokens per optimizer step, prompts included. Groups are never cut; running
    ones count with the mean length of the latest, at first with `inference.max_model_len` a rollout."""

    rollouts_per_example: int = Field(default=8, ge=1)
    """Rollouts in a group."""

    max_inflight_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts running at once; default: four for each sequence that the servers decode together
    (`inference.max_concurrent` × servers), and at least a group."""

    tasks_per_minute: float | None = Field(default=None, gt=0)
    """Rollouts started per minute at most; default: no limit."""

    rollout_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a rollout has failed, its scoring included. The scoring of a group counts into the
    rollout that completes the group."""

    server_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without an answer of `/health`, or without progress on its requests, after which a server is
    hung: its requests go to the others until it is back with the current weights."""

    max_retries: int = Field(default=0, ge=0)
    """Further attempts at a failed rollout before its group goes on without it."""

    retry_backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the first retry; it doubles with each further one."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Steps after which a token is too old: its group is dropped and counted as stale, or cancelled in
    flight."""

    pace_sampling: bool = False
    """Drop nothing as stale: batches wait for running groups that would be too old for the next one. Slow
    rollouts then cost time, but dropping them would bias training towards quick ones."""

    filter_zero_advantages: bool = True
    """Leave out rollouts whose advantage is exactly 0: they carry no signal. With a `teacher` none is left
    out."""

    max_fruitless_groups: int = Field(default=64, ge=1)
    """Groups in a row that were lost whole (all rollouts failed, rejected or stale) before the run stops."""

    max_signalless_groups: int = Field(default=4096, ge=1)
    """Groups in a row with nothing to train on, mostly for equal rewards, before the run stops: the task is
    solved, or too hard. Late in a run most groups may be like that."""

    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""

    advantage: AdvantageConfig = DefaultAdvantageConfig()
    """How rewards become advantages, group by group."""

    filter: tuple[FilterConfig, ...] = ()
    """Functions that leave rollouts out, as `filtered` in the ledger; in TOML one `[[orchestrator.filter]]`
    table each."""

    teacher: TeacherConfig | None = None
    """Present: the policy learns from another model, too, or from it alone."""

    @property
    def drops_zero_advantages(self) -> bool:
        return self.filter_zero_advantages and self.teacher is None

    def sampling_of(self, env: EnvConfig) -> SamplingConfig:
        return self.sampling.model_copy(update=env.sampling.model_dump(exclude_none=True))

    def problems(self) -> Iterator[str]:
        is_relative = self.advantage.type not in ("none", "custom")
        if self.rollouts_per_example == 1 and is_relative and self.drops_zero_advantages:
            yield (
                f"orchestrator.rollouts_per_example = 1 with orchestrator.advantage.type = "
                f"{self.advantage.type!r} gives every rollout the advantage 0, which "
                "orchestrator.filter_zero_advantages = true leaves out; raise rollouts_per_example, or use "
                "an advantage of your own"
            )
        if self.token_batch_size is not None and "batch_size" in self.model_fields_set:
            yield (
                f"orchestrator.batch_size = {self.batch_size} and orchestrator.token_batch_size = "
                f"{self.token_batch_size}: a batch has one size; leave one of them out"
            )
        for entries in (self.env, self.eval):
            names = [entry.label for entry in entries]
            for entry in entries:
                if names.count(entry.label) > 1:
                    yield f"{entry.KEY} has two entries named {entry.label!r}; give each its own `name`"
        if self.max_inflight_rollouts is not None and self.rollouts_per_example > self.max_inflight_rollouts:
            yield (
                f"orchestrator.rollouts_per_example = {self.rollouts_per_example} exceeds "
                f"orchestrator.max_inflight_rollouts = {self.max_inflight_rollouts}; raise the latter"
            )

    @model_serializer(mode="wrap")
    def _with_one_batch_size(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves `batch_size` out if `token_batch_size` is set: reading both back would be refused."""
        values: dict[str, Any] = dump(self)
        if self.token_batch_size is not None:
            values.pop("batch_size", None)
        return values
