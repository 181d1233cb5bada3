"""Pictures, prompts and samples with them, and what HF's own forward makes of a sample."""

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pellucid.data import Example, TrainingSample
from pellucid.data.images import ImagePrompt, data_url, unpack_images
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy
from pellucid.orchestrator import Score, SingleTurnEnvironment
from pellucid.orchestrator.chat import ChatTemplate

SIDE = 32


def pixels(seed: int, side: int = SIDE) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def part(array: Any) -> Any:
    """The picture as a part of a message."""
    png = io.BytesIO()
    Image.fromarray(array).save(png, "PNG")
    return data_url(png.getvalue())


def picture_of(part: Any) -> Any:
    _, _, data = part["image_url"]["url"].partition(",")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def user(*contents: Any) -> list[dict[str, Any]]:
    """A message of texts and pictures, or of one text."""
    parts = [{"type": "text", "text": each} if isinstance(each, str) else part(each) for each in contents]
    return [{"role": "user", "content": parts}]


class ShowsPictures(SingleTurnEnvironment):
    def example(self, index: int) -> Example:
        return Example(str(index), user(pixels(index), "?"))

    def reward(self, example: Example, text: str) -> Score:
        return Score(0.0)


def sampled(policy: Policy, chat: ChatTemplate, conversations: Any, max_tokens: int = 6) -> Any:
    """Prompts, and completions that the engine samples for them side by side."""
    prompts = [chat.prompt(messages).token_ids for messages in conversations]
    done: dict[int, Any] = {}
    requests = [
        Request(
            list(prompt),
            SamplingParams(max_tokens=max_tokens, seed=index),
            Account(),
            lambda completion, index=index: done.update({index: completion}),
            mm_tensors=prompt.mm_tensors if isinstance(prompt, ImagePrompt) else b"",
        )
        for index, prompt in enumerate(prompts)
    ]
    run_to_end(Engine(policy, num_slots=len(prompts), max_length=256), requests)
    return prompts, [done[index] for index in range(len(prompts))]


def sample_of(prompt: Any, completion: Any, index: int = 0, **columns: Any) -> TrainingSample:
    images = {}
    if isinstance(prompt, ImagePrompt):
        types = [int(token == prompt.token_id) for token in prompt] + [0] * len(completion.token_ids)
        images = {"mm_tensors": prompt.mm_tensors, "mm_token_type_ids": types}
    values = {"advantage": 0.5 - index, "env_name": "dots", "run_id": "run", "reward": float(index)}
    values |= {"rollout_id": f"r{index}", "sample_id": f"s{index}", "group_id": f"g{index // 2}"}
    return TrainingSample.from_turn(
        prompt, completion.token_ids, completion.logprobs, **(values | images | columns)
    )


def hf_logprobs(policy: Policy, sample: TrainingSample) -> Tensor:
    """Logprob of each token but the first, by HF's own eager forward of this sample alone."""
    ids = torch.from_numpy(sample.arrays["token_ids"].array().astype(np.int64))[None]
    options = {}
    if mm_tensors := sample.values.get("mm_tensors"):
        arrays = unpack_images(mm_tensors)
        scale, shift = (torch.from_numpy(arrays[name])[:, None, None] for name in ("scale", "shift"))
        options["pixel_values"] = (torch.from_numpy(arrays["pixels"]) * scale + shift)[None]
    before = policy.attention
    policy.attention = "eager"
    try:
        logprobs = policy.hf(input_ids=ids, **options).logits[0].log_softmax(-1)
    finally:
        policy.attention = before
    found: Tensor = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return found
