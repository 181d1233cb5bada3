"""`python -m benchmarks NAME`: runs a side-by-side benchmark, or all; without a name it lists them."""

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from rich.table import Table

from benchmarks.result import Result
from pellucid.errors import ConfigError, MissingPackageError, PellucidError
from pellucid.launch.console import make_console

BENCHMARKS = {
    "advantage": "advantages of many groups: all at once against a torch call per group",
    "alarms": "alarms: CPU time of a training step, and of requests, with them against without",
    "attention": "packed training: our attention against HF's own packed SDPA",
    "deltas": "weights as differences: bytes and time of a version against its whole file",
    "endurance": "memory over 2,000 steps of each part; a step with syncs to the disk against one without",
    "engine": "sampling: the embedded engine against HF generate",
    "engine_vllm": "sampling: the embedded engine against vLLM (`make vllm`, with its Python)",
    "experts": "mismatch KL of a model with experts: recorded ones replayed against routed anew",
    "export": "token exports: writing against lists and json.dumps, reading out of a million tokens",
    "head": "logprobs and entropy: chunks of tokens against all logits at once",
    "loading": "a model in four processes: each reads its rows of the files against one that reads all",
    "loss": "the rl loss: all packed tokens at once against a loop over sequences",
    "orchestrator": "10,000 rollouts in flight: rate and lag; memory that waits; tokens that failures cost",
    "packing": "micro batches for 8 ranks: time, bins and imbalance against a plain loop",
    "sharing": "training on groups: the common prompt once against once per member",
    "overhead": "token export: a training step with it against the same without",
    "overlap": "asynchrony: time per RL step against the slower of sampling and training",
    "transport": "samples on the wire: columnar bytes against lists",
    "train": "a whole training step against that of TRL's GRPO trainer (`make bench-train`)",
    "viewer": "the viewer in a browser against its budgets: first content, switching, sizes, 100M tokens",
    "windows": "attention under a sliding window: against all tokens, and against HF's masked SDPA",
    "tensors": "from samples to a micro batch's tensors: one hop against lists all the way",
}


def main(argv: Sequence[str] | None = None) -> int:
    listed = "\n".join(f"  {name:<13}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a benchmark, or `all`")
    parser.add_argument("--json", action="store_true", help="print a JSON object per line instead of a table")
    chosen = parser.parse_args(argv)
    if chosen.name is None:
        print(listed)
        return 0
    try:
        results = [result for name in _names(chosen.name) for result in _results(name, chosen.name)]
    except PellucidError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if chosen.json:
        for result in results:
            print(json.dumps(result.as_dict()))
    else:
        make_console().print(_table(results))
    return 0


def _names(chosen: str) -> list[str]:
    if chosen == "all":
        return list(BENCHMARKS)
    if chosen in BENCHMARKS:
        return [chosen]
    near = get_close_matches(chosen, BENCHMARKS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known: all, {', '.join(BENCHMARKS)}"
    raise ConfigError(f"{chosen!r}: no such benchmark; {remedy}")


def _results(name: str, chosen: str) -> list[Result]:
    """Runs one benchmark; among `all`, one that cannot run here is left out with a word."""
    try:
        results: list[Result] = import_module(f"benchmarks.{name}").run()
    except MissingPackageError as error:
        if chosen != "all":
            raise
        print(f"skipped: {error}", file=sys.stderr)
        return []
    return results


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


if __name__ == "__main__":
    sys.exit(main())
