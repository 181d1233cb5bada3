"""A run against itself: what follows from the record has to be in the record."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pellucid.checks.finding import Finding
from pellucid.checks.replay.advantages import judge_advantages, not_replayable
from pellucid.checks.replay.comparison import Comparison, record_name, token_name
from pellucid.checks.replay.logged import expected_rate, levels_of
from pellucid.checks.replay.losses import MASKS, NEEDED, RATIOS, judge_losses, modes_of, num_trainable
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.data import TrainingMode
from pellucid.errors import ConfigError, DataError, ModelError, PellucidError
from pellucid.export import FIELDS
from pellucid.export.batch import ColumnBatch, Values
from pellucid.ledger import State

if TYPE_CHECKING:
    from pellucid.checks.replay.weights import Predictor

ROUNDING = 1e-5
LOSS = 1e-6
STAGES = (
    "off-policy",
    "rewards",
    "advantages",
    "weights",
    "ratios",
    "masks",
    "losses",
    "ledger",
    "record",
    "loss",
    "learning rate",
)
"""Checks in the order in which a token meets what they are about."""

_LOSS_HINT = (
    "the recorded values do not follow from the recorded logprobs and advantages under the run's own "
    "[trainer.loss]: it was changed since, or what is exported is not what the loss did"
)
_ADVANTAGE_HINT = (
    "rewards or the group's members changed after the advantages were computed, or [orchestrator.advantage] "
    "is not what the run had"
)
_REWARD_HINT = (
    "the batch had another reward for this rollout than was saved with it, or the export repeats it wrongly"
)
_LEVEL_HINT = (
    "the versions of exported tokens do not fit the step that trained them, or what was logged of them: "
    "stale tokens were trained, or versions were lost on the way"
)
_RATE_HINT = (
    "the learning rate is not that of [trainer.optim] and [trainer.scheduler] at this step: the schedule "
    "started again, or other settings were used"
)
_LEDGER_HINT = (
    "the trainer booked other tokens as trained or masked than its export shows: the ledger does not tell "
    "where they went"
)
_WEIGHTS_HINT = (
    "the weights of the step do not give the recorded logprobs: they are of another step, or the forward has "
    "changed"
)


@dataclass
class Loss:
    """The sum of the token losses ÷ denominator against what was logged."""

    worst: float = 0.0
    where: str = ""
    num_steps: int = 0

    def add(self, step: int, exported: float, logged: float, scale: float) -> None:
        """`scale` is what the difference is relative to. A loss that is not finite is so in both records."""
        self.num_steps += 1
        are_finite = math.isfinite(exported), math.isfinite(logged)
        if all(are_finite):
            gap = abs(exported - logged) / max(scale, 1e-12)
        else:
            gap = math.inf if any(are_finite) else 0.0
        if gap > self.worst:
            self.worst, self.where = gap, f"step {step}: {exported:.9g} exported, {logged:.9g} logged"

    def finding(self) -> Finding:
        return Finding(
            "loss",
            f"sum of token losses ÷ denominator against the logged loss, {self.num_steps:,} steps: largest "
            "relative difference",
            self.worst,
            LOSS,
            f"{self.where}. Tokens are missing from the export, or carry another loss than was optimised",
        )


@dataclass
class Checks:
    run: RecordedRun
    predictor: "Predictor | None" = None
    notes: list[str] = field(default_factory=list)
    """Checks that could not be made, and why."""

    def __post_init__(self) -> None:
        self._comparisons: dict[str, Comparison] = {}
        self._loss = Loss()
        self._trainable = Comparison("record", "denominator", 0, of="steps", hint=_LOSS_HINT)

    def add(self, number: int, step: ColumnBatch) -> dict[str, Values]:
        """Compares one step; returns what was recomputed."""
        recomputed: dict[str, Values] = {}
        name = token_name(step)
        missing = [column for column in NEEDED if column not in step.columns]
        if missing:
            self._note(f"losses were not recomputed: the export lacks {', '.join(missing)}")
        else:
            self._check_sums(number, step)
            self._check_books(number, step)
            recomputed, undecided = judge_losses(step, self.run.at(number).loss)
            for check, columns in self._follows_from_logprobs(number, step):
                for column in (column for column in columns if column in step.columns):
                    recorded = _floats(step, column)
                    within = None
                    if check != "ratios" and undecided.any():
                        allowed = 0.0 if check == "masks" else ROUNDING * (1 + np.abs(recorded))
                        within = np.where(undecided, np.inf, allowed)
                    self._of(check, column, ROUNDING if check != "masks" else 0, _LOSS_HINT).add(
                        number, recorded, recomputed[column], name, within=within
                    )
        rollouts = self.run.rollouts(number)
        self._check_advantages(number, step, rollouts)
        self._check_levels(number, step)
        self._check_rate(number)
        return {**recomputed, **self._check_weights(number, step)}

    def _follows_from_logprobs(self, number: int, step: ColumnBatch) -> list[tuple[str, tuple[str, ...]]]:
        """Checks, and the columns that each compares."""
        ratios = ("ratios", RATIOS)
        if self.run.at(number).loss is None and (modes_of(step) == TrainingMode.RL.value).any():
            why = self.run.at(number).no_loss
            self._note(f"masks and token losses were not recomputed: {why}")
            return [ratios]
        return [ratios, ("masks", MASKS), ("losses", ("token_loss",))]

    def _check_sums(self, number: int, step: ColumnBatch) -> None:
        if "denominator" not in step.columns:
            return
        denominator = step.columns["denominator"][0]
        total = max(1, int(num_trainable(step).sum()))
        self._trainable.add(
            number,
            np.array([denominator], np.float64),
            np.array([total], np.float64),
            lambda index: "trainable tokens of all records",
        )
        logged = self.run.logged_losses.get(number)
        if logged is None:
            why = self.run.recorded.no_sum or "metrics/trainer.jsonl does not have it"
            self._note(f"the loss was not compared: {why}")
        elif "token_loss" not in step.columns or np.isnan(step.columns["token_loss"]).all():
            self._note("the logged loss was not compared: the export has no token losses")
        else:
            losses = step.columns["token_loss"].astype(np.float64)
            exported = float(losses.sum()) / denominator
            # Other trainers add up in float32, where rounding is relative to the terms and not to their sum.
            scale = float(np.abs(losses).sum()) / denominator if self.run.is_foreign else abs(exported)
            self._loss.add(number, exported, logged, scale)

    def _check_levels(self, number: int, step: ColumnBatch) -> None:
        """Holds the versions of the exported tokens to the bound on their age, and to what was logged."""
        if self.run.is_foreign or not {"policy_versions", "sampled"} <= step.columns.keys():
            return
        levels = levels_of(step, number)
        ours = levels[~np.isnan(levels)]
        orchestrator, logged = self.run.at(number).orchestrator, self.run.logged_levels.get(number)
        if orchestrator is not None and len(ours):
            allowed = np.clip(levels, 0, orchestrator.max_off_policy_steps)
            self._of("off-policy", "levels within orchestrator.max_off_policy_steps", 0, _LEVEL_HINT).add(
                number, levels, allowed, token_name(step)
            )
        # Otherwise tokens were left out of the export: cut off, or of sequences that do not train.
        if logged is not None and len(ours) and logged.batch_tokens == len(levels):
            self._of("off-policy", "mean and largest level", ROUNDING, _LEVEL_HINT, of="batches").add(
                number,
                np.array([logged.mean, logged.highest]),
                np.array([ours.mean(), ours.max()]),
                lambda index: ("off_policy_level/all/mean", "off_policy_level/all/max")[index],
            )

    def _check_books(self, number: int, step: ColumnBatch) -> None:
        """Holds what the trainer booked of a step to the masks of its tokens, by run and environment."""
        booked = self.run.booked.get(number)
        is_alone = number == 0 or number - 1 in self.run.booked  # else it may stand for the steps before it
        needed = {"sampled", "is_masked", "denominator", "env_name", "run_id"}
        if booked is None or not is_alone or self.run.is_foreign or not needed <= step.columns.keys():
            return
        trains = step.columns["loss_mask"].astype(np.bool_)
        if max(1, int(trains.sum())) != step.columns["denominator"][0]:
            return  # tokens were left out of the export
        trainable = trains & step.columns["sampled"].astype(np.bool_)
        masked = trains & (step.columns["is_masked"] == 1)
        owners = list(zip(step.columns["run_id"].tolist(), step.columns["env_name"].tolist(), strict=True))
        names, recorded, expected = [], [], []
        for account in dict.fromkeys(owners):
            own = np.array([owner == account for owner in owners])[step.owners]
            counts = booked.get(account, {})
            num_skipped = counts.get(State.SKIPPED, 0)
            num_masked = 0 if num_skipped else int((masked & own).sum())
            names += [f"{account[1]}, {state.value}" for state in (State.MASKED, State.TRAINED)]
            recorded += [counts.get(State.MASKED, 0), counts.get(State.TRAINED, 0)]
            expected += [num_masked, int((trainable & own).sum()) - num_skipped - num_masked]
        self._of("ledger", "trained and masked tokens", 0, _LEDGER_HINT, of="counts").add(
            number, np.array(recorded, np.float64), np.array(expected, np.float64), names.__getitem__
        )

    def _check_rate(self, number: int) -> None:
        run, logged = self.run.at(number), self.run.logged_rates.get(number)
        expected = expected_rate(run, number)
        if logged is not None and expected is not None:
            self._of("learning rate", "lr", 0, _RATE_HINT, of="steps").add(
                number,
                np.array([logged]),
                np.array([expected]),
                lambda index: "as logged",
                within=np.array([ROUNDING * run.trainer.optim.lr]),
            )

    def _check_advantages(
        self, number: int, step: ColumnBatch, rollouts: Sequence[Mapping[str, Any]]
    ) -> None:
        orchestrator = self.run.at(number).orchestrator
        if orchestrator is None or not rollouts or "rollout_id" not in step.columns:
            self._note("advantages were not recomputed: no rollouts were saved")
            return
        self._check_rewards(number, step, rollouts)
        try:
            untrusted = self.run.untrusted(orchestrator.advantage, "orchestrator.advantage")
            if reason := untrusted or not_replayable(rollouts, orchestrator.advantage):
                raise DataError(reason)
            found = judge_advantages(rollouts, orchestrator.advantage)
        except (ConfigError, DataError) as error:
            self._note(f"advantages were not recomputed: {error}")
            return
        saved = [rollout for rollout in rollouts if rollout["rollout_id"] in found]
        self._of("advantages", "advantage", ROUNDING, _ADVANTAGE_HINT, of="rollouts").add(
            number,
            np.array([rollout["advantage"] for rollout in saved]),
            np.array([found[rollout["rollout_id"]] for rollout in saved]),
            lambda index: f"group {saved[index]['group_id']}, rollout {saved[index]['rollout_id']}",
        )
        self._check_repeated(number, step, "advantages", "advantage", found, _ADVANTAGE_HINT)

    def _check_rewards(self, number: int, step: ColumnBatch, rollouts: Sequence[Mapping[str, Any]]) -> None:
        saved = {each["rollout_id"]: each.get("reward") for each in rollouts}
        known = {rollout: float(reward) for rollout, reward in saved.items() if reward is not None}
        self._check_repeated(number, step, "rewards", "reward", known, _REWARD_HINT)

    def _check_repeated(
        self,
        number: int,
        step: ColumnBatch,
        tokens: str,
        record: str,
        known: Mapping[str, float],
        hint: str,
    ) -> None:
        """Compares a number of each rollout with that of its records, and of all tokens of these."""
        ids = step.columns["rollout_id"].tolist()
        rows = [
            row
            for row, rollout in enumerate(ids)
            if rollout in known and not np.isnan(step.columns[record][row])
        ]
        expected = np.array([known.get(rollout, np.nan) for rollout in ids], np.float64)
        self._of(tokens, record, ROUNDING, hint, of="records").add(
            number, step.columns[record][rows], expected[rows], lambda index: record_name(step, rows[index])
        )
        if tokens in step.columns:
            places = np.flatnonzero(np.isin(step.owners, rows))
            self._of(tokens, tokens, ROUNDING, hint).add(
                number,
                _floats(step, tokens)[places],
                expected[step.owners[places]],
                lambda index: token_name(step)(int(places[index])),
            )

    def _check_weights(self, number: int, step: ColumnBatch) -> dict[str, Values]:
        if self.predictor is None or "temperatures" not in step.columns:
            return {}
        try:
            predicted = self.predictor.predict(number, step)
        except PellucidError as error:
            self._note(f"logprobs were not recomputed: {error}")
            self.predictor = None
            return {}
        for column, (values, bounds) in (predicted or {}).items():
            recorded, of = step.columns[column], "tokens of steps with weights"
            is_known = np.isfinite(recorded)
            if not is_known.any():  # another trainer without entropy
                continue
            # Another trainer may not have computed those of prompts.
            expected = np.where(is_known | step.columns["loss_mask"], values, np.nan)
            self._of("weights", column, 0, _WEIGHTS_HINT, of=of).add(
                number, recorded, expected, token_name(step), within=bounds
            )
        return {column: each.values for column, each in (predicted or {}).items()}

    def _of(self, check: str, column: str, tolerance: float, hint: str, *, of: str = "tokens") -> Comparison:
        known = Comparison(check, column, tolerance, of, hint)
        return self._comparisons.setdefault(f"{check} {column} {of}", known)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def findings(self) -> list[Finding]:
        """The findings in the order in which a token meets what they are about."""
        found = [comparison.finding() for comparison in self._comparisons.values()]
        if self._trainable.num_compared:
            found.append(self._trainable.finding())
        if self._loss.num_steps:
            found.append(self._loss.finding())
        return sorted(found, key=lambda finding: STAGES.index(finding.check))


def _floats(step: ColumnBatch, column: str) -> Values:
    return step.columns[column].astype(np.float64)


def open_predictor(run: RecordedRun, say: Callable[[str], object]) -> "Predictor | None":
    """The run's model, if it can be loaded here."""
    if run.folder is None or run.model is None:
        return None
    if run.trainer.enable_router_replay:
        say("logprobs were not recomputed: the experts that were replayed are not in the export")
        return None
    from pellucid.checks.replay.weights import Predictor  # and transformers: seconds, which --weights costs

    try:
        return Predictor(run.folder, run.model, run.trainer.max_tokens)
    except (ModelError, ConfigError) as error:
        say(f"logprobs were not recomputed: {error}")
        return None


def read_steps(run: RecordedRun, steps: Sequence[int]) -> Iterator[tuple[int, ColumnBatch]]:
    names = [each.name for each in FIELDS if each.name != "role_spans"]
    for number in steps:
        yield number, run.export.step(number).batch(names)
