"""Plants small faults between the rollout and the weights, one at a time, and reports which go unnoticed.

    python tests/mutate.py --sample 200 --jobs 2 --into outputs/mutants.jsonl   # goes on where it stopped
    python tests/mutate.py --into outputs/mutants.jsonl --report                # what it has found so far
    python tests/mutate.py --list | wc -l                                       # all mutants

A mutant is a copy of the package with one change; `mutants.py` makes them. For each, the commands that users
have are asked: `rl` for six steps, `ledger` and `replay --weights` of that run, `verify` of its settings.

    not reached   no command executes the line, in any scenario: neither caught nor without an effect
    import        the package cannot be imported
    crash, hang   a command ends with a traceback, or `rl` in any other way than well; or not at all: it takes
                  many times as long as with the package as it is, or its processes hardly compute any more
    alarm         the run ends well, and an alarm rang
    ledger, replay, verify    the first command that names a fault; `rl` reads the ledger in the end, too
    rounding      none does, and the run is the same but for packing and what float32 rounds
    no effect     none does, and the run is the same
    survived      none does, and the run has other weights, tokens, rollouts, counts or checkpoints

`--changing` asks `ledger`, `replay` and `verify` about mutants that change the run and about no others, which
cannot survive. `--quiet 40` goes on until 40 were tried that have an effect and neither crash nor hang.

Rates are about all but `not reached`, `rounding` and `no effect`. A run has one slot, one thread and no
asynchrony, so that it is the same each time, bit by bit; `effects.py` compares it with the run of the package
as it is. Mutants that survive or hang are tried twice.

`--suite` asks the tests of a mutant's package in place of the commands: those that are not marked slow, up to
the first that fails.

A warm Python that has imported everything but pellucid is forked for each command. One pass over the package
as it is records which lines a scenario executes; a mutant is tried in one that reaches it.
"""

import argparse
import hashlib
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal
from zlib import crc32

import warm
from effects import Facts, difference, facts_of
from mutants import Mutant, all_mutants
from mutated import IMPORT_FAILED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pellucid"
NOT_ASKED, NOT_REACHED, NO_EFFECT = "not asked", "not reached", "no effect"
ROUNDING, SURVIVED = "rounding", "survived"
UNCOUNTED = (NOT_ASKED, NOT_REACHED, NO_EFFECT, ROUNDING)
BROKEN = ("import", "crash", "hang")
CHECKS = ("ledger", "replay", "verify")
UNBALANCED = "tokens are unaccounted for"
"""What `rl` says in the end where the ledger does not balance: the run is over, and named."""
SHORTEST_TIMEOUT_S = 30.0
IDLE_S, IDLE_SHARE = 30.0, 0.05
"""Processes that use less than this share of one core, for so long, wait for what never comes. Whoever others
keep from the cores gets more."""
SUITE_TIMEOUT_S = 1800.0
STARTING = threading.Lock()
"""Held while a command is started: the first start makes the one warm Python."""

THIRD_PARTY = f"""
import sys
from importlib import import_module
sys.path.insert(0, {str(ROOT / "tests")!r})
from warm import PARTS
for part in (*PARTS, "checks.verify", "checks.replay", "checks.ledger"):
    import_module("pellucid." + part)
specs = {{name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}}
ours = ("pellucid", "warm", "_")
print(*(name for name, spec in specs.items() if getattr(spec, "origin", None) and not name.startswith(ours)))
"""

# Scenarios


