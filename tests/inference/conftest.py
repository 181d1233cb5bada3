"""A real server on a real socket."""

from contextlib import contextmanager

import pytest

from engine_server import EngineServer, listening
from pellucid.transport.punctual import PunctualProtocol


@pytest.fixture
def serving(tiny_model, tmp_path):
    """`with serving() as (url, policy)`: a running server's address and the policy behind it."""

    @contextmanager
    def serve(protocol=PunctualProtocol, **options):
        served = EngineServer(tiny_model, tmp_path, **options)
        with listening(served.app, protocol) as url:
            yield url, served.policy

    return serve
