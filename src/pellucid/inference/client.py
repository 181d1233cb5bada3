"""The protocol of inference clients. The clients of the embedded engine, vLLM and the fake implement it.

Token ids in, token ids out: the client never tokenizes, so what trains is exactly what was sampled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from pellucid.data import Completion
from pellucid.errors import InferenceError

if TYPE_CHECKING:
    from pellucid.inference.protocol import Health

REFUSED = "refused"
"""Finish reason of a completion whose tokens have a policy version that the run cannot verify."""


class UnreachableError(InferenceError):
    """The server cannot be reached, or went away; a refusal is an InferenceError only."""


class BusyError(InferenceError):
    """The server is full and takes the request later; the request has not failed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    temperature: float = 1.0
    """Above 0; 0 is greedy and only for evaluation."""

    max_tokens: int = 16
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens, whatever else the server is doing."""

    stop_token_ids: list[int] = []
    """Sampling ends after one of these; the token is part of the completion."""

    stop: list[str] = []
    """Sampling ends once the text contains one of these; the tokens so far are the completion."""


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run, environment and process that the ledger books a request's tokens under."""

    run: str = ""
    env: str = ""
    client: str = ""
    """The process that asks, which may be gone before it is answered; see `ledger.Links`."""


class InferenceClient(Protocol):
    async def wait_until_ready(self) -> None:
        """Returns once the server answers; raises InferenceError when it will not."""

    async def watch(self) -> None:
        """Never returns; raises once it is certain that nothing will be served any more."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        """Samples one completion. Raises InferenceError with the server's reason.

        `request_id` is the caller's own name for the request, unique while it runs. To give a request up,
        call `abort` and still await the answer, so that every sampled token is accounted for.
        """

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        """Returns the logprob of each token given those before it, NaN for the first; nothing is sampled.

        Raises InferenceError with the server's reason. To give a request up, cancel it.
        """

    async def update_weights(self, version: int, folder: Path) -> None:
        """Makes the server serve this policy version; running sequences continue with the new weights."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cuts these requests short: each returns what it has, with finish reason `abort`.

        Ids that are not running (finished, or not arrived yet) are passed over.
        """

    async def close(self) -> None: ...


class ServerClient(InferenceClient, Protocol):
    """The client of one server, with the server's identity and health."""

    @property
    def server_id(self) -> str:
        """`Health.server_id` of the process that answered last."""

    async def health(self) -> "Health": ...

    async def disown(self, request_ids: Sequence[str]) -> None:
        """Tells the server that no answer of these requests was, or will be, taken.

        Their tokens then count as cancelled, whether they run, were delivered, or have not arrived yet. Ids
        are unique for good. Returns once the engine has heard of it.
        """

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        """See above; `run` is the identity of the run that published the weights."""