@dataclass(frozen=True)
class Scenario:
    name: str
    model: Literal["dense", "experts", "wide"]
    settings: str
    seq_len: int = 256
    resumed_with: tuple[str, ...] | None = None
    """Flags with which the run is resumed after three steps; None: it is not stopped."""

    def commands(self, folder: Path) -> dict[str, list[list[str]]]:
        """The arguments of each command; the run is in `folder`/run."""
        config, run = str(folder / "config.toml"), str(folder / "run")
        resumed = self.resumed_with
        parts = [[]] if resumed is None else [["--max-steps", "3"], ["--resume", *resumed]]
        return {
            "rl": [["rl", "@", config, *part] for part in parts],
            "ledger": [["ledger", run]],
            "replay": [["replay", run, "--weights"]],
            "verify": [["verify", "@", config]],
        }

    def write_config(self, folder: Path) -> None:
        common = COMMON.format(folder=folder, model=self.model, seq_len=self.seq_len)
        (folder / "config.toml").write_text(common + self.settings + TRAINER)


COMMON = """
output_dir = "{folder}/run"
max_steps = 6
max_async_level = 0
seq_len = {seq_len}
model.name = "{folder}/{model}"
inference.max_concurrent = 1
inference.threads = 1
"""
TRAINER = """
threads = 1
experimental.token_export.own_process = false
"""
"""Ends every scenario's settings, which end with the table `trainer`."""
PLAIN = """
[orchestrator]
batch_size = 8
rollouts_per_example = 4
max_inflight_rollouts = 8
sampling.max_tokens = 8
[[orchestrator.env]]
id = "reverse-text"
[trainer]
optim.lr = 1e-3
"""
TURNS = """
model.lora = { rank = 4 }
transport.compression = "zstd"
[orchestrator]
batch_size = 6
rollouts_per_example = 3
max_inflight_rollouts = 6
sampling = { max_tokens = 6, temperature = 0.8 }
advantage.type = "grpo_std"
[[orchestrator.env]]
id = "mutant_tasks:Turns"
[[orchestrator.env]]
id = "reverse-text"
weight = 0.5
[trainer]
pad_to_multiple_of = 4
loss = { type = "ppo_clip", kl_tau = 0.01 }
ckpt.interval = 2
optim = { lr = 1e-3, weight_decay = 0.1, max_norm = 0.01 }
scheduler = { warmup_steps = 2 }
"""
EXPERTS = """
transport.type = "zmq"
[orchestrator]
token_batch_size = 48
rollouts_per_example = 3
max_inflight_rollouts = 6
sampling.max_tokens = 8
advantage = { type = "default", length_penalty = { type = "tokens" } }
[[orchestrator.filter]]
import_path = "mutant_tasks:keep_long"
[[orchestrator.env]]
id = "reverse-text"
[[orchestrator.eval]]
id = "arithmetic"
interval = 3
num_examples = 2
[trainer]
enable_router_replay = true
share_prompts = false
model.activation_checkpointing = true
loss.type = "gspo"
optim.lr = 1e-3
"""
WINDOWS = """
[orchestrator]
batch_size = 8
rollouts_per_example = 4
max_inflight_rollouts = 4
filter_zero_advantages = false
sampling.max_tokens = 8
advantage.type = "max_rl"
[[orchestrator.env]]
id = "mutant_tasks:Turns"
[trainer]
loss = { type = "icepop", reduction = "sequence" }
optim.lr = 1e-3
scheduler = { type = "linear", warmup_steps = 1 }
ckpt = { interval = 2, asynchronous = true }
"""
WIDE = """
transport.compression = "zstd"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
max_inflight_rollouts = 4
sampling.max_tokens = 8
[[orchestrator.env]]
id = "mutant_tasks:Turns"
[trainer]
micro_batch_max_tokens = 160
loss = { type = "cispo", reduction = "group" }
optim.lr = 1e-3
scheduler = { type = "cosine", warmup_steps = 1 }
"""
SCENARIOS = (
    Scenario("plain", "dense", PLAIN),
    Scenario("turns", "dense", TURNS, seq_len=128, resumed_with=()),
    Scenario("experts", "experts", EXPERTS),
    Scenario("windows", "dense", WINDOWS),
    Scenario("wide", "wide", WIDE, resumed_with=("--trainer.loss.type", "tis")),
)


