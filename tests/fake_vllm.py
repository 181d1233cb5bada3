"""A core of vLLM without vLLM, for what pellucid keeps around it."""

import math
from pathlib import Path

import numpy as np

from pellucid.errors import TransportError
from pellucid.inference.client import SamplingParams
from pellucid.inference.vllm_core import SampledToken, Scored
from pellucid.model import RouterShape
from pellucid.transport.digests import read_digests
from pellucid.transport.weights_transfer import Receiving

BLOCK = 4
CHUNK = 16


class FakeCore:
    """Counts up from the last token, with minus the number of loaded weights as logprob.

    A step computes 16 tokens of a prompt. Prompts are shared in blocks of four, as long as their salts are
    equal. Like vLLM, it goes on until `max_tokens` unless it is stopped.

    `bad` does not fit, `torn` fails half-way, `adapter` is an adapter.
    """

    def __init__(self, experts: RouterShape | None = None) -> None:
        """With `experts`, a token's are its id in the first layer, and the number of loads in the others."""
        self._shape = experts
        self.num_workers = 1
        self.received: list[str] = []
        """Calls for the workers, by vLLM's names and ours."""
        self.arrived: dict[str, str] = {}
        """Digests of the tensors that the trainer has sent."""
        self._unsent: dict[str, list[int]] = {}
        self.num_loaded = 0
        self.digests: dict[str, str] = {}
        self.has_adapter = False
        self.started: list[tuple[list[int], SamplingParams, str]] = []
        self.num_steps = 0
        self._last: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        self._to_score: dict[str, list[int]] = {}
        self._to_compute: dict[str, int] = {}
        self._cached: set[tuple[str, tuple[int, ...]]] = set()

    def start(self, key, token_ids, params, salt, group="") -> None:
        assert key not in self._last, "a key is never used twice"
        self.started.append((list(token_ids), params, salt))
        blocks = [(salt, tuple(token_ids[:end])) for end in range(BLOCK, len(token_ids), BLOCK)]
        self._shared[key] = BLOCK * sum(block in self._cached for block in blocks)
        self._cached.update(blocks)
        self._last[key], self._left[key] = token_ids[-1], params.max_tokens
        self._to_compute[key] = len(token_ids)
        self._unsent[key] = list(token_ids)

    def score(self, key, token_ids) -> None:
        self._to_score[key] = list(token_ids)
        self._to_compute[key] = len(token_ids)

    def stop(self, key) -> None:
        self._left.pop(key, None)
        self._to_score.pop(key, None)

    def step(self):
        self.num_steps += 1
        for key in self._to_compute:
            self._to_compute[key] -= CHUNK
        sampled = []
        for key in [key for key in self._left if self._to_compute[key] <= 0]:
            self._last[key] += 1
            sampled.append(
                SampledToken(
                    key,
                    self._last[key],
                    -float(self.num_loaded),
                    self._shared.pop(key, None),
                    self._experts(key),
                )
            )
            self._unsent[key] = [self._last[key]]
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
        scored = [
            Scored(key, [math.nan, *([-0.5] * (len(ids) - 1))])
            for key, ids in self._to_score.items()
            if self._to_compute[key] <= 0
        ]
        for key, _ in scored:
            del self._to_score[key]
        return sampled, scored

    def _experts(self, key) -> bytes:
        if self._shape is None:
            return b""
        layers, top_k = self._shape.num_layers, self._shape.top_k
        rows = [[[token] * top_k] + [[self.num_loaded] * top_k] * (layers - 1) for token in self._unsent[key]]
        return np.array(rows, self._shape.dtype).tobytes()

    def load(self, folder: Path) -> bool:
        if folder.name == "bad":
            raise TransportError("does not fit")
        if folder.name == "torn":
            raise RuntimeError("half of it")
        digests = read_digests(folder)
        self.digests = {} if digests is None else digests.tensors
        self.num_loaded += 1
        had, self.has_adapter = self.has_adapter, folder.name == "adapter"
        return had == self.has_adapter

    def receive(self, receiving: Receiving) -> bool:
        receiving.carry_out(self.call_workers)
        return self.take_arrived()

    def call_workers(self, method, arguments) -> dict[str, str]:
        """Of `update_weights`, the digests are the shapes; see `FakeSender`."""
        self.received.append(method)
        found = arguments.get("update_info", {}).get("digests", {})
        self.arrived |= found
        return found

    def take_arrived(self) -> bool:
        self.num_loaded += 1
        self.digests, self.arrived = self.arrived, {}
        return True

    def ranks(self):
        return []

    def close(self) -> None:
        pass

    @property
    def num_running(self) -> int:
        return len(self._left) + len(self._to_score)
