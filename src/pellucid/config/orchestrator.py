"""`[orchestrator]`: rollouts, groups, advantages, batches."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pellucid.config.base import ImportPath, Section


class SamplingConfig(Section):
    """Training needs the sampled distribution to be the model's own: no top-p, no top-k, no penalties."""

    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this before sampling, and again in the trainer."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest completion in tokens."""


class EnvConfig(Section):
    id: str = Field(min_length=1)
    """A built-in environment (`reverse-text`) or an import path `package.module:Class`."""

    name: str | None = None
    """Name in metrics, ledger and exports; default: `id`."""

    args: dict[str, Any] = Field(default={})
    """Keyword arguments for the environment."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that come from this environment, relative to the others."""

    @property
    def label(self) -> str:
        return self.name or self.id

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, value: str | None) -> str | None:
        if value == "all":
            raise ValueError("is reserved for metrics over all environments; choose another name")
        return value


class LengthPenaltyConfig(Section):
    type: Literal["none", "tokens", "turns"] = "none"
    """Cost that cheaper correct rollouts are rewarded for saving: tokens, turns or nothing."""

    completion_weight: float = Field(default=1.0, ge=0)
    """Cost of one sampled token (`tokens`)."""

    tool_response_weight: float = Field(default=0.0, ge=0)
    """Cost of one token of a tool's response (`tokens`)."""


class DefaultAdvantageConfig(Section):
    type: Literal["default"] = "default"
    """`default`: reward minus the mean reward of the group; `custom`: a function of your own."""

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
AdvantageConfig = Annotated[CustomAdvantageConfig | DefaultAdvantageConfig, Field(discriminator="type")]


class OrchestratorConfig(Section):
    env: tuple[EnvConfig, ...] = ()
    """Environments; in TOML one `[[orchestrator.env]]` table each. At least one."""

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per optimizer step, counted after filtering. Groups are never cut."""

    rollouts_per_example: int = Field(default=8, ge=1)
    """Rollouts in a group."""

    max_inflight_rollouts: int = Field(default=256, ge=1)
    """Rollouts running at once."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """A group with a token older than this many steps is dropped and counted as stale."""

    filter_zero_advantages: bool = True
    """Leave out rollouts whose advantage is exactly 0: they carry no signal. Counted in the ledger."""

    max_fruitless_groups: int = Field(default=64, ge=1)
    """Groups in a row that were lost whole (all rollouts failed, rejected or stale) before the run stops: a
    broken environment must not spin."""

    max_signalless_groups: int = Field(default=4096, ge=1)
    """Groups in a row that gave nothing to train on, mostly for equal rewards, before the run stops: a task
    that is solved, or too hard, must not sample for ever. Large, because late in a run most groups may be."""

    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled."""

    advantage: AdvantageConfig = DefaultAdvantageConfig()
    """How rewards become advantages, group by group."""

    @model_validator(mode="after")
    def _some_advantage_is_not_zero(self) -> "OrchestratorConfig":
        if (
            self.rollouts_per_example == 1
            and self.advantage.type == "default"
            and self.filter_zero_advantages
        ):
            raise ValueError(
                "orchestrator.rollouts_per_example = 1 with orchestrator.advantage.type = 'default' gives "
                "every rollout the advantage 0, and orchestrator.filter_zero_advantages = true leaves those "
                "out: nothing would train; raise rollouts_per_example, or use an advantage of your own"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "OrchestratorConfig":
        names = [env.label for env in self.env]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"orchestrator.env has two entries named {name!r}; give each its own `name`")
        if self.rollouts_per_example > self.max_inflight_rollouts:
            raise ValueError(
                f"orchestrator.rollouts_per_example = {self.rollouts_per_example} exceeds "
                f"orchestrator.max_inflight_rollouts = {self.max_inflight_rollouts}; raise the latter"
            )
        return self
