"""`[data]`: the data set of `pellucid sft`."""

from pathlib import Path

from pydantic import Field

from pellucid.config.base import Section


class DataConfig(Section):
    path: Path
    """JSONL file; each line has `messages` (chat form) or `prompt` and `completion` (text)."""

    batch_size: int = Field(default=64, ge=1)
    """Examples per optimizer step."""
