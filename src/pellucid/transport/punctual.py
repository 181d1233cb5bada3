"""HTTP connections on which nobody keeps a server waiting: what inference servers and the offer speak."""

import asyncio
from asyncio import TimerHandle

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""Seconds that a client has to send the first line and the headers of a request, once connected."""
MAX_HEAD_BYTES = 64 * 1024


class PunctualProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on the time and the bytes that the head of a request may take."""

    head_s = HEAD_S
    _head_timer: TimerHandle | None = None
    _num_head_bytes: int | None = None
    """Bytes of the head received so far; None while no head is being received."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_head(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        self._await_head(None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head(self.timeout_keep_alive + self.head_s)

    def _await_head(self, within_s: float | None) -> None:
        """Closes the connection unless a head comes within so many seconds; None waits for no head."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None if within_s is None else self.loop.call_later(within_s, self.transport.close)
