"""Pictures in conversations: rendered by templates of both kinds, kept with their turns and their samples."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from pellucid.data import Example, Rollout
from pellucid.data.images import FAMILIES, ImagePrompt, ImageShape
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import RolloutError, TeacherError
from pellucid.inference.fake import FakeInferenceClient
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.group import Scorer
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.verdict import build_samples
from pictures import pixels, user

SHAPE = ImageShape(token_id=101, patch_size=8, scale_factor=2)
OF_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML for contents that are lists of parts, the form that SmolVLM's own template reads."""


@pytest.fixture
def chat(vision_model):
    return ChatTemplate(load_tokenizer(str(vision_model)))


def test_templates_of_texts_and_of_parts_give_the_same_prompt(vision_model, chat) -> None:
    tokenizer = load_tokenizer(str(vision_model))
    tokenizer.chat_template = OF_PARTS
    messages = [{"role": "system", "content": "be brief"}, *user("a", pixels(0), "b")]
    found, expected = ChatTemplate(tokenizer).prompt(messages), chat.prompt(messages)
    assert found.token_ids == expected.token_ids and found.stops == expected.stops
    assert isinstance(found.token_ids, ImagePrompt) and isinstance(expected.token_ids, ImagePrompt)
    assert found.token_ids.mm_tensors == expected.token_ids.mm_tensors
    assert [role for role, _ in found.stops] == ["system", "user"]
    assert tokenizer.decode(found.token_ids).count("<image>") == 4


class Answers(FakeInferenceClient):
    """Samples these tokens, and remembers the prompts."""

    def __init__(self, *answers: Sequence[int]) -> None:
        remaining = iter(answers)
        super().__init__(lambda prompt_ids, generator: list(next(remaining)))
        self.prompts: list[Sequence[int]] = []

    async def generate(self, prompt_ids, params, account, request_id):
        self.prompts.append(prompt_ids)
        return await super().generate(prompt_ids, params, account, request_id)


def test_each_turn_has_the_pictures_so_far_and_the_sample_all_of_them(chat) -> None:
    """The model's first reply has the token of an image in it, which stands for none."""
    first = [*chat.tokenizer.encode("x"), SHAPE.token_id, chat.tokenizer.eos_token_id]
    client = Answers(first, [*chat.tokenizer.encode("yes"), chat.tokenizer.eos_token_id])
    opening = user(pixels(0), "?")
    rollout = Rollout("g0-r0", "g0", Example("0", opening), "env", 1.0)
    session = Session(rollout, Sampler(client, chat, "run", 1, 1.0, 9, 400), PromptCache(chat))

    async def converse() -> None:
        reply = await session.respond(opening)
        await session.respond([*opening, {"role": "assistant", "content": reply}, *user("and", pixels(1))])

    asyncio.run(converse())
    tiles = [SHAPE.num_tokens(each.mm_tensors) for each in client.prompts]
    assert tiles == [4, 8]
    assert list(client.prompts[1])[: len(client.prompts[0])] == list(client.prompts[0])
    rollout.reward = 1.0
    (sample,) = build_samples(rollout, run_id="run", advantage=1.0)
    ids, types = (sample.arrays[name].array() for name in ("token_ids", "mm_token_type_ids"))
    assert sample.values["mm_tensors"] == client.prompts[1].mm_tensors
    assert types.sum() == 8 and (ids[types == 1] == SHAPE.token_id).all()
    assert np.flatnonzero((ids == SHAPE.token_id) & (types == 0)).tolist() == [len(client.prompts[0]) + 1]
    with pytest.raises(TeacherError, match="a teacher scores text alone"):
        asyncio.run(Scorer(client, "run").score(rollout))
    rollout.forget_tokens()
    assert [turn.images for turn in rollout.turns] == [None, None]


def test_a_group_has_one_prompt_with_its_pictures(chat) -> None:
    prompts = PromptCache(chat)
    first, second = (prompts.render(user(pixels(0), "?")).token_ids for _ in range(2))
    assert first is second
    other = prompts.render(user(pixels(1), "?")).token_ids
    assert list(other) == list(first) and other.mm_tensors != first.mm_tensors


def test_a_model_of_text_refuses_pictures() -> None:
    chat = ChatTemplate(character_tokenizer())
    with pytest.raises(RolloutError, match=f"takes text alone: train a model of {' or '.join(FAMILIES)}"):
        chat.prompt(user(pixels(0), "?"))
