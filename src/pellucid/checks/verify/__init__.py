"""`pellucid verify`: the promises of the trainer, checked on the user's own configuration and model.

    tokenizer    prompts survive text, and fit the vocabulary
    columns      what a sample holds is what a micro batch holds
    packing      one batch packed in many ways has one gradient
    ranks        the same over 2, 4 and too many ranks
    leakage      a packed sequence does not see another
    record       token losses add up to the loss
    agreement    trainer and engine give a token the same probability
    drift        nothing moves at learning rate 0
    weights      new weights reach the engine

A check is a function of the subject that yields findings: a number, its limit, and what it means beyond it.
"""

import json
from collections.abc import Callable, Iterator, Sequence

from pellucid.checks.verify.agreement import check_agreement, check_leakage, check_swaps
from pellucid.checks.verify.finding import Finding, findings_table
from pellucid.checks.verify.gradients import check_packing, check_ranks
from pellucid.checks.verify.record import check_columns, check_record, check_tokenizer
from pellucid.checks.verify.subject import Subject, opened
from pellucid.config import VerifyConfig
from pellucid.launch.console import make_console

CHECKS: Sequence[Callable[[Subject], Iterator[Finding]]] = [
    check_tokenizer,
    check_columns,
    check_packing,
    check_ranks,
    check_leakage,
    check_record,
    check_agreement,
    check_swaps,
]


def run_verify(config: VerifyConfig) -> int:
    """0 if every check passes, 1 if one fails."""
    console = make_console()
    with console.status("loading the model, twice, and sampling") as status:
        findings = verify(config, say=lambda check: status.update(f"checking {check}"))
    failed = sum(not finding.passed for finding in findings)
    if config.as_json:
        for finding in findings:
            print(json.dumps(finding.as_dict()))
    else:
        console.print(findings_table(findings))
        console.out(f"{len(findings) - failed} of {len(findings)} findings are within their limits")
    return 1 if failed else 0


def verify(config: VerifyConfig, say: Callable[[str], object] = lambda check: None) -> list[Finding]:
    """`say` is told which check comes next."""
    findings: list[Finding] = []
    with opened(config) as subject:
        for check in CHECKS:
            say(check.__name__.removeprefix("check_"))
            findings += check(subject)
    return findings
