"""A server around an engine, without a process and without sockets: what every test of it starts from."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.entrance import bind, web_config
from pellucid.inference.server import Server
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.metrics import JsonlSink, Sink
from pellucid.model import load_policy
from pellucid.transport.punctual import PunctualProtocol
from pellucid.transport.weights_pull import WeightsPuller

KEY = "the-key-of-these-tests"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
JSON = {"content-type": "application/json"}


class EngineServer:
    """A server whose run folder is `folder`. Start and stop its `thread` around what is asked of it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        kind: type[Engine] = Engine,
        *,
        host: str = "127.0.0.1",
        tokenizer: Any = None,
        sink: Sink | None = None,
        puller: WeightsPuller | None = None,
        **options: Any,
    ) -> None:
        self.failures: list[BaseException] = []
        self.policy = load_policy(ModelConfig(name=str(model)))
        tokenizer = tokenizer or load_tokenizer(str(model))
        options = {"num_slots": 8, "max_length": 256, "decode_text": tokenizer.decode, **options}
        self.engine = kind(self.policy, **options)
        self._journal = folder / "inference.jsonl"
        self.thread = EngineThread(
            self.engine,
            Journal(self._journal, Stage.INFERENCE),
            sink or JsonlSink(folder / "metrics.jsonl"),
            self.failures.append,
        )
        server = Server(
            self.engine,
            self.thread,
            tokenizer,
            "models/tiny",
            options["max_length"],
            run_dir=folder,
            host=host,
            key=KEY,
            puller=puller,
        )
        self.app: ASGIApp = server.app()
        self.paths = {route.path for route in server.routes().routes}

    def client(self, **options: Any) -> httpx.AsyncClient:
        """One that shows the key, unless `headers` are given."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        options = {"base_url": "http://127.0.0.1:8000", "headers": AUTHORIZED, **options}
        return httpx.AsyncClient(transport=transport, **options)

    def counts(self) -> dict[str, int]:
        """Tokens in the journal, by flow or state."""
        return journal_counts(self._journal)


def journal_counts(path: Path) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for entry in read_journal(path):
        totals.update(entry.counts)
    return dict(totals)


@contextmanager
def listening(app: ASGIApp, protocol: type[PunctualProtocol] = PunctualProtocol) -> Iterator[str]:
    """The address of the application on a real socket."""
    server = uvicorn.Server(web_config(app, protocol))
    runner = threading.Thread(target=server.run, args=([bind("127.0.0.1", 0)],))
    runner.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        runner.join()
