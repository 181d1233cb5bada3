"""`pellucid sft`: the trainer in this process, with the console of a run."""

from collections.abc import Mapping
from contextlib import closing

from pellucid.config import SFTConfig
from pellucid.config.save import save
from pellucid.launch.console import SFT_COLUMNS, View, make_console, open_view
from pellucid.launch.run_folder import prepare
from pellucid.launch.summary import artefacts


class ViewSink:
    """Shows each step as it is logged."""

    def __init__(self, view: View) -> None:
        self._view = view

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._view.show({"step": step, **values})
        self._view.refresh()

    def close(self) -> None:
        """The view belongs to its maker."""


def run_sft(config: SFTConfig) -> None:
    from pellucid.trainer import train_on_dataset

    prepare(config)
    save(config, config.output_dir / "configs" / "sft.toml")
    console = make_console()
    console.out(f"{config.run_name}: {config.max_steps:,} steps", highlight=False)
    with closing(open_view(SFT_COLUMNS, config.max_steps, console)) as view:
        train_on_dataset(config, [ViewSink(view)])
    for label, path in artefacts(config.output_dir):
        console.out(f"{label}: {path}", highlight=False)