@dataclass
class Baseline:
    """A scenario with the package as it is."""

    facts: Facts
    seconds: Mapping[str, float]
    lines: frozenset[str] = frozenset()
    """FILE:LINE that any command executes, or `rl` alone if others are asked about changed runs only."""

    def reaches(self, mutant: Mutant) -> bool:
        return any(f"{mutant.file}:{line}" in self.lines for line in mutant.lines)

    def timeout_s(self, command: str, patience: float) -> float:
        return max(SHORTEST_TIMEOUT_S, patience * self.seconds[command])


def make_wide_model(dense: Path, folder: Path) -> None:
    """Writes a model like `dense` with 600 more tokens: their ids take two bytes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(dense), AutoModelForCausalLM.from_pretrained(dense)
    torch.manual_seed(0)
    tokenizer.add_tokens([chr(0x400 + number) for number in range(600)])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for written in (tokenizer, model):
        written.save_pretrained(folder)


# One mutant before the commands


@dataclass
class Answer:
    code: int | None
    """None: it did not end in time."""

    output: str
    seconds: float


@dataclass
class Laboratory:
    """A copy of the package in which one module at a time is another."""

    folder: Path
    third_party: tuple[str, ...]
    changing: bool = False
    """Whether a mutant that leaves the run the same is shown to no other command."""

    patience: float = 4.0
    """How many times as long as with the package as it is a command may take before it is said to hang."""

    def __post_init__(self) -> None:
        from pellucid.model.tiny import make_tiny_model, make_tiny_moe_model

        shutil.copytree(ROOT / "src", self.folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(self.folder / "src")], check=True)
        make_tiny_model(self.folder / "dense", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
        make_tiny_moe_model(self.folder / "experts", hidden_size=32, num_layers=2, num_experts=4)
        make_wide_model(self.folder / "dense", self.folder / "wide")

    def measure(self, scenario: Scenario) -> Baseline:
        """Runs the package as it is, and then asks all commands about it, both with its lines recorded."""
        lines, package = self.folder / "lines", f"{self.folder / 'src' / 'pellucid'}/"
        lines.write_text("")
        env = {"MUTATED_LINES": str(lines)}
        _, facts, _ = self._ask(scenario, None, env, only="rl")
        of_run = frozenset(line.removeprefix(package) for line in lines.read_text().splitlines())
        found, again, seconds = self._ask(scenario, None, env)
        if found["verdict"] != SURVIVED:
            raise SystemExit(f"{scenario.name}: the package as it is does not pass: {found}")
        if difference(facts, again)[0] == "differs":
            raise SystemExit(f"{scenario.name}: a run is not the same twice: {difference(facts, again)}")
        executed = frozenset(line.removeprefix(package) for line in lines.read_text().splitlines())
        return Baseline(facts, seconds, of_run if self.changing else executed)

    def try_out(self, mutant: Mutant, scenario: Scenario, baseline: Baseline) -> dict[str, Any]:
        """Returns the verdict; whatever hangs or survives has to do so twice."""
        found = self._try_once(mutant, scenario, baseline)
        if found["verdict"] in ("hang", SURVIVED):
            found = self._try_once(mutant, scenario, baseline)
        return found

    def _try_once(self, mutant: Mutant, scenario: Scenario, baseline: Baseline) -> dict[str, Any]:
        with self._planted(mutant):
            found, facts, _ = self._ask(scenario, baseline)
        if not facts:
            return found
        effect, where = difference(baseline.facts, facts)
        found |= {"effect": effect, "where": where}
        if found["verdict"] == SURVIVED:
            found["verdict"] = {"same": NO_EFFECT, "rounding": ROUNDING, "differs": SURVIVED}[effect]
        return found

    def ask_suite(self, mutant: Mutant) -> dict[str, Any]:
        with self._planted(mutant):
            return self._run_tests(mutant.package)

    def require_suite(self, package: str) -> None:
        """Raises SystemExit unless the tests of a package pass as it is."""
        if (found := self._run_tests(package))["suite"] != "passed":
            raise SystemExit(f"tests/{package}: the package as it is does not pass: {found}")

    def _run_tests(self, package: str) -> dict[str, Any]:
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"tests/{package}"]
        (self.folder / "tmp").mkdir(exist_ok=True)
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "pytest", *options],
                env=self._env(),
                capture_output=True,
                text=True,
                timeout=SUITE_TIMEOUT_S,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired:
            return {"suite": "hangs"}
        if ended.returncode == 0:
            return {"suite": "passed"}
        return {"suite": "failed", "tests": ended.stdout.strip().splitlines()[-3:]}

    def _planted(self, mutant: Mutant) -> "Planted":
        return Planted(self.folder / "src" / "pellucid" / mutant.file, mutant.source)

    def _ask(
        self,
        scenario: Scenario,
        baseline: Baseline | None,
        env: Mapping[str, str] | None = None,
        only: str = "",
    ) -> tuple[dict[str, Any], Facts, dict[str, float]]:
        """Asks the commands until one complains; (verdict, what the run left, seconds of each command)."""
        for name in ("run", "tmp"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "tmp").mkdir()
        scenario.write_config(self.folder)
        facts: Facts = {}
        seconds: dict[str, float] = {}
        for command, parts in scenario.commands(self.folder).items():
            timeout_s = baseline.timeout_s(command, self.patience) if baseline else 600.0
            for arguments in parts:
                answer = self._run(arguments, timeout_s, env or {})
                seconds[command] = seconds.get(command, 0.0) + answer.seconds
                if (verdict := verdict_of(command, answer)) is not None:
                    last = answer.output.strip().splitlines()[-12:]
                    if (command, verdict) == ("rl", "ledger"):
                        facts = facts_of(self.folder / "run")
                    return {"verdict": verdict, "command": command, "output": last}, facts, seconds
            if command == "rl":
                facts = facts_of(self.folder / "run")
                alarms = self.folder / "run" / "metrics" / "alarms.jsonl"
                if alarms.exists() and (rung := alarms.read_text().splitlines()):
                    return {"verdict": "alarm", "command": "rl", "output": rung}, facts, seconds
                if only == "rl":
                    break
                if self.changing and baseline and difference(baseline.facts, facts)[0] != "differs":
                    break
        return {"verdict": SURVIVED}, facts, seconds

    def _run(self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str]) -> Answer:
        began = time.monotonic()
        with STARTING:
            command = warm.start(
                arguments,
                module="mutated",
                cwd=self.folder,
                env={**self._env(), **env},
                merged=True,
                imported=self.third_party,
            )
        code = wait_unless_idle(command, self.folder, timeout_s)
        command.kill()
        output = command.communicate()[0]
        for pid in warm.processes_of(self.folder / "run").values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Answer(code, output, time.monotonic() - began)

    def _env(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.folder / "src"), str(ROOT / "tests")))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.folder / "tmp"),
        }


def wait_unless_idle(
    command: "warm.Running | subprocess.Popen[str]", folder: Path, timeout_s: float
) -> int | None:
    """Waits for the exit code; None if it took too long, or if nothing that runs in `folder` computes."""
    began = since = time.monotonic()
    used_s = 0.0
    while (now := time.monotonic()) < began + timeout_s:
        with suppress(TimeoutError, subprocess.TimeoutExpired):
            return command.wait(min(IDLE_S / 6, began + timeout_s - now))
        used_now_s = cpu_seconds(folder)
        # A process that ended took its seconds along; where there is no /proc, nobody is idle.
        if not used_s <= used_now_s < math.inf or used_now_s - used_s > IDLE_SHARE * IDLE_S:
            since, used_s = time.monotonic(), used_now_s
        elif time.monotonic() - since > IDLE_S:
            return None
    return None


def cpu_seconds(folder: Path) -> float:
    """Adds up what the processes whose current folder this is have used of the cores.

    Infinitely many where no process of that folder is known.
    """
    ticks = num_found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(entry / "cwd")) == folder:
                ticks += sum(map(int, (entry / "stat").read_text().rpartition(")")[2].split()[11:13]))
                num_found += 1
    return ticks / os.sysconf("SC_CLK_TCK") if num_found else math.inf


def verdict_of(command: str, answer: Answer) -> str | None:
    if answer.code is None:
        return "hang"
    if answer.code == IMPORT_FAILED:
        return "import"
    if answer.code != 0 and command == "rl" and UNBALANCED in answer.output:
        return "ledger"
    if answer.code != 0:
        return command if command in CHECKS and "Traceback" not in answer.output else "crash"
    return None


@dataclass
class Planted:
    """Context manager: the module at `path` is the mutated one; its compiled original stays valid."""

    path: Path
    source: str

    @property
    def _original(self) -> Path:
        return self.path.with_suffix(".original")

    def __enter__(self) -> None:
        shutil.copy2(self.path, self._original)
        self.path.write_text(self.source)

    def __exit__(self, *_: object) -> None:
        self._original.replace(self.path)


# All of them


@dataclass
class Examination:
    """Laboratories that work side by side, and the file of their results."""

    into: Path
    digest: str
    """Names the package and the scenarios."""

    laboratories: list[Laboratory]
    baselines: dict[str, Baseline] = field(default_factory=dict)
    _free: "SimpleQueue[Laboratory]" = field(default_factory=SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for laboratory in self.laboratories:
            self._free.put(laboratory)

    def measure(self) -> None:
        """Measures each scenario, unless that was done for a package and scenarios that were the same."""
        known = self.into.with_name(f"baselines-{self.digest}.pickle")

        def one(scenario: Scenario) -> None:
            laboratory = self._free.get()
            try:
                self.baselines[scenario.name] = baseline = laboratory.measure(scenario)
            finally:
                self._free.put(laboratory)
            times = ", ".join(f"{command} {seconds:.0f} s" for command, seconds in baseline.seconds.items())
            print(f"{scenario.name}: {times}; {len(baseline.lines):,} lines", flush=True)

        if known.exists():
            self.baselines = pickle.loads(known.read_bytes())
        else:
            self._each(one, SCENARIOS)
            known.write_bytes(pickle.dumps(self.baselines))

    def scenario_of(self, mutant: Mutant) -> Scenario | None:
        """One of those that reach the mutant; the same one for the same name."""
        reached = [scenario for scenario in SCENARIOS if self.baselines[scenario.name].reaches(mutant)]
        return reached[crc32(mutant.name.encode()) % len(reached)] if reached else None

    def examine(self, mutants: Sequence[Mutant], num_quiet: float = math.inf) -> None:
        """Tries the mutants, or as many of them as it takes to find `num_quiet` quiet ones."""
        num_done = 0

        def one(mutant: Mutant) -> None:
            nonlocal num_done, num_quiet
            if num_quiet <= 0:
                return
            scenario = self.scenario_of(mutant)
            assert scenario is not None
            laboratory, began = self._free.get(), time.monotonic()
            try:
                found = laboratory.try_out(mutant, scenario, self.baselines[scenario.name])
            finally:
                self._free.put(laboratory)
            seconds = time.monotonic() - began
            self._write(mutant, {"scenario": scenario.name, "seconds": round(seconds, 1), **found})
            with self._lock:
                num_done += 1
                num_quiet -= is_quiet(found)
                done = f"{num_done}/{len(mutants)} {seconds:4.0f} s  {found['verdict']:<10}"
                print(f"{done} {scenario.name:<8} {mutant.name}", flush=True)

        self._each(one, mutants)

    def examine_tests(self, mutants: Sequence[Mutant], known: Mapping[str, Mapping[str, Any]]) -> None:
        """Asks the tests of each mutant's package; `known`: what the commands said of it, if anything."""
        laboratory = self.laboratories[0]
        for package in sorted({mutant.package for mutant in mutants}):
            laboratory.require_suite(package)
        for mutant in mutants:
            found = laboratory.ask_suite(mutant)
            self._write(mutant, {"verdict": NOT_ASKED, **known.get(mutant.name, {}), **found})
            print(f"{found['suite']:<7} {mutant.name}", flush=True)

    def note_unreached(self, mutants: Sequence[Mutant]) -> None:
        for mutant in mutants:
            self._write(mutant, {"verdict": NOT_REACHED})

    def _write(self, mutant: Mutant, found: Mapping[str, Any]) -> None:
        known = {
            "name": mutant.name,
            "file": mutant.file,
            "kind": mutant.kind,
            "module": mutant.module.digest,
        }
        with self._lock, self.into.open("a") as file:
            file.write(json.dumps({**known, **found}) + "\n")

    def _each(self, function: Any, items: Sequence[Any]) -> None:
        with ThreadPoolExecutor(len(self.laboratories)) as pool:
            try:
                for ended in [pool.submit(function, item) for item in items]:
                    ended.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _digest(changing: bool) -> str:
    """Names the sources and scenarios that a baseline is of; checks change no run."""
    tests = Path(__file__).parent
    files = [*tests.glob("mut*.py"), tests / "effects.py", *PACKAGE.rglob("*.py")]
    told = [path for path in sorted(files) if not changing or PACKAGE / "checks" not in path.parents]
    return hashlib.sha256(b"".join(path.read_bytes() for path in told)).hexdigest()[:12]


