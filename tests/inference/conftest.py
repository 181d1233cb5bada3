"""A real server on a real socket."""

import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.server import Server
from pellucid.ledger import Journal, Stage
from pellucid.metrics import JsonlSink
from pellucid.model import load_policy


@pytest.fixture
def serving(tiny_model, tmp_path):
    """`with serving() as (url, policy)`: a running server's address and the policy behind it."""

    @contextmanager
    def serve(**options):
        policy = load_policy(ModelConfig(name=str(tiny_model)))
        tokenizer = load_tokenizer(str(tiny_model))
        options = {"num_slots": 8, "max_length": 256, "decode_text": tokenizer.decode, **options}
        engine = Engine(policy, **options)
        journal = Journal(tmp_path / "inference.jsonl", Stage.INFERENCE)
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        thread = EngineThread(engine, journal, sink, on_failure=lambda error: None)
        app = Server(engine, thread, tokenizer, "models/tiny", options["max_length"]).app()
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        runner = threading.Thread(target=server.run)
        runner.start()
        try:
            while not server.started:
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}", policy
        finally:
            server.should_exit = True
            runner.join()

    return serve
