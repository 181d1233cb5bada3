"""Side-by-side benchmarks: two ways of doing one thing in one run; the ratio is the result."""

import json
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from rich.table import Table

from pellucid.bench.result import Result
from pellucid.config.tools import BenchSettings
from pellucid.errors import ConfigError, MissingPackageError
from pellucid.launch.console import make_console

BENCHMARKS = {
    "advantage": "advantages of many groups: all at once against a torch call per group",
    "attention": "packed training: our attention against HF's own packed SDPA",
    "engine": "sampling: the embedded engine against HF generate",
    "experts": "mismatch KL of a model with experts: recorded ones replayed against routed anew",
    "export": "token exports: writing against lists and json.dumps, reading out of a million tokens",
    "head": "logprobs and entropy: chunks of tokens against all logits at once",
    "loss": "the rl loss: all packed tokens at once against a loop over sequences",
    "orchestrator": "10,000 rollouts in flight: rate and lag; memory that waits; tokens that failures cost",
    "packing": "micro batches for 8 ranks: time, bins and imbalance against a plain loop",
    "sharing": "training on groups: the common prompt once against once per member",
    "overhead": "token export: a training step with it against the same without",
    "overlap": "asynchrony: time per RL step against the slower of sampling and training",
    "transport": "samples on the wire: columnar bytes against lists",
    "train": "a whole training step against that of TRL's GRPO trainer (`make bench-train`)",
    "viewer": "the viewer in a browser against its budgets: first content, switching, sizes, 100M tokens",
    "tensors": "from samples to a micro batch's tensors: one hop against lists all the way",
}


def run_bench(settings: BenchSettings) -> None:
    """Runs one benchmark, or all; without a name it lists them."""
    if settings.name is None:
        print("\n".join(f"{name:<12}{what}" for name, what in BENCHMARKS.items()))
        return
    results = [result for name in _chosen(settings.name) for result in _results(name, settings)]
    if settings.as_json:
        for result in results:
            print(json.dumps(result.as_dict()))
    else:
        make_console().print(_table(results))


def _chosen(name: str) -> list[str]:
    if name == "all":
        return list(BENCHMARKS)
    if name in BENCHMARKS:
        return [name]
    near = get_close_matches(name, BENCHMARKS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known: all, {', '.join(BENCHMARKS)}"
    raise ConfigError(f"bench {name!r}: no such benchmark; {remedy}")


def _results(name: str, settings: BenchSettings) -> list[Result]:
    """Of `all`, what cannot run here is left out with a word."""
    try:
        return _benchmark(name)()
    except MissingPackageError as error:
        if settings.name != "all":
            raise
        print(f"skipped: {error}", file=sys.stderr)
        return []


def _benchmark(name: str) -> Callable[[], list[Result]]:
    run: Callable[[], list[Result]] = import_module(f"pellucid.bench.{name}").run
    return run


def _table(results: list[Result]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("benchmark")
    for title in ("ours", "baseline", "unit", "ratio"):
        table.add_column(title, justify="right")
    table.add_column("against")
    for result in results:
        ours, baseline = f"{result.ours:,.4g}", f"{result.baseline:,.4g}"
        table.add_row(result.name, ours, baseline, result.unit, f"{result.ratio:.2f}", result.against)
    return table
