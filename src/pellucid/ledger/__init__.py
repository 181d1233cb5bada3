"""Where every sampled token went: states, the journal each process keeps, and the reconciliation."""

from pellucid.ledger.journal import Journal, LedgerEntry, read_journal
from pellucid.ledger.reconcile import Difference, Report, reconcile
from pellucid.ledger.states import BESIDE, Flow, Stage, State

__all__ = [
    "BESIDE",
    "Difference",
    "Flow",
    "Journal",
    "LedgerEntry",
    "Report",
    "Stage",
    "State",
    "read_journal",
    "reconcile",
]
