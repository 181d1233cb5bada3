"""`pellucid sft`: the trainer in this process, with the console of a run.

Under torchrun the main process does all that; the others only train.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from pellucid.config import SFTConfig
from pellucid.config.base import save
from pellucid.launch.console import (
    SFT_COLUMNS,
    STOPPED,
    VALIDATED_SFT_COLUMNS,
    AlarmFollower,
    StepView,
    has_terminal,
    make_console,
    open_view,
    sft_summary,
)
from pellucid.launch.preflight import check_sft, is_torchrun
from pellucid.launch.run_folder import claimed, noting_outcome, rewind_sft, settle_export, take_over
from pellucid.metrics import read_metrics

if TYPE_CHECKING:
    from pellucid.trainer.parallel import Ranks
    from pellucid.trainer.sft import DataSize, Row, SFTData, SftRows


class ViewSink:
    """Shows each step as it is logged, and the alarms that ring."""

    def __init__(self, view: StepView, output_dir: Path) -> None:
        self._view = view
        self._alarms = AlarmFollower(output_dir)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._view.show({"step": step, **values})
        for alarm in self._alarms.read():
            self._view.note(alarm.line())
        self._view.refresh()

    def close(self) -> None:
        """Does nothing: whoever made the view closes it."""


def run_sft(config: SFTConfig) -> None:
    check_sft(config)
    if not is_torchrun():
        _lead(config, None)
        return
    from pellucid.trainer import train_on_dataset
    from pellucid.trainer.parallel import joined

    with joined(config.trainer) as ranks:
        if ranks.is_main:
            _lead(config, ranks)
        else:
            train_on_dataset(ranks.share(lambda: config), None, [], ranks)


def _lead(config: SFTConfig, ranks: "Ranks | None") -> None:
    console = make_console()
    started = time.monotonic()
    prepared: list[tuple[int, SFTData]] = []
    with ExitStack() as stack:

        def prepare() -> SFTConfig:
            stack.enter_context(claimed(config.output_dir))
            settle_export(config, console)
            taken, start = take_over(config, rewind_sft, console)
            prepared.append((start, _load(taken, console)))
            # Only now: a folder without anything in it can be used again once the data is put right.
            save(taken, taken.output_dir / "configs" / "sft.toml")
            return taken

        config = prepare() if ranks is None else ranks.share(prepare)
        with noting_outcome(config.output_dir):
            _train(config, console, *prepared[0], ranks)
        records = list(read_metrics(config.output_dir / "metrics" / "trainer.jsonl"))
    duration_s = time.monotonic() - started
    console.print(sft_summary(config.run_name, duration_s, records, config.output_dir, console.width))


def _train(config: SFTConfig, console: Console, start: int, data: "SFTData", ranks: "Ranks | None") -> None:
    from pellucid.trainer import train_on_dataset

    console.out(f"{config.run_name}: {config.max_steps:,} steps", highlight=False)
    columns = SFT_COLUMNS if config.data.validation is None else VALIDATED_SFT_COLUMNS
    try:
        with closing(open_view(columns, config.max_steps - start, console)) as view:
            train_on_dataset(config, data, [ViewSink(view, config.output_dir)], ranks)
    except SystemExit:  # told to stop
        console.out(STOPPED)
        raise


def _load(config: SFTConfig, console: Console) -> "SFTData":
    from pellucid.data.tokenizer import load_tokenizer
    from pellucid.trainer.sft import DataSize, load_data

    def show(rows: "SftRows", title: str) -> Iterable["Row"]:
        return track(
            rows,
            f"tokenising {title}",
            total=len(rows),
            console=console,
            transient=True,
            disable=not has_terminal(console),
        )

    tokenizer = load_tokenizer(config.model.name)
    started = time.monotonic()
    data = load_data(config, tokenizer, show)
    seconds = time.monotonic() - started
    num_examples = len(data.train) + len(data.validation)
    console.out(f"tokenised {num_examples:,} examples in {seconds:.1f} s", highlight=False)
    seq_len = config.trainer.model.seq_len
    for title, samples in (("training", data.train), ("validation", data.validation)):
        if samples:
            console.out(f"{title}: {_describe(DataSize.of(samples, seq_len))}", highlight=False)
    return data


def _describe(size: "DataSize") -> str:
    """`3 examples, 87 tokens, 2 of them with loss; 2 cut at seq_len, 1 of these with no loss left`."""
    tokens = f"{size.num_tokens:,} tokens, {size.num_trainable:,} of them with loss"
    sizes = f"{size.num_examples:,} examples, {tokens}"
    if not size.num_cut:
        return sizes
    return f"{sizes}; {size.num_cut:,} cut at seq_len, {size.num_mute:,} of these with no loss left"