def examine(mutants: Sequence[Mutant], chosen: argparse.Namespace) -> None:
    chosen.into.parent.mkdir(parents=True, exist_ok=True)
    lines = {line["name"]: line for line in read(chosen.into, mutants)}
    known = {name: line["verdict"] for name, line in lines.items()}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    listed = subprocess.run(
        [sys.executable, "-c", THIRD_PARTY], capture_output=True, text=True, check=True, timeout=600
    )
    third_party = tuple(listed.stdout.split())
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folders = [Path(name) / str(number) for number in range(chosen.jobs)]
        examination = Examination(
            chosen.into,
            _digest(chosen.changing),
            [Laboratory(folder, third_party, chosen.changing, chosen.patience) for folder in folders],
        )
        if chosen.suite:
            survivors = [mutant for mutant in mutants if known.get(mutant.name) == SURVIVED]
            sample = survivors if chosen.again else stratified(mutants, chosen.sample or 20, chosen.seed)
            examination.examine_tests(sample, lines)
            return
        examination.measure()
        reached = [mutant for mutant in mutants if examination.scenario_of(mutant) is not None]
        unreached = {mutant.name for mutant in mutants} - {mutant.name for mutant in reached}
        examination.note_unreached([each for each in mutants if each.name in unreached - known.keys()])
        sample = stratified(reached, chosen.sample or len(reached), chosen.seed)
        untried = [each for each in sample if known.get(each.name, NOT_ASKED) in (NOT_ASKED, NOT_REACHED)]
        survivors = [mutant for mutant in reached if known.get(mutant.name) == SURVIVED]
        examination.examine(survivors if chosen.again else untried, chosen.quiet)


