"""`verify` holds the real path to the oracle: a planted fault is caught, and its stage named."""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from msgspec import structs

from pellucid import checkpoint
from pellucid.checks.finding import STAGES, Differences
from pellucid.checks.oracle.training import ReferenceModel, ReferenceSequence, ReferenceStep
from pellucid.checks.verify import agreement, path, scenario, subject
from pellucid.checks.verify.rollout_stages import ExpectedRun, check_rollouts, group_of
from pellucid.checks.verify.scenario import NUM_STEPS, play
from pellucid.checks.verify.schedule import check_schedule
from pellucid.checks.verify.training_stages import trained_weights
from pellucid.config import VerifyConfig
from pellucid.data import Rollout, TokenTable
from pellucid.export import TokenExporter
from pellucid.inference import engine
from pellucid.ledger import Flow, Journal, LedgerEntry, State, journal
from pellucid.loss import functions
from pellucid.loss.record import LossInputs, LossRecord
from pellucid.model.adapter import Adapter
from pellucid.model.policy import Policy
from pellucid.orchestrator import advantage, chat, records, scheduler, session, verdict
from pellucid.trainer import observer, optimizer, run, saver
from pellucid.trainer.optimizer import Optimizer
from pellucid.trainer.run import Run
from pellucid.trainer.step import LossResult
from pellucid.transport import weights

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@pytest.fixture(scope="module")
def opened(tiny_model: Path) -> Iterator[subject.Subject]:
    config = VerifyConfig.model_validate(
        {
            "model": {"name": str(tiny_model)},
            "seq_len": 512,
            "trainer": {"threads": 1},
            "orchestrator": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 16}},
        }
    )
    with subject.opened(config) as own:
        yield own


class RememberingModel(ReferenceModel):
    """Computes a step once, as most planted faults leave the weights of the first steps as they are."""

    steps: ClassVar[dict[bytes, ReferenceStep]] = {}

    def step(self, sequences: Sequence[ReferenceSequence], loss: Any, reduction: str) -> ReferenceStep:
        digest = hashlib.sha256(repr((loss, reduction, sequences)).encode())
        for value in self.parameters.values():
            digest.update(value.numpy().tobytes())
        key = digest.digest()
        if key not in self.steps:
            self.steps[key] = super().step(sequences, loss, reduction)
        return self.steps[key]


@dataclass
class Sound:
    """A scenario that nothing is wrong with, and the oracle's model before the first step."""

    opened: subject.Subject
    model: ReferenceModel
    initial: dict[str, torch.Tensor]
    expected: ExpectedRun
    played_in: Path

    def of_rollouts(self, folder: Path) -> Differences:
        """Plays the scenario again, and holds what the orchestrator made of it."""
        self.model.parameters = dict(self.initial)
        differences = Differences()
        played = play(self.opened.config, folder, self.opened.tokenizer, self.model)
        check_rollouts(ExpectedRun(played, self.opened.tokenizer), differences)
        return differences

    def of_training(self, folder: Path) -> Differences:
        """Trains on the batches of the sound scenario again."""
        self.model.parameters = dict(self.initial)
        differences = Differences()
        path.check_training(self.opened.config, self.expected, self.model, folder, differences)
        return differences


@pytest.fixture(scope="module")
def sound(opened: subject.Subject, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("sound")
    model = RememberingModel(opened.config.model.name, trained_weights(opened.run))
    initial = dict(model.parameters)
    expected = ExpectedRun(play(opened.config, folder, opened.tokenizer, model), opened.tokenizer)
    return Sound(opened, model, initial, expected, folder)


def first_difference(differences: Differences) -> str | None:
    """The stage that is named as the first one; None if all agree."""
    failed = [finding for finding in differences.findings() if not finding.passed]
    named = [finding for finding in failed if finding.meaning.startswith("the first stage that differs")]
    assert len(named) == bool(failed)
    return named[0].what.partition(":")[0] if named else None


def test_a_sound_path_agrees_in_every_stage(opened: subject.Subject) -> None:
    findings = list(path.check_oracle(opened))
    assert [finding.meaning for finding in findings if not finding.passed] == []
    assert [finding.what.partition(":")[0] for finding in findings] == list(STAGES)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "model": {"lora": {"rank": 4}},
            "trainer": {
                "loss": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1},
                "optim": {"betas": [0.8, 0.95], "weight_decay": 0.1},
                "scheduler": {"type": "cosine", "warmup_steps": 2},
            },
        },
        {
            "trainer": {
                "loss": {"type": "cispo", "reduction": "group", "kl_tau": 0.1},
                "scheduler": {"type": "linear"},
                "share_prompts": False,
                "model": {"activation_checkpointing": True},
            },
            "orchestrator": {"advantage": {"type": "grpo_std"}, "filter_zero_advantages": False},
        },
        {
            "trainer": {"loss": {"type": "custom", "import_path": "pellucid.loss:sft_loss"}},
            "orchestrator": {
                "advantage": {
                    "type": "default",
                    "length_penalty": {"type": "tokens", "tool_response_weight": 3.0},
                },
                "pace_sampling": True,
            },
        },
    ],
    ids=["gspo, adapter, cosine", "cispo, groups, linear", "custom loss, length penalty, paced"],
)
def test_other_settings_agree(opened: subject.Subject, settings: dict[str, Any]) -> None:
    own = opened.config
    merged = {
        "model": {"name": own.model.name, **settings.get("model", {})},
        "seq_len": 72,  # shorter than a sample of several turns
        "trainer": {"threads": 1, **settings["trainer"]},
        "orchestrator": {"env": [{"id": "reverse-text"}], **settings.get("orchestrator", {})},
    }
    with subject.opened(VerifyConfig.model_validate(merged)) as other:
        findings = list(path.check_oracle(other))
    held = [finding for finding in findings if finding.is_held]
    assert [finding.meaning for finding in held if not finding.passed] == []
    assert [finding.what.partition(":")[0] for finding in held] == list(STAGES)
    is_custom = settings["trainer"]["loss"]["type"] == "custom"
    assert ["pellucid.loss:sft_loss" in finding.meaning for finding in findings if not finding.is_held] == (
        [True] if is_custom else []
    )


