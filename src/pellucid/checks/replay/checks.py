"""A run against itself: what follows from the record has to be in the record."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pellucid.checks.finding import COUNTS, Finding
from pellucid.checks.oracle.training import learning_rate
from pellucid.checks.replay.recompute import (
    MASKS,
    NEEDED,
    RATIOS,
    judge_advantages,
    judge_losses,
    modes_of,
    num_trainable,
)
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.data import NOT_OURS, TrainingMode
from pellucid.data.table import TokenTable, Values
from pellucid.errors import ConfigError, DataError, PellucidError
from pellucid.ledger import State

if TYPE_CHECKING:
    from pellucid.checks.replay.weights import Predictor

ROUNDING = 1e-5
LOSS = 1e-6

_LOSS_HINT = (
    "the recorded values do not follow from the recorded logprobs and advantages under the run's own "
    "[trainer.loss]: it was changed since, or what is exported is not what the loss did"
)
STAGES: Mapping[str, str] = {
    "off-policy": "the versions of exported tokens do not fit the step that trained them, or what was logged "
    "of them: stale tokens were trained, or versions were lost on the way",
    "rewards": "the batch had another reward for this rollout than was saved with it, or the export repeats "
    "it wrongly",
    "advantages": "rewards or the group's members changed after the advantages were computed, or "
    "[orchestrator.advantage] is not what the run had",
    "weights": "the weights of the step do not give the recorded logprobs: they are of another step, or the "
    "forward has changed",
    "ratios": _LOSS_HINT,
    "masks": _LOSS_HINT,
    "losses": _LOSS_HINT,
    "ledger": "the trainer booked other tokens than its export shows, or logged others than it booked: the "
    "ledger does not tell where they went",
    "record": _LOSS_HINT,
    "loss": "Tokens are missing from the export, or carry another loss than was optimised",
    "learning rate": "the learning rate is not that of [trainer.optim] and [trainer.scheduler] at this step: "
    "the schedule started again, or other settings were used",
}
"""Checks in the order in which a token meets what they are about, and what a difference means."""

Numbers = Values | Sequence[float]
Name = Callable[[int], str]
"""From the index of a value to what it is called."""


@dataclass(slots=True)
class Comparison:
    """One field over any number of steps: how many values differ, and which one is the first."""

    check: str
    column: str
    unit: str
    num_compared: int = 0
    num_different: int = 0
    first: str | None = None

    def add(
        self, step: int, recorded: Numbers, recomputed: Numbers, name: Name, tolerance: float | Values
    ) -> None:
        """Compares values; NaN stands for null, and what is not finite is null in an export.

        A number as tolerance is absolute, and relative to the recorded value; an array bounds each value.
        """
        self.num_compared += len(recorded)
        recorded, recomputed = (np.where(np.isfinite(v), v, np.nan) for v in (recorded, recomputed))
        is_bound = isinstance(tolerance, np.ndarray)
        allowed: Values = np.asarray(tolerance if is_bound else tolerance * (1 + np.abs(recorded)))
        is_near = np.abs(recorded - recomputed) <= allowed
        different = np.flatnonzero(~(is_near | (np.isnan(recorded) & np.isnan(recomputed))))
        self.num_different += len(different)
        if self.first is None and len(different):
            index = int(different[0])
            shown = ["null" if np.isnan(v[index]) else f"{v[index]:.9g}" for v in (recorded, recomputed)]
            self.first = f"step {step}, {name(index)}: recorded {shown[0]}, recomputed {shown[1]}"
            if is_bound:
                self.first += f", rounding explains {allowed[index]:.2g}"

    def finding(self) -> Finding:
        what = f"{self.column} of {self.num_compared:,} {self.unit}: those that differ"
        meaning = f"first: {self.first}. {STAGES[self.check]}"
        return Finding(self.check, what, self.num_different, 0, meaning)


def record_name(step: TokenTable, row: int) -> str:
    rank = int(step["rank"][row]) if "rank" in step else 0
    index = int(step["export_sequence_idx"][row]) if "export_sequence_idx" in step else row
    rollout = step["rollout_id"][row] if "rollout_id" in step else None
    return f"rank {rank}, sequence {index}" + (f" (rollout {rollout})" if rollout else "")


def token_name(step: TokenTable) -> Name:
    """`rank 0, sequence 3 (rollout a1), token 17`."""

    def name(token: int) -> str:
        row = int(step.owners[token])
        return f"{record_name(step, row)}, token {token - int(step.token_offsets[row])}"

    return name


class Checks:
    """Compares step after step; `notes` tell which checks could not be made, and why."""

    def __init__(self, run: RecordedRun, predictor: "Predictor | None", notes: list[str]) -> None:
        self.run = run
        self.predictor = predictor
        self.notes = notes
        self._comparisons: dict[tuple[str, str, str], Comparison] = {}
        self._losses: list[tuple[float, str]] = []
        """Relative difference of each step's loss from the logged one, and both values."""
        self._number = 0
        """The step that is compared."""

    def add(self, number: int, step: TokenTable) -> dict[str, Values]:
        """Compares one step; returns what was recomputed."""
        self._number = number
        recomputed: dict[str, Values] = {}
        missing = [column for column in NEEDED if column not in step]
        if missing:
            self._note(f"losses were not recomputed: the export lacks {', '.join(missing)}")
        else:
            self._check_sums(number, step)
            self._check_books(number, step)
            recomputed = self._check_losses(number, step)
        self._check_rollouts(number, step)
        self._check_levels(number, step)
        self._check_rate(number)
        self._check_counts(number)
        return {**recomputed, **self._check_weights(number, step)}

    def _compare(
        self,
        check: str,
        column: str,
        recorded: Numbers,
        recomputed: Numbers,
        name: Name,
        *,
        tolerance: float | Values = ROUNDING,
        unit: str = "tokens",
    ) -> None:
        known = self._comparisons.setdefault((check, column, unit), Comparison(check, column, unit))
        known.add(self._number, recorded, recomputed, name, tolerance)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _check_sums(self, number: int, step: TokenTable) -> None:
        if "denominator" not in step:
            return
        denominator = step["denominator"][0]
        total = max(1, int(num_trainable(step).sum()))
        names = ("trainable tokens of all records",).__getitem__
        self._compare("record", "denominator", [denominator], [total], names, tolerance=0.0, unit="steps")
        logged = self.run.logged_steps.get(number)
        if logged is None:
            why = self.run.recorded.no_sum or "metrics/trainer.jsonl does not have it"
            self._note(f"the loss was not compared: {why}")
        elif "token_loss" not in step or np.isnan(step["token_loss"]).all():
            self._note("the logged loss was not compared: the export has no token losses")
        else:
            losses = step["token_loss"].astype(np.float64)
            exported = float(losses.sum()) / denominator
            # Other trainers add up in float32, where rounding is relative to the terms and not to their sum.
            scale = float(np.abs(losses).sum()) / denominator if self.run.is_foreign else abs(exported)
            are_finite = math.isfinite(exported), math.isfinite(logged.loss)
            gap = math.inf if any(are_finite) else 0.0
            if all(are_finite):
                gap = abs(exported - logged.loss) / max(scale, 1e-12)
            self._losses.append((gap, f"step {number}: {exported:.9g} exported, {logged.loss:.9g} logged"))

    def _check_losses(self, number: int, step: TokenTable) -> dict[str, Values]:
        """Holds ratios, masks and token losses to what follows from the logprobs; returns these."""
        run = self.run.at(number)
        recomputed, undecided = judge_losses(step, run.loss)
        checks: dict[str, tuple[str, ...]] = {"ratios": RATIOS, "masks": MASKS, "losses": ("token_loss",)}
        if run.loss is None and (modes_of(step) == TrainingMode.RL.value).any():
            self._note(f"masks and token losses were not recomputed: {run.no_loss}")
            checks = {"ratios": RATIOS}
        for check, columns in checks.items():
            for column in (column for column in columns if column in step):
                recorded = _floats(step, column)
                tolerance: float | Values = 0.0 if check == "masks" else ROUNDING
                if check != "ratios" and undecided.any():
                    tolerance = np.where(undecided, np.inf, tolerance * (1 + np.abs(recorded)))
                name = token_name(step)
                self._compare(check, column, recorded, recomputed[column], name, tolerance=tolerance)
        return recomputed

    def _check_levels(self, number: int, step: TokenTable) -> None:
        """Holds the versions of the exported tokens to the bound on their age, and to what was logged."""
        if self.run.is_foreign or not {"policy_versions", "sampled"} <= step.columns.keys():
            return
        versions = _floats(step, "policy_versions")
        is_ours = step["sampled"].astype(bool) & (versions != NOT_OURS)
        levels = np.where(is_ours, number - versions, np.nan)
        ours = levels[~np.isnan(levels)]
        orchestrator, logged = self.run.at(number).orchestrator, self.run.logged_levels.get(number)
        if orchestrator is not None and len(ours):
            what = "levels within orchestrator.max_off_policy_steps"
            allowed = np.clip(levels, 0, orchestrator.max_off_policy_steps)
            self._compare("off-policy", what, levels, allowed, token_name(step), tolerance=0.0)
        # Otherwise tokens were left out of the export: cut off, or of sequences that do not train.
        if logged is not None and len(ours) and logged.batch_tokens == len(levels):
            names = ("off_policy_level/all/mean", "off_policy_level/all/max")
            recorded, found = [logged.mean, logged.highest], [ours.mean(), ours.max()]
            what = "mean and largest level"
            self._compare("off-policy", what, recorded, found, names.__getitem__, unit="batches")

    def _check_books(self, number: int, step: TokenTable) -> None:
        """Holds what the trainer booked of a step to the masks of its tokens, by run and environment."""
        booked = self.run.booked.get(number)
        is_alone = number == 0 or number - 1 in self.run.booked  # else it may stand for the steps before it
        needed = {"sampled", "is_masked", "denominator", "env_name", "run_id"}
        if booked is None or not is_alone or self.run.is_foreign or not needed <= step.columns.keys():
            return
        trains = step["loss_mask"].astype(np.bool_)
        if max(1, int(trains.sum())) != step["denominator"][0]:
            return  # tokens were left out of the export
        trainable = trains & step["sampled"].astype(np.bool_)
        masked = trains & (step["is_masked"] == 1)
        accounts = list(zip(step["run_id"].tolist(), step["env_name"].tolist(), strict=True))
        names, recorded, expected = [], [], []
        for account in dict.fromkeys(accounts):
            is_theirs = np.array([each == account for each in accounts])[step.owners]
            counts = booked.get(account, {})
            num_skipped = counts.get(State.SKIPPED, 0)
            num_masked = 0 if num_skipped else int((masked & is_theirs).sum())
            names += [f"{account[1]}, {state.value}" for state in (State.MASKED, State.TRAINED)]
            recorded += [counts.get(State.MASKED, 0), counts.get(State.TRAINED, 0)]
            expected += [num_masked, int((trainable & is_theirs).sum()) - num_skipped - num_masked]
        what, name = "trained and masked tokens", names.__getitem__
        self._compare("ledger", what, recorded, expected, name, tolerance=0.0, unit="counts")

    def _check_counts(self, number: int) -> None:
        """Holds the counts that the trainer logged of a step to its ledger, and running totals to the sum."""
        logged, booked = self.run.logged_steps.get(number), self.run.booked.get(number)
        if logged is None or self.run.is_foreign or self.run.at(number).orchestrator is None:
            return
        names = [name for name in COUNTS if {name, f"total/{name}"} <= logged.counts.keys()]
        counts = [logged.counts[name] for name in names]

        def compare(what: str, recorded: Sequence[float], expected: Sequence[float]) -> None:
            self._compare("ledger", what, recorded, expected, names.__getitem__, tolerance=0.0, unit="counts")

        if booked is not None and (number == 0 or number - 1 in self.run.booked):
            tokens = sum((Counter(each) for each in booked.values()), Counter[str]())
            known = [sum(tokens[part] for part in COUNTS[name]) for name in names]
            compare("logged counts of tokens", counts, known)
        before = self.run.logged_steps.get(number - 1)
        if number == 0 or before is not None:
            so_far = {} if before is None else before.counts
            sums = [so_far.get(f"total/{name}", 0) + each for name, each in zip(names, counts, strict=True)]
            compare("running totals of tokens", [logged.counts[f"total/{name}"] for name in names], sums)

    def _check_rate(self, number: int) -> None:
        """Holds the logged learning rate to the oracle's, where the settings are known."""
        run, logged = self.run.at(number), self.run.logged_steps.get(number)
        if logged is None or logged.lr is None or run.is_foreign or run.max_steps is None:
            return
        optim, scheduler = run.trainer.optim, run.trainer.scheduler
        expected = learning_rate(
            number,
            peak=optim.lr,
            kind=scheduler.type,
            warmup_steps=scheduler.warmup_steps,
            max_steps=run.max_steps,
        )
        bound, name = np.array([ROUNDING * optim.lr]), ("as logged",).__getitem__
        self._compare("learning rate", "lr", [logged.lr], [expected], name, tolerance=bound, unit="steps")

    def _check_rollouts(self, number: int, step: TokenTable) -> None:
        """Holds rewards and advantages to the saved rollouts."""
        orchestrator, rollouts = self.run.at(number).orchestrator, self.run.rollouts(number)
        if orchestrator is None or not rollouts or "rollout_id" not in step:
            self._note("advantages were not recomputed: no rollouts were saved")
            return
        rewards = {
            each["rollout_id"]: float(each["reward"]) for each in rollouts if each.get("reward") is not None
        }
        self._check_repeated(step, "rewards", "reward", rewards)
        try:
            if reason := self.run.untrusted(orchestrator.advantage, "orchestrator.advantage"):
                raise DataError(reason)
            found = judge_advantages(rollouts, orchestrator.advantage)
        except (ConfigError, DataError) as error:
            self._note(f"advantages were not recomputed: {error}")
            return
        saved = [each for each in rollouts if each["rollout_id"] in found]
        names = [f"group {each['group_id']}, rollout {each['rollout_id']}" for each in saved]
        recorded = [each["advantage"] for each in saved]
        expected = [found[each["rollout_id"]] for each in saved]
        self._compare("advantages", "advantage", recorded, expected, names.__getitem__, unit="rollouts")
        self._check_repeated(step, "advantages", "advantage", found)

    def _check_repeated(self, step: TokenTable, tokens: str, record: str, known: Mapping[str, float]) -> None:
        """Compares a number of each rollout with that of its records, and of all tokens of these."""
        ids, recorded = step["rollout_id"].tolist(), step[record]
        rows = [row for row, each in enumerate(ids) if each in known and not np.isnan(recorded[row])]
        expected = np.array([known.get(rollout, np.nan) for rollout in ids], np.float64)

        def name_record(index: int) -> str:
            return record_name(step, rows[index])

        self._compare(tokens, record, recorded[rows], expected[rows], name_record, unit="records")
        if tokens in step:
            places = np.flatnonzero(np.isin(step.owners, rows))
            found = _floats(step, tokens)[places]

            def name_token(index: int) -> str:
                return token_name(step)(int(places[index]))

            self._compare(tokens, tokens, found, expected[step.owners[places]], name_token)

    def _check_weights(self, number: int, step: TokenTable) -> dict[str, Values]:
        if self.predictor is None or "temperatures" not in step:
            return {}
        if "mm_token_type_ids" in step and step["mm_token_type_ids"].any():
            self._note(f"logprobs of step {number} were not recomputed: it has images, and exports no pixels")
            return {}
        try:
            predicted = self.predictor.predict(number, step) or {}
        except PellucidError as error:
            self._note(f"logprobs were not recomputed: {error}")
            self.predictor = None
            return {}
        for column, (values, bounds) in predicted.items():
            recorded, unit = step[column], "tokens of steps with weights"
            is_known = np.isfinite(recorded)
            if is_known.any():  # else another trainer without entropy
                # Another trainer may not have computed those of prompts.
                expected = np.where(is_known | step["loss_mask"], values, np.nan)
                name = token_name(step)
                self._compare("weights", column, recorded, expected, name, tolerance=bounds, unit=unit)
        return {column: each.values for column, each in predicted.items()}

    def findings(self) -> list[Finding]:
        """The findings in the order in which a token meets what they are about."""
        found = [comparison.finding() for comparison in self._comparisons.values()]
        if self._losses:
            worst, where = max(self._losses, key=lambda each: each[0])
            what = (
                f"sum of token losses ÷ denominator against the logged loss, {len(self._losses):,} steps: "
                "largest relative difference"
            )
            found.append(Finding("loss", what, worst, LOSS, f"{where}. {STAGES['loss']}"))
        return sorted(found, key=lambda finding: list(STAGES).index(finding.check))


def _floats(step: TokenTable, column: str) -> Values:
    return step[column].astype(np.float64)
