"""Hosts in namespaces of their own, joined by a network that delays, loses, repeats and reorders packets.

    host ──veth──> switch ──veth──> host          10.77.0.1, 10.77.0.2, …
                    │ ^
                   tun tun
                    v │
                LossyNetwork

- A host has interfaces, ports and mounts of its own; the folders of the other hosts are hidden from it. What
  it runs is started by `warm` in its namespaces, and found again by them.
- The switch is a namespace, too. It routes what comes from a host into a TUN device, and what comes out of
  that to the host that it is for: no packet gets from host to host without LossyNetwork.
- A link between two hosts can be cut: its packets are dropped, or held and delivered late, shuffled, and some
  of them twice.
- Root is needed, with iproute2, veth and TUN devices, but nothing of the kernel's traffic control.
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
HOST = """
ip link set lo up
{hide}
"""
SWITCH = """
ip tuntap add dev tun mode tun
ip link set tun mtu {mtu} up
ip route add default dev tun table 100
cd /proc/sys/net/ipv4
echo 1 > ip_forward
echo 0 > conf/all/rp_filter
echo 0 > conf/tun/rp_filter
"""
PLUG = """
ip link add host{number} mtu {mtu} type veth peer name wan mtu {mtu} netns {pid}
echo 0 > conf/host{number}/rp_filter
ip addr add 10.77.0.254 peer {address} dev host{number}
ip link set host{number} up
ip rule add iif host{number} lookup 100
nsenter --net=/proc/{pid}/ns/net sh -e -c '
    ip addr add {address} peer 10.77.0.254 dev wan
    ip link set wan up
    ip route add 10.77.0.0/24 via 10.77.0.254
'
"""
STAY = """
echo ready
set +e
read -r end  # by the shell itself: other processes of the namespace are killed now and then
own=$(readlink /proc/$$/ns/net)
for process in /proc/[0-9]*; do
    if [ "$(readlink $process/ns/net)" = "$own" ] && [ $process != /proc/$$ ]; then
        kill -9 ${process#/proc/}
    fi
done 2> /dev/null
"""
"""Namespaces live until their holder's standard input closes, at the latest with the test; what runs there
ends with them."""


def open_namespaces(what: str, set_up: str) -> subprocess.Popen[str]:
    """Starts the process that holds namespaces of network and mounts, once `set_up` has run there."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", f"set -e{set_up}{STAY}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise RuntimeError(f"{what} cannot be set up: {holder.communicate()[1].strip()}")
    return holder


def why_not() -> str:
    """Returns why no hosts can be made here; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2 and util-linux have it)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    try:
        switch = SWITCH.format(mtu=MTU) + "ip link add host type veth peer name wan"
        open_namespaces("a namespace with TUN and veth devices", switch).communicate()
    except RuntimeError as error:
        return str(error)
    return ""


class Host:
    """A machine of its own, as far as network and files are concerned."""

    def __init__(self, name: str, number: int, folder: Path, hidden: Collection[Path]) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.address = f"10.77.0.{number}"
        hide = "\n".join(f"mount -t tmpfs none '{path}'" for path in hidden)
        self.holder = open_namespaces(f"the host {name}", HOST.format(hide=hide))
        self.namespaces = Path(f"/proc/{self.holder.pid}/ns")

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
                if os.readlink(entry / "ns" / "net") == own and int(entry.name) != self.holder.pid:
                    os.kill(int(entry.name), number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.holder.kill()
        self.holder.communicate()


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
        self._hosts = {host.number for host in hosts}
        plugs = [
            PLUG.format(number=host.number, address=host.address, pid=host.holder.pid, mtu=MTU)
            for host in hosts
        ]
        self._switch = open_namespaces("the switch", SWITCH.format(mtu=MTU) + "".join(plugs))
        self._tun = _open_tun(Path(f"/proc/{self._switch.pid}/ns/net"))
        self._on_way: list[tuple[float, int, bytes]] = []
        """Heap of arrival, number and packet."""
        self._cut: dict[frozenset[int], list[bytes] | None] = {}
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
            for packet in held:
                self._send(packet, self._generator.uniform(0, 1))
            self.counts["late"] += len(held)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        os.close(self._tun)
        self._switch.kill()
        self._switch.communicate()

    def _carry(self) -> None:
        poll = select.poll()
        poll.register(self._tun, select.POLLIN)
        while not self._is_closed:
            wait_s = self._on_way[0][0] - time.monotonic() if self._on_way else 0.05
            if poll.poll(max(0.0, min(wait_s, 0.05)) * 1000):
                with suppress(BlockingIOError):
                    self._take(os.read(self._tun, 1 << 16))
            self._deliver()

    def _take(self, packet: bytes) -> None:
        sender, to = (packet[15], packet[19]) if packet[0] >> 4 == 4 else (0, 0)
        if not {sender, to} <= self._hosts or to == sender:
            return
        self.counts["sent"] += 1
        weather, draw = self._weather, self._generator.random
        with self._changing:
            link = frozenset((sender, to))
            if link in self._cut:
                self.counts["cut"] += 1
                held = self._cut[link]
                if held is not None and len(held) < 10_000:
                    held.append(packet)
                return
            if draw() < weather.loss:
                self.counts["lost"] += 1
                return
            for _ in range(1 + (draw() < weather.repeated)):
                is_early = draw() < weather.reordered
                self.counts["reordered"] += is_early
                self.counts["delivered"] += 1
                self._send(packet, weather.delay_s * (draw() if is_early else 1))

    def _send(self, packet: bytes, delay_s: float) -> None:
        self.counts["numbered"] += 1
        heapq.heappush(self._on_way, (time.monotonic() + delay_s, self.counts["numbered"], packet))

    def _deliver(self) -> None:
        with self._changing:
            while self._on_way and self._on_way[0][0] <= time.monotonic():
                with suppress(OSError):  # the device takes no more: lost
                    os.write(self._tun, heapq.heappop(self._on_way)[-1])


def _open_tun(network: Path) -> int:
    """Opens the other end of the switch's device."""
    opened: list[int] = []

    def enter() -> None:  # a thread's namespace ends with it
        with network.open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"tun", IFF_TUN | IFF_NO_PI))
        opened.append(tun)

    entering = threading.Thread(target=enter)
    entering.start()
    entering.join()
    return opened[0]
