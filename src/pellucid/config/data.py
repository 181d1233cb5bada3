"""`[data]`: the data set of `pellucid sft`."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from pellucid.config.base import Section

DEFAULT_SPLIT = "train"


class DatasetConfig(Section):
    """A source of examples: a file, a folder, or the hub."""

    KEY: ClassVar[str]
    """Dotted key of this section, for messages."""

    path: Path | None = None
    """JSONL file, or folder of a data set: one that `save_to_disk` wrote, or Parquet or JSONL files. A folder
    needs `pip install 'pellucid[datasets]'`. See docs/fine-tune.md for the form of an example."""

    name: str | None = Field(default=None, min_length=1)
    """Data set on the hub, instead of `path`; needs `pip install 'pellucid[datasets]'`."""

    subset: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a data set that has several."""

    split: str | None = Field(default=None, min_length=1)
    """Split of a folder or a hub data set; default: `train`."""

    @property
    def part(self) -> tuple[str | None, str]:
        """(subset, split), with the default split filled in."""
        return self.subset, self.split or DEFAULT_SPLIT


class ValidationConfig(DatasetConfig):
    """Examples that are never trained on: a data set of their own (`path`, `name`), another `split` of the
    training data, or examples held out of it (`fraction`, `num_examples`)."""

    KEY: ClassVar[str] = "data.validation"

    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training data to hold out; the same examples whatever the `seed`."""

    num_examples: int | None = Field(default=None, ge=1)
    """Examples of the training data to hold out; the same ones whatever the `seed`."""

    interval: int = Field(default=50, ge=1)
    """Steps between two measurements. There is also one before the first step and one after the last."""

    @property
    def holds_out(self) -> bool:
        return self.fraction is not None or self.num_examples is not None

    @model_validator(mode="after")
    def _comes_from_one_place(self) -> "ValidationConfig":
        places = ("path", "name", "fraction", "num_examples")
        given = [f"data.validation.{name}" for name in places if getattr(self, name) is not None]
        part = [f"data.validation.{name}" for name in ("split", "subset") if getattr(self, name) is not None]
        if len(given) > 1 or (self.holds_out and part):
            first, second = [*given, *part][:2]
            raise ValueError(f"{first} and {second} are both set; examples come from one place: keep one")
        if not given and not part:
            raise ValueError(
                "data.validation does not say where examples come from; set path or name, a split of the "
                "training data, or hold examples out of it with fraction or num_examples"
            )
        return self


class DataConfig(DatasetConfig):
    KEY: ClassVar[str] = "data"

    batch_size: int = Field(default=64, ge=1)
    """Examples per optimizer step."""

    validation: ValidationConfig | None = None
    """Present: the run measures the loss on examples that it never trains on."""

    @model_validator(mode="after")
    def _is_one_data_set(self) -> "DataConfig":
        if self.path is not None and self.name is not None:
            raise ValueError(
                f"data.path = {self.path} and data.name = {self.name} are both set; a run reads one data "
                "set: keep one"
            )
        if self.path is None and self.name is None:
            raise ValueError("data.path is missing; set it to a file or folder, or data.name to a hub name")
        return self

    @model_validator(mode="after")
    def _validates_on_something_else(self) -> "DataConfig":
        held = self.validation_source()
        if held is not None and (held.path, held.name, held.part) == (self.path, self.name, self.part):
            raise ValueError(
                f"data.validation reads what the run trains on ({self.path or self.name}, split "
                f"{self.part[1]}); choose another split or data set, or hold examples out with "
                "data.validation.fraction"
            )
        return self

    def validation_source(self) -> ValidationConfig | None:
        """Returns the data set to validate on; None if examples are held out of this one, or none are."""
        held = self.validation
        if held is None or held.holds_out:
            return None
        if held.path is not None or held.name is not None:
            return held
        taken_over = {"path": self.path, "name": self.name, "subset": held.subset or self.subset}
        return held.model_copy(update=taken_over)
