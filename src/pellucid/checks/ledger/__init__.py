"""`pellucid ledger RUN`: where every sampled token went, and whether any is missing."""

import orjson

from pellucid.checks.ledger.audit import audit
from pellucid.checks.ledger.flow import print_flow
from pellucid.checks.ledger.story import print_stories, stories_of
from pellucid.checks.ledger.tables import as_json, print_steps, print_tallies, tallies
from pellucid.config.tools import LedgerSettings
from pellucid.launch.console import WIDTH, make_console
from pellucid.ledger import reconcile


def run_ledger(settings: LedgerSettings) -> int:
    """0 if every sampled token is accounted for, 1 if one is missing."""
    console = make_console(WIDTH)
    if settings.rollout is not None:
        stories = stories_of(settings.run, settings.rollout)
        if settings.as_json:
            print(orjson.dumps([story.as_json() for story in stories]).decode())
        else:
            print_stories(stories, console)
        return 0
    report = reconcile(settings.run / "ledger")
    findings = audit(settings.run) if settings.audit else []
    if settings.as_json:
        print(orjson.dumps(as_json(report, settings.by, findings)).decode())
        return 0 if report.balanced else 1
    print_flow(report, console)
    if settings.by == "step":
        print_steps(report, console)
    else:
        print_tallies(tallies(report, settings.by), console)
    for line in (*report.verdict(), *(f"bias: {finding}" for finding in findings)):
        console.print(line, highlight=False, soft_wrap=True)
    return 0 if report.balanced else 1
