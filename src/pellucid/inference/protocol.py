"""The bodies of the engine's HTTP requests and responses, shared by server and client."""

from typing import Annotated, Any, Literal

import msgspec

from pellucid.data import PackedArray
from pellucid.inference.client import Account, SamplingParams

NonEmptyIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class GenerateRequest(msgspec.Struct, frozen=True):
    """`POST /inference/v1/generate`."""

    token_ids: NonEmptyIds
    sampling_params: SamplingParams = SamplingParams()
    account: Account = Account()
    request_id: str = ""
    """The caller's name for the request, by which it can be aborted."""

    compact: bool = False
    """Returns logprobs as one list of numbers instead of an object per token."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """Adds a last chunk without choices that contains the number of tokens."""

    include_obfuscation: bool = False
    """Accepted and without effect: padding against eavesdroppers is not for a server inside a cluster."""


StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
NumTokens = Annotated[int, msgspec.Meta(ge=1)]


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    seed: int | None = None
    """Choice i is sampled with seed + i."""

    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Adds `prompt_token_ids`, and `token_ids` and `policy_versions` per choice."""

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`, for one prompt."""

    prompt: str | NonEmptyIds
    max_tokens: NumTokens = 16
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    """0 or 1: those of the sampled tokens. There are no alternatives."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    """The newer name; it wins. Without either, the reply may fill the model's length."""

    logprobs: bool = False


class UpdateWeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /update_weights`: serve policy version `version` from the published folder."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    folder: str
    """`weights/step_VERSION` of the run folder that the server was started with, links resolved: an
    orchestrator of another run is noticed by it."""

    run: str = ""
    """Identity of the run that published them; `/health` tells it from then on."""


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


class GroupMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the requests of a `GenerateManyRequest`; fields as in `GenerateRequest`."""

    sampling_params: SamplingParams = SamplingParams()
    account: Account = Account()
    request_id: str = ""
    compact: bool = False
    token_ids: list[int] = []
    """A prompt of its own; default: the common one."""


class GenerateManyRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /inference/v1/generate_many`: answered with one line of JSON per request, as each ends."""

    requests: Annotated[list[GroupMember], msgspec.Meta(min_length=1)]
    token_ids: list[int] = []
    """The common prompt, sent once: a group with a long one would exceed the limit of a body otherwise."""

    def members(self) -> list[GenerateRequest]:
        """Each request with its prompt; those with the common one share it in memory, too."""
        return [
            GenerateRequest(
                each.token_ids or self.token_ids,
                each.sampling_params,
                each.account,
                each.request_id,
                each.compact,
            )
            for each in self.requests
        ]


class GenerateManyLine(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    """Index of the request that this line answers."""

    choice: Choice | None = None
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
    """Whether it is loading weights; it samples nothing meanwhile."""

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


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody
