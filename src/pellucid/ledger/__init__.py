"""Where every sampled token went: states, the journal each process keeps, and the reconciliation."""

from pellucid.ledger.journal import (
    BESIDE,
    HANDS_ON,
    TAKES_IN,
    Flow,
    Journal,
    LedgerEntry,
    Stage,
    State,
    new_process,
    read_journal,
    settle_engines,
    settle_trainer,
    sum_entries,
)
from pellucid.ledger.reconcile import Difference, Report, link_of, reconcile

__all__ = [
    "BESIDE",
    "HANDS_ON",
    "TAKES_IN",
    "Difference",
    "Flow",
    "Journal",
    "LedgerEntry",
    "Report",
    "Stage",
    "State",
    "link_of",
    "new_process",
    "read_journal",
    "reconcile",
    "settle_engines",
    "settle_trainer",
    "sum_entries",
]
