"""The protocol of inference clients, and the bodies of the requests and answers that travel over HTTP.

Token ids in, token ids out: the client never tokenizes, so what trains is exactly what was sampled. The
clients of the embedded engine, vLLM and the fake implement the protocol.
"""

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from pellucid.data import Completion, PackedArray
from pellucid.data.model_folder import parting_limit
from pellucid.errors import ConfigError, InferenceError

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

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Awaitable[Completion]:
        """Samples one completion. Raises InferenceError with the server's reason.

        A prompt with images is an `ImagePrompt`. `request_id` is the caller's own name for the request,
        unique while it runs. To give a request up, call `abort` and still await the answer, so that every
        sampled token is accounted for.
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

    async def fetch_weights(self, version: int) -> None:
        """Has the server read a version that the trainer offers; does nothing where they share a folder."""

    async def served_weights(self) -> "ServedWeightsReport | None":
        """Returns the digests of the weights that the server serves; None if it cannot tell."""

    async def disown(self, request_ids: Sequence[str]) -> None:
        """Tells the server that no answer of these requests was, or will be, taken.

        Their tokens then count as cancelled, whether they run, were delivered, or have not arrived yet. Ids
        are unique for good. Returns once the engine has heard of it.
        """

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        """See above; `run` is the identity of the run that published the weights."""


NonEmptyIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /inference/v1/generate`, or one of the requests of a `GenerateManyRequest`."""

    token_ids: list[int] = []
    """The prompt; default: see `GenerateManyRequest`."""

    sampling_params: SamplingParams = SamplingParams()
    account: Account = Account()
    request_id: str = ""
    """The caller's name for the request, by which it can be aborted."""

    compact: bool = False
    """Makes `generate` return logprobs as one list of numbers instead of an object per token."""

    mm_tensors: bytes = b""
    """Tensors of the prompt's images, in base64 (see `data/images.py`); default: the common ones, with the
    prompt."""


class UpdateWeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /update_weights`: serve policy version `version` from the published folder, or as offered."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    folder: str = ""
    """`weights/step_VERSION` of the run folder that the server was started with, links resolved: an
    orchestrator of another run is noticed by it."""

    url: str = ""
    """In the place of a folder: `URL/weights/step_VERSION`, with the address of the trainer's offer that the
    server was started with."""

    only_fetch: bool = False
    """Whether the server only reads the version from `url`, to serve it later."""

    run: str = ""
    """Identity of the run that published them; `/health` tells it from then on."""


def offered_at(url: str, version: int) -> str:
    """Returns the address of a version in the trainer's offer at `url`."""
    return f"{url}/weights/step_{version}"


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /abort`: ends these requests now; each answers with what it has."""

    request_ids: list[str]
    disown: bool = False
    """Whether nobody takes their answers: their tokens count as cancelled, even if delivered already, and
    requests that have not arrived yet are never started."""


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    policy_versions: list[tuple[int, int]]
    token_logprobs: list[float] = []
    logprobs: Any = None
    routed_experts: PackedArray | None = None
    """[base64 of the bytes, shape, dtype]; see `Completion`."""

    columns: dict[str, list[float]] = {}
    """Further columns of the schema that the engine fills; see `Completion`."""

    expert_weights: PackedArray | None = None
    """[base64 of the bytes, shape, "float32"]; see `Completion`."""


class GenerateManyRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /inference/v1/generate_many`: answered with one line of JSON per request, as each ends.

    A prompt is sent once, with the first request that has it, so that a body does not grow with prompt ×
    group: a request without one has the common one, or, where there is none, that of the request before it.
    """

    requests: Annotated[list[GenerateRequest], msgspec.Meta(min_length=1)]
    token_ids: list[int] = []
    """The common prompt."""

    mm_tensors: bytes = b""
    """Tensors of the images of the common prompt."""

    def members(self) -> list[GenerateRequest]:
        """Each request with its prompt; those with the same one share it in memory, too."""
        members = []
        token_ids, mm_tensors = self.token_ids, self.mm_tensors
        for each in self.requests:
            if each.token_ids:
                members.append(each)
                if not self.token_ids:
                    token_ids, mm_tensors = each.token_ids, each.mm_tensors
            else:
                members.append(msgspec.structs.replace(each, token_ids=token_ids, mm_tensors=mm_tensors))
        return members


