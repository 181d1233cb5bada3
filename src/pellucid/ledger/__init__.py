"""Where every sampled token went: states, the journal each process keeps, and the reconciliation."""

from pellucid.ledger.journal import (
    Journal,
    LedgerEntry,
    append_entries,
    journals_of,
    read_journal,
    replace_entries,
    sum_entries,
)
from pellucid.ledger.reconcile import Account, Difference, Report, reconcile
from pellucid.ledger.settle import Settlement, settle
from pellucid.ledger.states import BESIDE, HANDS_ON, MEANING, TAKES_IN, Flow, Stage, State

__all__ = [
    "BESIDE",
    "HANDS_ON",
    "MEANING",
    "TAKES_IN",
    "Account",
    "Difference",
    "Flow",
    "Journal",
    "LedgerEntry",
    "Report",
    "Settlement",
    "Stage",
    "State",
    "append_entries",
    "journals_of",
    "read_journal",
    "reconcile",
    "replace_entries",
    "settle",
    "sum_entries",
]
