"""`[transport]`: how batches travel from the orchestrator to the trainer."""

from typing import Literal

from pellucid.config.base import Section


class TransportConfig(Section):
    type: Literal["filesystem"] = "filesystem"
    """`filesystem`: atomic folders below the run folder, shared by both processes."""