def test_an_adapter_that_does_not_start_from_the_seed(opened: subject.Subject, monkeypatch: Patch) -> None:
    original = Adapter.reset
    monkeypatch.setattr(Adapter, "reset", lambda self, seed: original(self, seed + 1))
    settings = {
        "model": {"name": opened.config.model.name, "lora": {"rank": 4}},
        "trainer": {"threads": 1},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    with subject.opened(VerifyConfig.model_validate(settings)) as other:
        failed = [finding for finding in path.check_oracle(other) if not finding.passed]
    assert failed[0].meaning.startswith("the first stage that differs: start, base_model.")


def test_a_model_with_experts_agrees(tiny_moe: Path) -> None:
    settings = {"model": {"name": str(tiny_moe)}, "trainer": {"threads": 1}}
    with subject.opened(VerifyConfig.model_validate(settings)) as opened:
        findings = list(path.check_oracle(opened))
    assert [finding.meaning for finding in findings if not finding.passed] == []


def test_the_scenario_has_a_sample_of_every_kind(sound: Sound) -> None:
    """Else the checks would agree on nothing but the usual."""
    expected = sound.expected
    sound.model.parameters = dict(sound.initial)
    kinds = set()
    for number in range(NUM_STEPS + 1):
        sequences = expected.sequences(number, expected.seq_len)
        loss = sound.opened.config.trainer.loss.model_dump()
        result = sound.model.step(list(sequences.values()), loss, "token")
        for (rollout_id, sample), each, losses in zip(
            sequences, sequences.values(), result.losses, strict=True
        ):
            rollout = expected.rollouts[rollout_id]
            kinds |= {rollout.env_name, each.mode}
            kinds |= {"branch"} if sample else set()
            is_cut = len(each.token_ids) < len(rollout.samples[sample].token_ids)
            kinds |= {"truncated"} if is_cut and each.trainable.any() else set()
            if each.mode == "rl":
                kinds |= {"masked high"} if losses.is_masked_high.any() else set()
                kinds |= {"masked low"} if losses.is_masked_low.any() else set()
            kinds |= {"untrainable"} if not each.trainable.any() else set()
            versions = {version for version in rollout.samples[sample].versions if version >= 0}
            kinds |= {"of two versions"} if len(versions) > 1 else set()
            kinds |= {"off-policy"} if number < NUM_STEPS and min(versions) < number else set()
    kinds |= {
        "no signal" for each in expected.rollouts.keys() - expected.failed if expected.advantage(each) == 0
    }
    kinds |= {"resumed" for each in expected.rollouts if ".1-" in each}
    kinds |= {str(each["outcome"]) for each in expected.played.settled if each["outcome"] == "stale"}
    kinds |= {
        "member of a failed one"
        for each in expected.failed
        if any(group_of(each) == group_of(other) for other in expected.rollouts.keys() - expected.failed)
    }
    assert kinds == {
        "answer", "tools", "branch", "truncated", "masked high", "masked low", "untrainable", "no signal",
        "fragile", "member of a failed one", "resumed", "of two versions", "off-policy", "stale", "rl", "opd",
        "sft",
    }  # fmt: skip


def wrong_sign(patch: Patch) -> None:
    loss = functions.dppo_loss

    def flipped(inputs: LossInputs, config: Any) -> LossRecord:
        record = loss(inputs, config)
        return replace(record, token_loss=-record.token_loss)

    patch.setitem(functions.RL_LOSSES, "dppo", flipped)


def swapped_sides(patch: Patch) -> None:
    loss = functions.dppo_loss

    def swapped(inputs: LossInputs, config: Any) -> LossRecord:
        record = loss(inputs, config)
        return replace(record, is_masked_high=record.is_masked_low, is_masked_low=record.is_masked_high)

    patch.setitem(functions.RL_LOSSES, "dppo", swapped)


def twice_the_loss(patch: Patch) -> None:
    original = Run.loss

    def doubled(self: Run, *arguments: Any) -> LossResult:
        result = original(self, *arguments)
        return result._replace(loss=2 * result.loss)

    patch.setattr(Run, "loss", doubled)


def never_cleared(patch: Patch) -> None:
    patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


def tenfold_rate(patch: Patch) -> None:
    original = torch.optim.AdamW.step

    def faster(self: Any, closure: None = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 10
        original(self)

    patch.setattr(torch.optim.AdamW, "step", faster)


def no_clipping(patch: Patch) -> None:
    patch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *arguments: None)


def frozen_layer(patch: Patch) -> None:
    original = Optimizer.__init__

    def freeze(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".layers.0." in name:
                parameter.requires_grad_(False)
        original(self, model, *arguments, **keywords)

    patch.setattr(Optimizer, "__init__", freeze)


def end_of_turn_untrained(patch: Patch) -> None:
    original = verdict._token_columns

    def without_ends(turns: Any) -> dict[str, Any]:
        columns = original(turns)
        spans = [(turn.num_prompt_tokens, turn.num_tokens - 1) for turn in turns if turn.trainable]
        size = len(columns["token_ids"])
        return {**columns, "loss_mask": verdict.PackedArray.of_spans(spans, size)}

    patch.setattr(verdict, "_token_columns", without_ends)


def half_centred(patch: Patch) -> None:
    original = advantage.Groups.mean
    patch.setattr(advantage.Groups, "mean", lambda self, values: 0.5 * original(self, values))


def last_tokens_kept(patch: Patch) -> None:
    original = TokenTable.truncate

    def keep_the_end(table: TokenTable, length: int) -> TokenTable:
        cut = original(table, length)
        ids = cut["token_ids"].copy()
        for row in np.flatnonzero(table.lengths > length).tolist():
            stop = table.token_offsets[row + 1]
            own = slice(cut.token_offsets[row], cut.token_offsets[row + 1])
            ids[own] = table["token_ids"][stop - length : stop]
        return TokenTable(cut.lengths, {**{name: cut[name] for name in cut.columns}, "token_ids": ids})

    patch.setattr(TokenTable, "truncate", keep_the_end)


def another_temperature(patch: Patch) -> None:
    original = Policy.forward

    def without(self: Any, ids: Any, positions: Any, temperatures: Any, *rest: Any) -> Any:
        return original(self, ids, positions, torch.ones_like(temperatures), *rest)

    patch.setattr(Policy, "forward", without)


def stale_publication(patch: Patch) -> None:
    kept: dict[str, torch.Tensor] = {}
    original = optimizer.TrainedWeights.take

    def first_only(self: Any, dtype: torch.dtype | None = None) -> Any:
        own = dict(self.policy.named_parameters())
        now = {name: parameter.detach().clone() for name, parameter in own.items()}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(kept.setdefault(name, now[name]))
            write = original(self, dtype)
            for name, parameter in own.items():
                parameter.copy_(now[name])
        return write

    patch.setattr(optimizer.TrainedWeights, "take", first_only)


def buffers_published(patch: Patch) -> None:
    """Files of weights have what a model computes anew whenever it is loaded, too."""
    patch.setattr(
        weights, "named_weights", lambda model: dict([*model.named_parameters(), *model.named_buffers()])
    )


def rendered_again(patch: Patch) -> None:
    """A later turn is tokenised from its text instead of going on from what was sampled."""
    patch.setattr(chat.ChatTemplate, "continuation", lambda self, messages, reply, tools=(): None)


def reasoning_dropped(patch: Patch) -> None:
    """A later turn starts with the reply without its reasoning."""
    original = session.Session._extend

    def shortened(self: Any, last: Any, rendered: Any) -> Any:
        known: list[int] = last.known_ids.tolist()
        texts = [self._sampler.chat.decode([token]) for token in known]
        starts = [place for place in range(len(texts)) if "".join(texts[place:]).startswith("<think>")]
        stops = [place for place in range(len(texts)) if "".join(texts[:place]).endswith("</think>")]
        for start, stop in zip(starts, stops, strict=True):
            del known[start:stop]
        without = SimpleNamespace(known_ids=np.array(known), role_spans=last.role_spans)
        return original(self, without, rendered)

    patch.setattr(session.Session, "_extend", shortened)


def failed_members_counted(patch: Patch) -> None:
    original = scheduler.Scheduler._verdicts

    def with_all(self: Any, groups: Any) -> Any:
        failed = [rollout for group in groups for rollout in group.returned if rollout.error is not None]
        judge, self._judge = self._judge, lambda rollouts: judge([*rollouts, *failed])[: len(rollouts)]
        for rollout in failed:
            rollout.reward = 0.0
        try:
            return original(self, groups)
        finally:
            self._judge = judge

    patch.setattr(scheduler.Scheduler, "_verdicts", with_all)


def examples_lost(patch: Patch) -> None:
    original = scheduler.Scheduler.restore
    patch.setattr(
        scheduler.Scheduler,
        "restore",
        lambda self, state: original(self, structs.replace(state, unfinished=[])),
    )


def moments_lost(patch: Patch) -> None:
    original = Run.restore

    def restore(run: Run) -> None:
        original(run)
        run.optimizer.adamw.state.clear()

    patch.setattr(Run, "restore", restore)


def weights_lost(patch: Patch) -> None:
    original = Run.restore

    def restore(run: Run) -> None:
        initial = trained_weights(run)
        original(run)
        with torch.no_grad():
            for name, parameter in run.trained.module.named_parameters():
                parameter.copy_(initial[name.removeprefix("hf.")])

    patch.setattr(Run, "restore", restore)


def teacher_forgotten(patch: Patch) -> None:
    patch.setattr(functions, "_teacher_gap", lambda teacher, trainer: torch.zeros_like(trainer))


def halved_sft_loss(patch: Patch) -> None:
    loss = functions.sft_loss
    patch.setattr(
        functions, "sft_loss", lambda inputs: replace(loss(inputs), token_loss=loss(inputs).token_loss / 2)
    )


def entropy_of_all_tokens(patch: Patch) -> None:
    """The logged entropy is averaged over prompts, too."""
    original = observer.observe_loss

    def averaged(stats: Any, inputs: Any, record: Any, entropy: torch.Tensor, account: Any) -> None:
        original(stats, inputs, record, entropy.mean().expand_as(entropy), account)

    patch.setattr(observer, "observe_loss", averaged)


def versions_not_exported(patch: Patch) -> None:
    original = TokenExporter.add

    def first_version(self: Any, table: TokenTable, *arguments: Any, **keywords: Any) -> None:
        versions = np.zeros_like(table["policy_versions"])
        columns = {**{name: table[name] for name in table.columns}, "policy_versions": versions}
        original(self, TokenTable(table.lengths, columns), *arguments, **keywords)

    patch.setattr(TokenExporter, "add", first_version)


def derived_fields_left_out(patch: Patch) -> None:
    original = TokenExporter.__init__

    def essential(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **{**keywords, "columns": "essential"})

    patch.setattr(TokenExporter, "__init__", essential)


def initial_model_saved(patch: Patch) -> None:
    original = optimizer.TrainedWeights.save

    def shrunk(self: Any, folder: Path) -> None:
        with torch.no_grad():
            weight = next(self.policy.parameters())
            kept = weight.clone()
            weight.mul_(0.5)
            original(self, folder)
            weight.copy_(kept)

    patch.setattr(optimizer.TrainedWeights, "save", shrunk)


def never_stale(patch: Patch) -> None:
    patch.setattr(scheduler.Scheduler, "_is_too_old", lambda self, version: False)


def newest_first(patch: Patch) -> None:
    patch.setattr(scheduler.Scheduler, "_by_age", lambda self: self._ready[::-1])


def half_a_batch(patch: Patch) -> None:
    original = scheduler.Rules.size
    patch.setattr(scheduler.Rules, "size", lambda self, verdict: 2 * original(self, verdict))


def group_lost(patch: Patch) -> None:
    original = scheduler.Scheduler._admit

    def forget(self: Any, verdicts: Any) -> None:
        if verdicts[0].rollout.group_id != "g5":
            original(self, verdicts)

    patch.setattr(scheduler.Scheduler, "_admit", forget)


def levels_of_another_step(patch: Patch) -> None:
    original = records.add_off_policy_levels
    patch.setattr(
        records, "add_off_policy_levels", lambda metrics, step, table: original(metrics, step + 1, table)
    )


def tools_for_free(patch: Patch) -> None:
    patch.setattr(Rollout, "num_tool_tokens", property(lambda self: 0))


def booked_as(patch: Patch, wrong: State | Flow, right: State | Flow) -> None:
    original = Journal.count

    def count(self: Any, run: str, env: str, what: State | Flow, tokens: int, link: str = "") -> None:
        original(self, run, env, wrong if what is right else what, tokens, link)

    patch.setattr(Journal, "count", count)


def failed_booked_as_stale(patch: Patch) -> None:
    booked_as(patch, State.STALE, State.FAILED_ROLLOUT)


def masked_booked_as_trained(patch: Patch) -> None:
    booked_as(patch, State.TRAINED, State.MASKED)


def prompts_counted_wrong(patch: Patch) -> None:
    original = records.rollout_record

    def miscounted(*arguments: Any) -> dict[str, Any]:
        record = original(*arguments)
        for turn in record["trajectory"]:
            turn["num_prompt_tokens"] += 1
        return record

    patch.setattr(records, "rollout_record", miscounted)


def one_seed_for_all(patch: Patch) -> None:
    patch.setattr(session, "stable_seed", lambda *parts: 7)


def turns_go_on_from_the_one_before(patch: Patch) -> None:
    """As a conversation is saved, no turn goes back to an earlier one."""
    original = records.rollout_record

    def straightened(*arguments: Any) -> dict[str, Any]:
        record = original(*arguments)
        for turn in record["trajectory"]:
            turn.pop("after", None)
        return record

    patch.setattr(records, "rollout_record", straightened)


def saved_field(patch: Patch, **wrong: object) -> None:
    original = records.rollout_record
    patch.setattr(records, "rollout_record", lambda *arguments: {**original(*arguments), **wrong})


def saved_as_an_older_form(patch: Patch) -> None:
    saved_field(patch, schema=1)


def saved_without_metrics(patch: Patch) -> None:
    saved_field(patch, metrics={})


def saved_with_a_field_that_nothing_holds(patch: Patch) -> None:
    saved_field(patch, mood="fine")


def history_is_never_rewritten(patch: Patch) -> None:
    """As a conversation is saved, a turn that forgets replies has only the example's messages before it."""
    original = session.Session._compare

    def compare(self: Any, messages: Any, tools: Any) -> Any:
        longest, trace = original(self, messages, tools)
        if trace.keeps is not None:
            trace.after, trace.keeps = -1, None
        return longest, trace

    patch.setattr(session.Session, "_compare", compare)


def roles_shifted(patch: Patch) -> None:
    patch.setattr(chat.ChatTemplate, "_stop", lambda *arguments: 1)


def names_of_the_first_start(patch: Patch) -> None:
    """A resumed run names its groups as the one before it did."""
    original = scheduler.Scheduler.restore

    def restore(self: Any, state: Any) -> None:
        original(self, state)
        self._generation = 0

    patch.setattr(scheduler.Scheduler, "restore", restore)


def resume_without_a_mark(patch: Patch) -> None:
    """The snapshot that a resume writes has a mark that the journal lacks."""
    original = journal.append_entries

    def append(path: Path, entries: Sequence[LedgerEntry]) -> None:
        is_resume = any(entry.opened == journal.NOBODY for entry in entries)
        original(path, [entry for entry in entries if not (is_resume and entry.mark)])

    patch.setattr(journal, "append_entries", append)


def groups_paid_for_twice(patch: Patch) -> None:
    """What a group costs its environment is more than all of them are credited for it."""
    original = scheduler.Scheduler.state

    def state(self: Any) -> Any:
        found = original(self)
        paid = {env: credit - found.positions[env] for env, credit in found.credits.items()}
        return structs.replace(found, credits=paid)

    patch.setattr(scheduler.Scheduler, "state", state)


def samples_mixed_up(patch: Patch) -> None:
    original = TokenExporter.add

    def reversed_ids(self: Any, table: TokenTable, *arguments: Any, **keywords: Any) -> None:
        columns = {**{name: table[name] for name in table.columns}, "sample_id": table["sample_id"][::-1]}
        original(self, TokenTable(table.lengths, columns), *arguments, **keywords)

    patch.setattr(TokenExporter, "add", reversed_ids)


def last_checkpoint_missing(patch: Patch) -> None:
    original = Run.save_checkpoint

    def save(self: Any) -> None:
        if self._num_trained < self.max_steps:
            original(self)

    patch.setattr(Run, "save_checkpoint", save)


def checkpoint_without_ledger(patch: Patch) -> None:
    patch.setattr(run, "sum_entries", lambda entries: [])


def checkpoint_of_step_0(patch: Patch) -> None:
    """The ledger of a checkpoint has its counts, and forgets their step."""
    original = run.sum_entries
    patch.setattr(
        run, "sum_entries", lambda entries: [structs.replace(each, step=0) for each in original(entries)]
    )


def checkpoints_pile_up(patch: Patch) -> None:
    patch.setattr(checkpoint, "retract_folder", lambda folder: None)


def batches_released_too_early(patch: Patch) -> None:
    """The batches after the oldest checkpoint are gone, so that nobody can go back to it."""
    patch.setattr(saver, "publish_checkpoint", release_all(saver.publish_checkpoint))


def release_all(publish: Callable[..., int]) -> Callable[..., int]:
    return lambda run_dir, progress, *rest, **keywords: (
        publish(run_dir, progress, *rest, **keywords) and progress.step
    )


def totals_lost(patch: Patch) -> None:
    """Running totals start again with a resume."""
    original = Run.restore

    def restore(self: Any) -> None:
        original(self)
        self._totals.clear()

    patch.setattr(Run, "restore", restore)


def skipped_sequences_forgotten(patch: Patch) -> None:
    """A checkpoint does not know how many sequences the export left out."""
    original = Run.save_checkpoint

    def save(self: Any) -> None:
        kept = dict(self._totals)
        self._totals = Counter({name: each for name, each in kept.items() if not name.startswith("export/")})
        original(self)
        self._totals = Counter(kept)

    patch.setattr(Run, "save_checkpoint", save)


def exports_of_before_lost(patch: Patch) -> None:
    """A resume deletes the steps that are trained already."""
    original = TokenExporter.forget_from

    def forget_all(self: Any, step: int, *arguments: Any) -> None:
        original(self, 0, *arguments)

    patch.setattr(TokenExporter, "forget_from", forget_all)


def nothing_logged_as_trained(patch: Patch) -> None:
    original = observer.StepObserver.metrics

    def metrics(self: Any) -> Any:
        self._counts["loss_tokens"] = 0
        return original(self)

    patch.setattr(observer.StepObserver, "metrics", metrics)


@pytest.mark.parametrize(
    ("plant", "stage"),
    [
        (rendered_again, "prompts"),
        (reasoning_dropped, "prompts"),
        (one_seed_for_all, "prompts"),
        (examples_lost, "examples"),
        (end_of_turn_untrained, "samples"),
        (tools_for_free, "samples"),
        (roles_shifted, "samples"),
        (half_centred, "advantages"),
        (failed_members_counted, "advantages"),
        (never_stale, "staleness"),
        (newest_first, "batches"),
        (half_a_batch, "batches"),
        (group_lost, "batches"),
        (prompts_counted_wrong, "saved rollouts"),
        (turns_go_on_from_the_one_before, "saved rollouts"),
        (history_is_never_rewritten, "saved rollouts"),
        (saved_as_an_older_form, "saved rollouts"),
        (saved_without_metrics, "saved rollouts"),
        (saved_with_a_field_that_nothing_holds, "saved rollouts"),
        (names_of_the_first_start, "snapshots"),
        (groups_paid_for_twice, "snapshots"),
        (failed_booked_as_stale, "books of batches"),
        (resume_without_a_mark, "books of batches"),
        (levels_of_another_step, "metrics of batches"),
    ],
)
def test_a_fault_of_the_orchestrator_is_named_by_its_stage(
    sound: Sound, tmp_path: Path, monkeypatch: Patch, plant: Plant, stage: str
) -> None:
    monkeypatch.setattr(scenario, "STUCK_S", 1.0)
    plant(monkeypatch)
    assert first_difference(sound.of_rollouts(tmp_path)) == stage


def one_length_for_all(patch: Patch) -> None:
    """Rollouts are expected to be as long as those of the latest group."""
    patch.setattr(
        scheduler.RolloutLength,
        "including",
        lambda self, length: scheduler.RolloutLength(length, self.num_groups + 1),
    )


def length_forgotten(patch: Patch) -> None:
    """A resumed run expects rollouts to be as long as they can be."""
    original = scheduler.Scheduler.restore
    patch.setattr(
        scheduler.Scheduler,
        "restore",
        lambda self, state: original(self, structs.replace(state, rollout_length=None)),
    )


def batch_of_all_that_is_ready(patch: Patch) -> None:
    patch.setattr(scheduler.Scheduler, "_is_last_chance", lambda self, group: True)


def no_retries(patch: Patch) -> None:
    original = scheduler.Scheduler.finish

    def finish(self: Any, rollout: Rollout) -> None:
        patch.setattr(self, "_rules", replace(self._rules, max_retries=0))
        original(self, rollout)

    patch.setattr(scheduler.Scheduler, "finish", finish)


def weights_ignored(patch: Patch) -> None:
    """All environments have as many turns."""
    patch.setattr(scheduler.Scheduler, "_share", lambda self, source: 1 / len(self._sources))


@pytest.mark.parametrize(
    "plant",
    [
        one_length_for_all,
        length_forgotten,
        batch_of_all_that_is_ready,
        half_a_batch,
        no_retries,
        weights_ignored,
    ],
)
def test_a_fault_of_the_scheduler_is_named(monkeypatch: Patch, plant: Plant) -> None:
    """Where batches count tokens; rollouts fail there, and the run is resumed."""
    differences = Differences()
    plant(monkeypatch)
    check_schedule(differences)
    assert first_difference(differences) == "batches by tokens"


def test_a_sound_scheduler_agrees() -> None:
    differences = Differences()
    check_schedule(differences)
    assert first_difference(differences) is None and differences.worst == {"batches by tokens": 0.0}


@pytest.mark.parametrize(
    ("plant", "stage"),
    [
        (last_tokens_kept, "truncation"),
        (versions_not_exported, "off-policy levels"),
        (samples_mixed_up, "exported fields"),
        (derived_fields_left_out, "exported fields"),
        (another_temperature, "logprobs"),
        (swapped_sides, "masks"),
        (wrong_sign, "token losses"),
        (entropy_of_all_tokens, "metrics of steps"),
        (masked_booked_as_trained, "books of steps"),
        (nothing_logged_as_trained, "books of steps"),
        (twice_the_loss, "gradient"),
        (never_cleared, "gradient"),
        (frozen_layer, "gradient"),
        (tenfold_rate, "update"),
        (no_clipping, "update"),
        (stale_publication, "published"),
        (buffers_published, "published"),
    ],
)
def test_a_fault_of_the_trainer_is_named_by_its_stage(
    sound: Sound, tmp_path: Path, monkeypatch: Patch, plant: Plant, stage: str
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(path, "_train_resumed", lambda *arguments: None)  # they show before
    assert first_difference(sound.of_training(tmp_path)) == stage


@pytest.mark.parametrize(
    ("plant", "stage"),
    [
        (weights_lost, "checkpoint"),
        (last_checkpoint_missing, "checkpoint"),
        (checkpoint_without_ledger, "checkpoint"),
        (checkpoint_of_step_0, "checkpoint"),
        (checkpoints_pile_up, "checkpoint"),
        (batches_released_too_early, "checkpoint"),
        (totals_lost, "books of steps"),
        (skipped_sequences_forgotten, "books of steps"),
        (exports_of_before_lost, "exported fields"),
        (moments_lost, "update"),
        (teacher_forgotten, "token losses"),
        (halved_sft_loss, "token losses"),
        (initial_model_saved, "model"),
    ],
)
def test_a_fault_of_a_resumed_trainer_is_named_by_its_stage(
    sound: Sound, tmp_path: Path, monkeypatch: Patch, plant: Plant, stage: str
) -> None:
    plant(monkeypatch)
    assert first_difference(sound.of_training(tmp_path)) == stage


@pytest.mark.parametrize("log_pi", [-1e-4, -0.7, -30.0, -52.2, -500.0])
def test_the_script_reports_logprobs_that_samples_may_have(log_pi: float) -> None:
    """Also of a model that is sure of itself: tokens that the script chooses have next to no probability."""
    for seed, offset in itertools.product(range(20), scenario.OFFSETS):
        assert -44 < scenario.move_logprob(log_pi, offset, random.Random(seed)) < 0


def test_an_engine_that_draws_from_its_top_tokens(opened: subject.Subject, monkeypatch: Patch) -> None:
    draw = engine.draw

    def top(logits: torch.Tensor, temperatures: Any, randoms: Any) -> Any:
        """Draws from the eight likeliest, and reports logprobs of all."""
        eighth = logits.topk(8, dim=-1).values[..., -1:]
        tokens, _ = draw(logits.masked_fill(logits < eighth, -1e9), temperatures, randoms)
        positive = torch.tensor([temperature or 1.0 for temperature in temperatures])
        logprobs = (logits / positive[:, None]).log_softmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]

    monkeypatch.setattr(engine, "draw", top)
    [finding, greedy, finish_reasons] = agreement.check_sampling(opened)
    assert not finding.passed and "top-k" in finding.meaning
    assert greedy.passed and finish_reasons.passed


@pytest.mark.parametrize(("says", "wrong"), [("stop", 2048), ("length", 1)])
def test_an_engine_that_says_why_it_ended_wrongly(
    opened: subject.Subject, monkeypatch: Patch, says: str, wrong: int
) -> None:
    monkeypatch.setattr(engine.Engine, "_finish_reason", lambda self, request: says)
    [_, _, finding] = agreement.check_sampling(opened)
    assert finding.value == wrong and f"a finish reason is {says} where it is not" in finding.meaning


def test_an_engine_that_says_another_version(opened: subject.Subject, monkeypatch: Patch) -> None:
    samples_of = opened.sample(seed=5)
    assert agreement._check_versions(samples_of, 0, "here").passed
    finding = agreement._check_versions(samples_of, 3, "here")
    assert not finding.passed and "policy version 3, but its tokens say [0]" in finding.meaning
