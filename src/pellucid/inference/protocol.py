"""The bodies of the engine's HTTP requests and responses, shared by server and client."""

from typing import Annotated, Any

import msgspec

from pellucid.inference.client import Account, SamplingParams

NonEmptyIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class GenerateRequest(msgspec.Struct, frozen=True):
    """`POST /inference/v1/generate`."""

    token_ids: NonEmptyIds
    sampling_params: SamplingParams = SamplingParams()
    account: Account = Account()
    compact: bool = False
    """Logprobs as one list of numbers instead of an object per token."""


class CompletionRequest(msgspec.Struct, frozen=True):
    """`POST /v1/completions`, as far as it makes sense for one prompt."""

    prompt: str | NonEmptyIds
    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    return_token_ids: bool = False


class UpdateWeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /update_weights`: serve policy version `version` from the published folder."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    folder: str


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    policy_versions: list[tuple[int, int]]
    token_logprobs: list[float] = []
    logprobs: Any = None


class GenerateResponse(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[Choice]


class Health(msgspec.Struct, frozen=True):
    status: str
    model: str
    policy_version: int
    running: int
    waiting: int
    sampled_tokens: int
    prefill_tokens: int
    shared_tokens: int
    busy_s: float


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str = "invalid_request_error"


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody
