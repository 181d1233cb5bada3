"""Sockets for both ends of the ZMQ transport: address, limits, heartbeats, a pipe to wake a poll."""

import os
from contextlib import suppress
from typing import Any

import zmq

_HEARTBEATS = 4
"""Heartbeats per `dead_after_s`; a link counts as dead once none was answered for that long."""


def tcp_address(host: str, port: int) -> str:
    """`tcp://127.0.0.1:5555`, `tcp://[::1]:5555`."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def open_socket(
    context: "zmq.Context[Any]", kind: int, address: str, max_bytes: int, dead_after_s: float
) -> "zmq.Socket[Any]":
    """Makes a socket. ZMQ ends a connection on a frame above `max_bytes`, unread, and after silence."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = "[" in address
    socket.maxmsgsize = max_bytes
    socket.heartbeat_ivl = round(1000 * dead_after_s / _HEARTBEATS)
    socket.heartbeat_timeout = round(1000 * dead_after_s)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1_000
    return socket


class WakePipe:
    """A pipe by which any thread wakes the one that polls it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        with suppress(BlockingIOError):  # full: it is ringing already
            os.write(self._write, b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