class GenerateManyLine(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    """Index of the request that this line answers."""

    completion: Completion | None = None
    """As the engine made it, with all columns that it filled."""

    error: str = ""


class GenerateResponse(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[Choice]


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /inference/v1/score`: logprobs of these very tokens; nothing is sampled."""

    token_ids: NonEmptyIds
    temperature: float = 1.0
    """Logits are divided by it."""


class ScoreResponse(msgspec.Struct, frozen=True):
    logprobs: list[float | None]
    """One per token; null for the first, which nothing predicts."""


Access = Literal["all", "sampling", "none"]
"""Rights of a request. With the server's key: `all`. Without it, on this machine, `sampling`: sampling and
scoring that no run's books count; from another machine `none`: nothing but `/health`."""

SERVER_ID_HEADER = "x-pellucid-server-id"
"""Header of every answer: `Health.server_id` of the process that gave it."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    model: str
    model_fingerprint: str = ""
    """Fingerprint of the weights loaded at the start, equal for equal tensors; "" where it is unknown."""

    vocabulary: str
    """Fingerprint of the tokenizer's vocabulary: equal where the same ids are the same tokens."""

    max_model_len: int
    policy_version: int
    run: str = ""
    """Identity of the run whose weights are served; "" while they are those that were loaded at the start."""

    server_id: str = ""
    """Random, new at every start of the process: a server that has another one was restarted."""

    max_concurrent: int = 0
    """Sequences that it decodes together; 0: unknown."""

    max_queued: int = 0
    """Requests that may wait besides those."""

    updating: bool = False
    """Whether its engine is loading weights, when it samples nothing."""

    fetching: bool = False
    """Whether it is reading weights from the trainer, beside what the engine does."""

    fetched_bytes: int = 0
    """Bytes of weights that it has read from the trainer."""

    access: Access = "all"
    """Rights of the client that asked."""

    running: int = 0
    waiting: int = 0
    sampled_tokens: int = 0
    delivered_tokens: int = 0
    cancelled_tokens: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    scored_tokens: int = 0
    busy_s: float = 0.0
    ranks: "list[RankHealth]" = []
    """Data-parallel ranks behind this address, where there are several."""


class RankHealth(msgspec.Struct, frozen=True):
    rank: int
    policy_version: int
    running: int
    sampled_tokens: int


class RankWeightsReport(msgspec.Struct, frozen=True):
    rank: int
    policy_version: int
    digests: dict[str, str]


class ServedWeightsReport(msgspec.Struct, frozen=True):
    """`GET /weights`: digests of the served weights, computed for this answer."""

    policy_version: int
    run: str
    digests: dict[str, str]
    """By the names under which the tensors are published; those that cannot be compared are left out."""

    as_read: bool = False
    """Whether they are of the tensors that the engine read, because it keeps them in another form."""

    ranks: list[RankWeightsReport] = []
    """Those of each data-parallel rank, where there are several; `digests` are then those on which all agree,
    and one that differs."""


def group_of_request(request_id: str) -> str:
    """Returns what the requests of a group share: `demo/g5/g5-r3/0` -> `demo/g5`; "" without an id."""
    return request_id.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the servers of a run, checked at the start, at every update and on a return.

    what differs             policy                                      teacher
    key                      refused                                     refused where it is needed
    vocabulary               refused                                     refused
    max_model_len            refused if it is less than the run's        the same
    rotary positions         refused if that length chooses others       anything goes
    the model that it loaded refused, where both sides can tell          anything goes
    the weights that it has  those it loaded, or this run's; any         anything goes
                             other run's are refused
    """

    role: str
    """`policy server` or `teacher`, for messages."""

    model: str
    """`model.name` of the run."""

    vocabulary: str
    """Fingerprint of the tokenizer that the run uses."""

    max_model_len: int
    access: Access = "all"
    """Access that the run needs: `sampling` is enough for a teacher that only scores."""

    key_setting: str = "inference.key_file"
    """Which setting names the server's key, for messages."""

    run: str | None = None
    """Identity of the run; None for a teacher, which may serve any weights."""

    model_fingerprint: str = ""
    """Fingerprint of the model at `model`; "" where this machine does not have its weights."""

    has_weights: bool = False
    """Whether the run has published weights: a server that serves another version of it can load them."""

    longrope_limits: Collection[int] = ()
    """Lengths in tokens above which the model has other rotary positions, by the longest sequence."""

    def check(self, url: str, health: Health) -> None:
        """Raises ConfigError with both values and the remedy if the server at `url` is not the run's."""
        who = f"the {self.role} {health.model!r} at {url}"
        if health.access not in ("all", self.access):
            raise ConfigError(
                f"{who} was started with another key than this run shows; start it with the run's "
                f"output_dir, or set {self.key_setting} to the file `key` in the folder that it was started "
                "with"
            )
        if health.vocabulary != self.vocabulary:
            raise ConfigError(other_vocabulary(who, f"model.name = {self.model!r}"))
        if reason := self._mismatch(health):
            raise ConfigError(f"{who} {reason}")

    def _mismatch(self, health: Health) -> str:
        if health.max_model_len < self.max_model_len:
            return (
                f"takes {health.max_model_len} tokens, less than inference.max_model_len = "
                f"{self.max_model_len}; start it with a larger inference.max_model_len, or lower that of the "
                "run"
            )
        if self.run is None:
            return ""
        if limit := parting_limit(self.longrope_limits, self.max_model_len, health.max_model_len):
            return (
                f"takes {health.max_model_len} tokens, more than {limit}, above which its model has other "
                f"rotary positions (longrope) than with inference.max_model_len = {self.max_model_len} of "
                "the run; start it with the same inference.max_model_len"
            )
        known = health.model_fingerprint and self.model_fingerprint
        if known and health.model_fingerprint != self.model_fingerprint:
            return (
                f"was started with another model (weights {health.model_fingerprint}) than model.name = "
                f"{self.model!r} (weights {self.model_fingerprint}); start it with the run's model, or set "
                "model.name to its"
            )
        serves = f"serves policy version {health.policy_version} of"
        if health.run != self.run and (health.run or health.policy_version):
            whose = f"run {health.run!r}" if health.run else "a run that it cannot name"
            return (
                f"{serves} {whose}, not of this run, {self.run!r}; if that run is going on, give this one a "
                "server of its own; if not, restart the server"
            )
        if health.run == self.run and health.policy_version and not self.has_weights:
            return (
                f"{serves} this run, which has published none (it began anew); restart the server, so that "
                "it serves version 0"
            )
        return ""


def other_vocabulary(who: str, model: str, remedy: str = "take one with the same tokenizer") -> str:
    return f"{who} has another vocabulary than {model}: a token id would not mean the same to both; {remedy}"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody
