"""A signal ends a server whenever it comes."""

import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette

from pellucid.inference.entrance import EndingServer, web_config


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class SignalsAsItIsDeleted:
    """Python drops what is raised meanwhile."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


class Struck(EndingServer):
    """Gets a signal when it is about to serve."""

    number = signal.SIGTERM

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        SignalsAsItIsDeleted(self.number)
        await super().serve(sockets)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_ends_it_in_order_though_exceptions_are_dropped(number) -> None:
    told = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        told.append("begun")
        yield
        told.append("ended")

    server = Struck(web_config(Starlette(lifespan=lifespan)))
    server.number = number
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.run(sockets=[listener])
    assert told == ["begun", "ended"]
