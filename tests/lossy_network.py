"""Hosts in namespaces of their own, joined by a network that delays, loses, repeats and reorders packets.

    host ──tun──> LossyNetwork ──tun──> host          10.77.0.1, 10.77.0.2, …

- A host has interfaces, ports and mounts of its own; the folders of the other hosts are hidden from it. What
  it runs is started by `warm` in its namespaces, and found again by them.
- A link between two hosts can be cut: its packets are dropped, or held and delivered late, shuffled, and some
  of them twice.
- Root is needed, with iproute2 and TUN devices, but nothing of the kernel's traffic control.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import warm

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 1400
SET_UP = """
set -e
ip link set lo up
ip tuntap add dev wan mode tun
ip addr add {address}/24 dev wan
ip link set wan mtu {mtu} up
{hide}
echo ready
set +e
read -r end  # by the shell itself: other processes of the host are killed now and then
own=$(readlink /proc/$$/ns/net)
for process in /proc/[0-9]*; do
    if [ "$(readlink $process/ns/net)" = "$own" ] && [ $process != /proc/$$ ]; then
        kill -9 ${{process#/proc/}}
    fi
done 2> /dev/null
"""
"""A host lives until its standard input closes, at the latest with the test; what it runs ends with it."""


def why_not() -> str:
    """Returns why no hosts can be made here; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2 and util-linux have it)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "tuntap", "add", "dev", "wan", "mode", "tun"],
        capture_output=True,
        text=True,
    )
    return f"no namespace with a TUN device can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """A machine of its own, as far as network and files are concerned."""

    def __init__(self, name: str, number: int, folder: Path, hidden: Collection[Path]) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.address = f"10.77.0.{number}"
        script = SET_UP.format(
            address=self.address, mtu=MTU, hide="\n".join(f"mount -t tmpfs none '{path}'" for path in hidden)
        )
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            self._holder.kill()
            self._holder.communicate()
            raise RuntimeError(f"the host {name} could not be set up")
        self.namespaces = Path(f"/proc/{self._holder.pid}/ns")

    def open_tun(self) -> int:
        """Opens the other end of the host's `wan`."""
        opened: list[int] = []

        def enter() -> None:  # a thread's namespace ends with it
            with open(self.namespaces / "net") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"wan", IFF_TUN | IFF_NO_PI))
            opened.append(tun)

        entering = threading.Thread(target=enter)
        entering.start()
        entering.join()
        return opened[0]

    def start(self, arguments: list[str], env: Mapping[str, str] | None = None) -> warm.Running:
        env = {**os.environ, **(env or {}), "GLOO_SOCKET_IFNAME": "lo"}
        running = warm.start(arguments, cwd=self.folder, env=env, merged=True, namespaces=self.namespaces)
        assert isinstance(running, warm.Running)
        return running

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the host."""
        own = os.readlink(self.namespaces / "net")
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns" / "net") == own and int(entry.name) != self._holder.pid:
                    os.kill(int(entry.name), number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._holder.kill()
        self._holder.communicate()


@dataclass(frozen=True)
class Weather:
    """Conditions on every link: one-way delay, and shares of the packets."""

    delay_s: float = 0.2
    loss: float = 0.1
    repeated: float = 0.02
    reordered: float = 0.05
    """Of the packets that arrive: those that overtake others."""


class LossyNetwork:
    """Carries the packets between hosts, in a thread, until it is closed."""

    def __init__(self, hosts: Collection[Host], weather: Weather, seed: int) -> None:
        self._weather, self._generator = weather, random.Random(seed)
        self._tuns = {host.number: host.open_tun() for host in hosts}
        self._on_way: list[tuple[float, int, int, bytes]] = []
        """Heap of arrival, number, host and packet."""
        self._cut: dict[frozenset[int], list[tuple[int, bytes]] | None] = {}
        """By link that is cut: the packets that it holds, or None if it drops them."""
        self._changing = threading.Lock()
        self._is_closed = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._carry, name="network")
        self._thread.start()

    def cut(self, one: Host, other: Host, *, holds: bool = False) -> None:
        with self._changing:
            self._cut[frozenset((one.number, other.number))] = [] if holds else None

    def heal(self, one: Host, other: Host) -> None:
        """Joins the link again; what it held arrives now, in any order, and every tenth packet twice."""
        with self._changing:
            held = self._cut.pop(frozenset((one.number, other.number))) or []
            held += [each for each in held if self._generator.random() < 0.1]
            self._generator.shuffle(held)
            for to, packet in held:
                self._send(to, packet, self._generator.uniform(0, 1))
            self.counts["late"] += len(held)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        for tun in self._tuns.values():
            os.close(tun)

    def _carry(self) -> None:
        poll = select.poll()
        numbers = {tun: number for number, tun in self._tuns.items()}
        for tun in numbers:
            poll.register(tun, select.POLLIN)
        while not self._is_closed:
            wait_s = self._on_way[0][0] - time.monotonic() if self._on_way else 0.05
            for tun, _ in poll.poll(max(0.0, min(wait_s, 0.05)) * 1000):
                with suppress(BlockingIOError):
                    self._take(numbers[tun], os.read(tun, 1 << 16))
            self._deliver()

    def _take(self, sender: int, packet: bytes) -> None:
        to = packet[19] if packet[0] >> 4 == 4 else 0
        if to not in self._tuns or to == sender:
            return
        self.counts["sent"] += 1
        weather, draw = self._weather, self._generator.random
        with self._changing:
            link = frozenset((sender, to))
            if link in self._cut:
                self.counts["cut"] += 1
                held = self._cut[link]
                if held is not None and len(held) < 10_000:
                    held.append((to, packet))
                return
            if draw() < weather.loss:
                self.counts["lost"] += 1
                return
            for _ in range(1 + (draw() < weather.repeated)):
                is_early = draw() < weather.reordered
                self.counts["reordered"] += is_early
                self.counts["delivered"] += 1
                self._send(to, packet, weather.delay_s * (draw() if is_early else 1))

    def _send(self, to: int, packet: bytes, delay_s: float) -> None:
        self.counts["numbered"] += 1
        heapq.heappush(self._on_way, (time.monotonic() + delay_s, self.counts["numbered"], to, packet))

    def _deliver(self) -> None:
        with self._changing:
            while self._on_way and self._on_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._on_way)
                with suppress(OSError):  # its interface takes no more: lost
                    os.write(self._tuns[to], packet)
