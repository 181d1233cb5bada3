"""`pellucid verify`: the promises of the trainer, checked on the user's own configuration and model.

    tokenizer    prompts survive text, and fit the vocabulary
    columns      what a sample holds is what a micro batch holds
    packing      one batch packed in many ways has one gradient
    ranks        the same over 2, 4 and too many ranks
    processes    the same over the processes of torchrun, if it started this one
    leakage      a packed sequence does not see another
    record       token losses add up to the loss
    agreement    trainer and engine give a token the same probability
    precision    in bfloat16, where that is what trains, gradients differ by rounding alone
    experts      with router replay, the trainer goes where the record says
    sampling     the engine draws from the distribution that it reports
    oracle       a scripted run, stage by stage, is what a second implementation says
    weights      new weights reach the engine, and nothing moves at learning rate 0 (drift)
    model        a model alone, without a run, is computed as transformers does (not by default)

A check is a function of the subject that yields findings: a number, its limit, and what it means beyond it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from rich.console import Console

from pellucid.checks.finding import Finding, findings_table
from pellucid.checks.verify.agreement import (
    check_agreement,
    check_experts,
    check_leakage,
    check_precision,
    check_sampling,
    check_swaps,
)
from pellucid.checks.verify.gradients import (
    check_columns,
    check_packing,
    check_ranks,
    check_record,
    check_tokenizer,
)
from pellucid.checks.verify.model import verify_model
from pellucid.checks.verify.path import check_oracle
from pellucid.checks.verify.processes import check_processes
from pellucid.checks.verify.subject import Subject, opened
from pellucid.config import VerifyConfig
from pellucid.config.commands import VerifyCheck
from pellucid.errors import ConfigError
from pellucid.launch.console import make_console
from pellucid.launch.preflight import is_torchrun
from pellucid.trainer.parallel import Ranks, joined

CHECKS: Mapping[VerifyCheck, Callable[[Subject], Iterator[Finding]]] = {
    "tokenizer": check_tokenizer,
    "columns": check_columns,
    "packing": check_packing,
    "ranks": check_ranks,
    "leakage": check_leakage,
    "record": check_record,
    "agreement": check_agreement,
    "precision": check_precision,
    "experts": check_experts,
    "sampling": check_sampling,
    "oracle": check_oracle,
    "weights": check_swaps,
}


def run_verify(config: VerifyConfig) -> int:
    """0 if every check passes, 1 if one fails."""
    if config.rehearse:
        from pellucid.checks.verify.rehearse import print_rehearsal  # registers a device with torch

        return print_rehearsal(config, make_console())
    if config.only == "model":
        findings = verify_model(config)
        _print(findings, config, make_console())
        return 0 if all(finding.passed for finding in findings) else 1
    if not is_torchrun():
        return verify_with(config, Ranks.alone(config.trainer))
    with joined(config.trainer) as ranks:
        return verify_with(config, ranks)


def verify_with(config: VerifyConfig, ranks: Ranks) -> int:
    """The same in processes that have found each other: the main one prints, all return the same.

    Raises ConfigError if nothing at all could be checked.
    """
    if ranks.is_main:
        console = make_console()
        with console.status("loading the model, twice, and sampling") as status:
            findings = verify(config, ranks, say=lambda check: status.update(f"checking {check}"))
    else:
        findings = verify(config, ranks)
    if not any(finding.is_held for finding in findings):
        why = "; ".join(finding.meaning for finding in findings)
        raise ConfigError(f"--only {config.only} has nothing to check: {why}")
    if ranks.is_main:
        _print(findings, config, console)
    return 0 if all(finding.passed for finding in findings) else 1


def verify(
    config: VerifyConfig, ranks: Ranks | None = None, say: Callable[[str], object] = lambda check: None
) -> list[Finding]:
    """Returns what the main process found, in every process; `say` is told which check comes next."""
    ranks = ranks or Ranks.alone(config.trainer)
    of_processes: list[Finding] = []
    asks_for_processes = config.only in (None, "processes")
    if asks_for_processes and ranks.group is None:
        why = (
            "this is one process, which nobody shares the work with; start `torchrun --standalone "
            f"--nproc-per-node {max(2, config.trainer.num_processes)} -m pellucid.cli verify …`"
        )
        of_processes.append(Finding.not_held("processes", "several processes against one", why))
        if config.only is not None:
            return of_processes
    with ExitStack() as stack:
        subjects: list[Subject] = []  # of the main process alone
        ranks.share(lambda: subjects.append(stack.enter_context(opened(config))))
        if asks_for_processes and ranks.group is not None:  # first: other checks train the subject's weights
            say("processes")
            of_processes += check_processes(config, ranks, subjects[0] if subjects else None)

        def check_all() -> list[Finding]:
            findings: list[Finding] = []
            for name, check in CHECKS.items():
                if config.only in (None, name):
                    say(name)
                    findings += check(subjects[0])
            return findings

        return [*ranks.share(check_all), *of_processes]


def _print(findings: Sequence[Finding], config: VerifyConfig, console: Console) -> None:
    if config.as_json:
        for finding in findings:
            print(json.dumps(finding.as_dict()))
        return
    held = [finding for finding in findings if finding.is_held]
    console.print(findings_table(held))
    for finding in findings:
        if not finding.is_held:
            console.out(f"not held: {finding.what} ({finding.check}): {finding.meaning}", highlight=False)
    passed = sum(finding.passed for finding in held)
    console.out(f"{passed} of {len(held)} findings are within their limits")
