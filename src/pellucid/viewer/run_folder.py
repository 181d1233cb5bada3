"""What a run folder says beside its exports: name, reward per step, ledger, the model's tokenizer."""

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import LedgerError
from pellucid.export.jsonl_source import read_json_lines
from pellucid.ledger import Report, State, reconcile

REWARD = "reward/all"


@dataclass(frozen=True, slots=True)
class RunFolder:
    folder: Path | None
    """None for exports that lie outside a run folder."""

    @classmethod
    def around(cls, path: Path) -> "RunFolder":
        """The run that `path` is, or is part of."""
        if (path / "token_exports").is_dir():
            return cls(path)
        for parent in (path, *path.parents):
            if parent.name == "token_exports":
                return cls(parent.parent)
        return cls(None)

    def model_folder(self) -> str | None:
        """`model.name` of the run's configs, where that is a folder on this machine."""
        for file in self._files("configs", "*.toml"):
            model = tomllib.loads(file.read_text(encoding="utf-8")).get("model", {})
            if isinstance(name := model.get("name"), str) and Path(name).is_dir():
                return name
        return None

    def reward_curve(self) -> dict[str, list[Any]] | None:
        """Reward per step; the last word on a step counts, as a resumed run writes it again."""
        rewards: dict[int, float] = {}
        for file in self._files("metrics", "orchestrator.jsonl"):
            for _, metrics in read_json_lines(file):
                if metrics.get(REWARD) is not None:
                    rewards[metrics["step"]] = metrics[REWARD]
        steps = sorted(rewards)
        return {"steps": steps, "values": [rewards[step] for step in steps]} if steps else None

    def ledger(self) -> dict[str, Any] | None:
        if not self._files("ledger", "*.jsonl"):
            return None
        assert self.folder is not None
        try:
            return _summary(reconcile(self.folder / "ledger"))
        except LedgerError as error:
            return {"error": str(error)}

    def _files(self, part: str, pattern: str) -> list[Path]:
        return [] if self.folder is None else sorted((self.folder / part).glob(pattern))


def _summary(report: Report) -> dict[str, Any]:
    states = sum(report.states.values(), Counter[str]())
    return {
        "sampled": sum(report.sampled.values()),
        "states": [[state.value, states[state.value]] for state in State if states[state.value]],
        "differences": [str(difference) for difference in report.differences],
        "running": [stage.value for stage in report.running],
    }
