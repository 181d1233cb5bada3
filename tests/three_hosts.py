"""A run on three hosts that share no disk, over a network that fails, and what became of it.

    python tests/three_hosts.py --minutes 30 --seed 0      (make test-network)

    orchestrator ──batches, ZMQ──> trainer, 2 processes       200 ms each way, one packet in ten is lost,
         │                              │                     others are repeated or overtake; links are cut
      rollouts, HTTP                weights, HTTP             for 1 to 30 s, hosts killed or stopped
         v                              │
     inference <────────────────────────┘

After every fault the run has to train a step that it had not trained before: that is the recovery. A process
that ends by itself fails the test. In the end every step was trained once, the books of all hosts balance
together, every policy version was verified tensor by tensor, and no example is missing or double.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import chaos
import warm
from lossy_network import Host, LossyNetwork, Weather, why_not
from pellucid.launch.rl import places
from pellucid.ledger.weights import read_weights_book
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model
from pellucid.transport.zmq_link import make_keys

NAMES = ("trainer", "orchestrator", "inference")
MAX_STEPS = 1_000_000  # until the last fault
RECOVERY_S = 600.0
"""Longest wait for a step after a fault."""

SETTINGS = """
run_id = "hosts"
output_dir = "run"
model.name = "tiny"
seq_len = 256
{own}
"""
ZMQ = """
[transport]
type = "zmq"
host = "{trainer}"
port = 5557
keys = "keys"
"""
WEIGHTS = """
[weights]
transport = "http"
host = "{trainer}"
port = 5558
key_file = "run.key"
deltas = true
"""
INFERENCE = """
[inference]
host = "{inference}"
port = 8000
key_file = "run.key"
"""
TRAINER = """
[trainer]
threads = 2
ckpt.interval = 4
publish_dtype = "bfloat16"
experimental.token_export = {{}}
"""
ORCHESTRATOR = """
[orchestrator]
env = [{{ id = "reverse-text" }}]
batch_size = 16
rollouts_per_example = 4
max_inflight_rollouts = 24
sampling.max_tokens = 8
server_timeout_s = 20
"""
SECTIONS = {
    "trainer": (ZMQ, WEIGHTS, TRAINER),
    "orchestrator": (ZMQ, WEIGHTS, INFERENCE, ORCHESTRATOR),
    "inference": (WEIGHTS, INFERENCE),
}


@dataclass(frozen=True)
class Fault:
    kind: str
    where: str
    lasted_s: float
    recovered_s: float
    """From its end until a step was trained that had not been trained before."""


@dataclass(frozen=True)
class Planned:
    """A fault to come: `host` is killed or stopped, or None for a link that is cut and nothing else."""

    kind: str
    link: tuple[str, str]
    seconds: float
    host: str | None = None
    holds: bool = False


class ThreeHosts:
    """The hosts, their network, and the parts of the run on them."""

    def __init__(self, root: Path, weather: Weather, seed: int) -> None:
        folders = {name: root / name for name in NAMES}
        for folder in folders.values():
            folder.mkdir(parents=True)
        with ExitStack() as stack:
            self.hosts = {
                name: stack.enter_context(
                    closing(Host(name, number, folder, [each for each in folders.values() if each != folder]))
                )
                for number, (name, folder) in enumerate(folders.items(), start=1)
            }
            self._write_settings(root)
            self.network = stack.enter_context(
                closing(LossyNetwork(list(self.hosts.values()), weather, seed))
            )
            self._stack = stack.pop_all()
        self._running: dict[str, list[warm.Running]] = {}
        self._logs = root / "logs"
        self._logs.mkdir()
        self._num_logs = 0

    def _write_settings(self, root: Path) -> None:
        addresses = {name: host.address for name, host in self.hosts.items()}
        make_tiny_model(root / "tiny", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
        make_keys(root / "keys")
        for name, host in self.hosts.items():
            shutil.copytree(root / "tiny", host.folder / "tiny")
            (host.folder / "keys").mkdir()
            for key in (*(root / "keys").glob("*.public"), *(root / "keys").glob(f"{name}.secret")):
                shutil.copy2(key, host.folder / "keys")
            key_file = host.folder / "run.key"
            key_file.touch(mode=0o600)
            key_file.write_text("the-key-of-three-hosts")
            own = "".join(SECTIONS[name]).format(**addresses)
            (host.folder / "run.toml").write_text(SETTINGS.format(own=own))

    def start(self, name: str, max_steps: int = MAX_STEPS) -> None:
        arguments = [name, "@", "run.toml", "--resume"]
        if name != "inference":
            arguments += ["--max-steps", str(max_steps)]
        processes = places(2) if name == "trainer" else [{}]
        self._running[name] = [self.hosts[name].start(arguments, place) for place in processes]

    def end(self, name: str, number: int) -> list[int]:
        """Sends a signal to all processes of a host and waits for their end; returns their exit codes."""
        self.hosts[name].signal(number)
        return self.wait(name)

    def wait(self, name: str) -> list[int]:
        codes = []
        for process in self._running.pop(name):
            output, _ = process.communicate(timeout=600)
            codes.append(process.wait())
            self._num_logs += 1
            (self._logs / f"{self._num_logs:03d}_{name}.log").write_text(output)
        return codes

    def check_alive(self) -> None:
        for name, processes in self._running.items():
            for process in processes:
                assert process.poll() is None, f"{name} ended by itself: {process.communicate()[0][-3000:]}"

    @property
    def newest_step(self) -> int:
        """The newest step that was trained; -1 before the first."""
        path = self.hosts["trainer"].folder / "run" / "metrics" / "trainer.jsonl"
        return max((int(record["step"]) for record in read_metrics(path)), default=-1)

    def wait_for_step(self, step: int) -> float:
        """Returns the seconds until `step` was trained."""
        started = time.monotonic()
        while self.newest_step < step:
            self.check_alive()
            assert time.monotonic() - started < RECOVERY_S, f"step {step} was not trained in {RECOVERY_S} s"
            time.sleep(0.1)
        return time.monotonic() - started

    @contextmanager
    def cut(self, planned: Planned) -> Iterator[None]:
        one, other = (self.hosts[name] for name in planned.link)
        self.network.cut(one, other, holds=planned.holds)
        try:
            yield
        finally:
            self.network.heal(one, other)

    def close(self) -> None:
        self._stack.close()


def plans(generator: random.Random, longest_s: float) -> Iterator[Planned]:
    """Yields faults without end: of every nine, three links are cut and three hold what they carry, and each
    host is killed during a cut; then each hangs once."""
    links = list(combinations(NAMES, 2))
    while True:
        deck = [
            *(Planned("cut", link, 0) for link in links),
            *(Planned("cut, delivered late", link, 0, holds=True) for link in links),
            *(Planned("cut, host killed", generator.choice(links), 0, host) for host in NAMES),
            *(Planned("host hangs", links[0], 0, host) for host in NAMES),
        ]
        generator.shuffle(deck)
        for each in deck:
            seconds = generator.uniform(1, longest_s)
            yield Planned(each.kind, each.link, seconds, each.host, each.holds)


def strike(run: ThreeHosts, planned: Planned) -> Fault:
    before, started = run.newest_step, time.monotonic()
    where = planned.host or " – ".join(planned.link)
    if planned.kind == "host hangs":
        assert planned.host is not None
        run.hosts[planned.host].signal(signal.SIGSTOP)
        time.sleep(planned.seconds)
        run.hosts[planned.host].signal(signal.SIGCONT)
    else:
        with run.cut(planned):
            if planned.host is not None:
                where = f"{planned.host}; {' – '.join(planned.link)}"
                time.sleep(planned.seconds / 2)
                run.end(planned.host, signal.SIGKILL)
                run.start(planned.host)
                time.sleep(planned.seconds / 2)
            else:
                time.sleep(planned.seconds)
    lasted_s = time.monotonic() - started
    return Fault(planned.kind, where, lasted_s, run.wait_for_step(max(before, run.newest_step) + 1))


def finish(run: ThreeHosts, num_more: int) -> int:
    """Stops all parts, resumes them for some more steps, and returns how many steps there are in all."""
    for name in ("orchestrator", "trainer", "inference"):
        run.end(name, signal.SIGTERM)
    folder = run.hosts["orchestrator"].folder / "run"
    num_steps = max(chaos.num_steps(folder), run.newest_step + 1) + num_more
    for name in NAMES:
        run.start(name, num_steps)
    for name in ("orchestrator", "trainer"):
        assert run.wait(name) in ([0], [0, 0]), f"{name} failed at its end: see its last log"
    run.end("inference", signal.SIGTERM)
    return num_steps


def check(run: ThreeHosts, merged: Path, num_steps: int) -> dict[str, float]:
    """Puts the records of all hosts together and holds them to each other; returns totals."""
    for host in run.hosts.values():
        for part in ("ledger", "metrics", "rollouts"):
            if (host.folder / "run" / part).exists():
                shutil.copytree(host.folder / "run" / part, merged / part, dirs_exist_ok=True)
    states = chaos.check_run(merged, num_steps)
    verified = read_weights_book(merged / "ledger")
    assert verified is not None and verified.num_verified == verified.num_versions, verified
    return {
        "steps": num_steps,
        "versions_verified": verified.num_verified,
        "trained_tokens": states["trained"] + states["masked"],
        "lost_tokens": states["lost"],
    }


def rough_ride(
    root: Path,
    *,
    faults: Callable[[float], Iterator[Planned]],
    weather: Weather,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, object]:
    """Runs, strikes as long as `faults` yields, given the time since the first step, and returns a report."""
    with closing(ThreeHosts(root, weather, seed)) as run:
        for name in NAMES:
            run.start(name)
        say(f"first step after {run.wait_for_step(0):.1f} s")
        started, struck = time.monotonic(), []
        calm = [run.wait_for_step(run.newest_step + 1) for _ in range(2)]
        for planned in faults(started):
            struck.append(strike(run, planned))
            say(f"{time.monotonic() - started:6.0f} s  {struck[-1]}")
            calm.append(run.wait_for_step(run.newest_step + 1))
        num_steps = finish(run, 3)
        totals = check(run, root / "merged", num_steps)
        return {
            "weather": asdict(weather),
            "seconds": time.monotonic() - started,
            "step_s": statistics.median(calm),
            "packets": {kind: num for kind, num in run.network.counts.items() if kind != "numbered"},
            **totals,
            "faults": [asdict(each) for each in struck],
        }


def table(report: dict[str, object]) -> str:
    """Returns a Markdown table: a row per kind of fault and place."""
    faults = report["faults"]
    assert isinstance(faults, list)
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for fault in faults:
        rows.setdefault((fault["kind"], fault["where"].split(";")[0]), []).append(fault)
    lines = [
        "| fault | where | times | lasted | recovered after: median | longest |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, where), found in sorted(rows.items()):
        lasted, recovered = ([each[key] for each in found] for key in ("lasted_s", "recovered_s"))
        lines.append(
            f"| {kind} | {where} | {len(found)} | {min(lasted):.0f} – {max(lasted):.0f} s "
            f"| {statistics.median(recovered):.1f} s | {max(recovered):.1f} s |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-s", type=float, default=30.0, help="longest cut")
    parser.add_argument("--folder", type=Path, help="empty; one of its own by default")
    parser.add_argument("--report", type=Path, help="where the report goes, as JSON")
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"SKIPPED: {reason}")
        return 0
    root = given.folder or Path(tempfile.mkdtemp(prefix="pellucid-hosts-"))
    generator = random.Random(given.seed)

    def faults(started: float) -> Iterator[Planned]:
        for planned in plans(generator, given.longest_s):
            if time.monotonic() - started > given.minutes * 60:
                return
            yield planned

    report = rough_ride(
        root, faults=faults, weather=Weather(), seed=given.seed, say=partial(print, flush=True)
    )
    if given.report is not None:
        given.report.write_text(json.dumps(report, indent=2))
    print(table(report))
    print({key: value for key, value in report.items() if key != "faults"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