def stratified(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Draws `size` of the mutants, of each package in proportion, in an order without a pattern.

    A smaller sample is the beginning of a larger one, package by package.
    """
    generator = random.Random(seed)
    packages: dict[str, list[Mutant]] = {}
    for mutant in generator.sample(list(mutants), len(mutants)):
        packages.setdefault(mutant.package, []).append(mutant)
    ranked = [
        ((rank + 0.5) / len(of_package), package, mutant)
        for package, of_package in sorted(packages.items())
        for rank, mutant in enumerate(of_package)
    ]
    return [mutant for *_, mutant in sorted(ranked, key=lambda each: each[:2])[:size]]


# The report


def read(path: Path, mutants: Sequence[Mutant]) -> list[dict[str, Any]]:
    """The last result of each mutant that still is one: of a module that has changed since, none counts."""
    current = {(mutant.name, mutant.module.digest) for mutant in mutants}
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {line["name"]: line for line in lines if (line["name"], line["module"]) in current}
    return list(found.values())


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a proportion."""
    if not total:
        return 0.0, 1.0
    rate, spread = hits / total, z * z / total
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / total + spread / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def is_quiet(line: Mapping[str, Any]) -> bool:
    """Tells whether a mutant has an effect, and lets every command end as it would."""
    return line["verdict"] not in (*UNCOUNTED, *BROKEN)


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    tried = [line for line in lines if line["verdict"] not in (NOT_ASKED, NOT_REACHED)]
    verdicts = Counter(line["verdict"] for line in tried)
    counted = [line for line in tried if line["verdict"] not in UNCOUNTED]
    ended = [line for line in tried if is_quiet(line)]
    changed = [line for line in ended if line.get("effect") == "differs"]
    unreached = Counter(line["file"] for line in lines if line["verdict"] == NOT_REACHED)
    tested = [line for line in lines if "suite" in line]
    passed = [line for line in tested if line["suite"] == "passed"]
    uncounted = f"{verdicts[NO_EFFECT]} without an effect, {verdicts[ROUNDING]} by rounding alone"
    return "\n".join(
        [
            f"{len(tried)} mutants tried: {uncounted}",
            *(f"  {verdict:<10} {count}" for verdict, count in verdicts.most_common()),
            _rate("caught by the commands", counted),
            _rate("of those that do not crash, hang or fail to import, named", ended),
            _rate("of these, changed the run and were named", changed),
            *([f"the tests caught {len(tested) - len(passed)} of {len(tested)}"] if tested else []),
            *(f"passed the tests: {line['name']}" for line in passed),
            *(f"survived: {_place(line)}" for line in tried if line["verdict"] == SURVIVED),
            f"{unreached.total()} mutants on lines that no command reaches:",
            *(f"  {count:4} {file}" for file, count in unreached.most_common()),
        ]
    )


def _rate(what: str, lines: Sequence[Mapping[str, Any]]) -> str:
    caught = sum(line["verdict"] != SURVIVED for line in lines)
    low, high = wilson(caught, len(lines))
    rate = caught / max(len(lines), 1)
    return f"{what}: {caught} of {len(lines)} ({rate:.1%}; 95% interval {low:.1%} to {high:.1%})"


def _place(line: Mapping[str, Any]) -> str:
    return f"{line['name']} ({line.get('scenario')}: {line.get('where')})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("outputs/mutants.jsonl"), help="a line per mutant")
    parser.add_argument(
        "--only", default="", help="the mutants in whose name this regular expression is found"
    )
    parser.add_argument("--sample", type=int, help="so many of those that are reached; default: all")
    parser.add_argument("--quiet", type=float, default=math.inf, help="stop after so many quiet ones")
    parser.add_argument("--changing", action="store_true", help="ask about those that change the run alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=4.0, help="a command hangs after so many times its usual seconds"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at a time")
    parser.add_argument(
        "--again", action="store_true", help="try the survivors in --into again, and no others"
    )
    parser.add_argument("--suite", action="store_true", help="ask the tests of their packages instead")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("--report", action="store_true", help="print what is in --into and try none")
    chosen = parser.parse_args()
    mutants = [mutant for mutant in all_mutants(PACKAGE) if re.search(chosen.only, mutant.name)]
    if chosen.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    if not chosen.report:
        examine(mutants, chosen)
    print(report(read(chosen.into, mutants)))


if __name__ == "__main__":
    main()
