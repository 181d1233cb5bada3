"""Where every sampled token went: states, the journal each process keeps, and the reconciliation."""

from pellucid.ledger.journal import (
    NOBODY,
    Journal,
    LedgerEntry,
    append_entries,
    end_of_mark,
    journals_of,
    mend,
    new_process,
    read_journal,
    sum_entries,
)
from pellucid.ledger.links import link_of, orchestrator_of
from pellucid.ledger.reconcile import Account, Difference, Report, reconcile
from pellucid.ledger.settle import discarded, held_again, settle_engines, settle_trainer, trained_steps
from pellucid.ledger.states import BESIDE, HANDS_ON, MEANING, TAKES_IN, Flow, Stage, State

__all__ = [
    "BESIDE",
    "HANDS_ON",
    "MEANING",
    "NOBODY",
    "TAKES_IN",
    "Account",
    "Difference",
    "Flow",
    "Journal",
    "LedgerEntry",
    "Report",
    "Stage",
    "State",
    "append_entries",
    "discarded",
    "end_of_mark",
    "held_again",
    "journals_of",
    "link_of",
    "mend",
    "new_process",
    "orchestrator_of",
    "read_journal",
    "reconcile",
    "settle_engines",
    "settle_trainer",
    "sum_entries",
    "trained_steps",
]
