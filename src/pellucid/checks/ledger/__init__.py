"""`pellucid ledger RUN`: where every sampled token went, whether any is missing, and which alarms rang."""

import orjson

from pellucid.checks.ledger.audit import audit
from pellucid.checks.ledger.flow import print_flow
from pellucid.checks.ledger.story import print_stories, stories_of
from pellucid.checks.ledger.tables import as_json, print_steps, print_tallies, tallies
from pellucid.config.tools import LedgerSettings
from pellucid.data.alarms import read_alarms
from pellucid.launch.console import WIDTH, make_console
from pellucid.ledger import reconcile


def run_ledger(settings: LedgerSettings) -> int:
    """0 if every sampled token is accounted for, 1 if one is missing; an alarm changes neither."""
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
    alarms = read_alarms(settings.run)
    if settings.as_json:
        print(orjson.dumps(as_json(report, settings.by, findings, alarms)).decode())
        return 0 if report.balanced else 1
    print_flow(report, console)
    if settings.by == "step":
        print_steps(report, console)
    else:
        print_tallies(tallies(report, settings.by), console)
    bias = (f"bias: {finding}" for finding in findings)
    for line in (*report.verdict(), *bias, *(alarm.line() for alarm in alarms)):
        console.print(line, highlight=False, soft_wrap=True)
    return 0 if report.balanced else 1
