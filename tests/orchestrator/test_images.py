"""Pictures in conversations: rendered by templates of both kinds, kept with their turns and their samples."""

import asyncio
import re
from collections.abc import Sequence

import numpy as np
import orjson
import pytest

from pellucid.data import Example, Rollout
from pellucid.data.alarms import read_alarms
from pellucid.data.images import FAMILIES, ImagePrompt, ImageShape, has_pixels, urls_of
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import RolloutError, TeacherError
from pellucid.inference.client import SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.alarms import OrchestratorAlarms, WatchedClient
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.group import Scorer
from pellucid.orchestrator.records import rollout_record
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.snapshot import HeldRollout
from pellucid.orchestrator.verdict import Verdict, build_samples
from pictures import ShowsPictures, pixels, user

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
    """The model's last reply has the token of an image in it, which stands for none."""
    last = [*chat.tokenizer.encode("x"), SHAPE.token_id, chat.tokenizer.eos_token_id]
    client = Answers([*chat.tokenizer.encode("yes"), chat.tokenizer.eos_token_id], last)
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
    assert np.flatnonzero((ids == SHAPE.token_id) & (types == 0)).tolist() == [len(client.prompts[1]) + 1]
    with pytest.raises(TeacherError, match="a teacher scores text alone"):
        asyncio.run(Scorer(client, "run").score(rollout))
    rollout.forget_tokens()
    assert [turn.images for turn in rollout.turns] == [None, None]


def converse(chat, client, *conversations) -> Rollout:
    """A rollout that asks the model with these conversations, one after the other; what an
    assistant says in them is its last reply."""
    rollout = Rollout("g0-r0", "g0", Example("0", conversations[0]), "env", 1.0)
    session = Session(rollout, Sampler(client, chat, "run", 1, 1.0, 9, 400), PromptCache(chat))

    async def ask() -> None:
        reply = ""
        for messages in conversations:
            given = [{**each, "content": reply} if each["role"] == "assistant" else each for each in messages]
            reply = await session.respond(given)

    asyncio.run(ask())
    rollout.reward = 1.0
    return rollout


def answer(chat, text: str, *more: int) -> list[int]:
    return [*chat.tokenizer.encode(text), *more, chat.tokenizer.eos_token_id]


def test_turns_with_other_pictures_are_samples_of_their_own(chat) -> None:
    """The environment replaces the picture in the history: the tokens begin alike, the pictures do not."""
    client = Answers(answer(chat, "yes"), answer(chat, "no"))
    replaced = [*user(pixels(1), "?"), {"role": "assistant", "content": ""}, *user("and?")]
    rollout = converse(chat, client, user(pixels(0), "?"), replaced)
    first, second = client.prompts
    known = rollout.turns[0].known_ids.tolist()
    assert list(second)[: len(known)] == known and second.mm_tensors != first.mm_tensors
    samples = build_samples(rollout, run_id="run", advantage=1.0)
    assert [each.values["mm_tensors"] for each in samples] == [first.mm_tensors, second.mm_tensors]
    assert [each.num_sampled for each in samples] == [4, 3]


@pytest.mark.parametrize("opening", [user(pixels(0), "?"), user("?")], ids=["picture", "text"])
def test_no_turn_follows_a_sampled_image_token(chat, opening) -> None:
    """Engines find the places of images in a prompt by that id; the rollout fails, and says why."""
    client = Answers(answer(chat, "x", SHAPE.token_id), answer(chat, "no"))
    following = [*opening, {"role": "assistant", "content": ""}, *user("and?")]
    with pytest.raises(RolloutError, match=r"has sampled <image> \(token 101\).* no turn can follow"):
        converse(chat, client, opening, following)
    assert len(client.prompts) == 1


def test_saved_rollouts_and_snapshots_hold_digests_of_pictures(chat) -> None:
    client = Answers(answer(chat, "yes"), answer(chat, "no"))
    opening = user("a", pixels(0), "?")
    following = [*opening, {"role": "assistant", "content": ""}, *user(pixels(1), "and?")]
    rollout = converse(chat, client, opening, following)
    samples = build_samples(rollout, run_id="run", advantage=1.0)
    rollout.number_samples()
    rollout.forget_tokens()
    verdict = Verdict(rollout, Flow.SENT, samples=samples)
    record = orjson.dumps(rollout_record(0, verdict, {}))
    held = HeldRollout.of(verdict)
    taken_up = held.verdict("run").rollout
    assert b";base64," not in record and b"base64" not in orjson.dumps(held.messages)
    saved = orjson.loads(record)
    (first,), (second,) = saved["messages"], saved["trajectory"][1]["messages"]
    urls = urls_of([first, second])
    assert all(re.fullmatch("data:image/png;sha256,[0-9a-f]{12}", url) for url in urls)
    assert len(set(urls)) == 2 and first["content"][0] == {"type": "text", "text": "a"}
    assert taken_up.example.messages == [first]
    assert not has_pixels(taken_up.example.messages) and has_pixels(rollout.example.messages)
    assert rollout.example.messages == opening


def test_a_reward_is_not_scored_again_without_its_pictures(chat, tmp_path) -> None:
    """From a snapshot, an example has digests of them, which another reward may come from."""
    rollout = converse(chat, Answers(answer(chat, "yes")), user(pixels(0), "?"))
    verdict = Verdict(rollout, Flow.SENT, samples=build_samples(rollout, run_id="run", advantage=1.0))
    alarms = OrchestratorAlarms(tmp_path, lambda: 5, seed=0)
    environments = {"env": ShowsPictures(seed=0)}  # whose reward is 0.0, not the 1.0 that trains
    alarms.judge_batch([HeldRollout.of(verdict).verdict("run")], environments)
    assert list(read_alarms(tmp_path)) == []
    alarms.judge_batch([verdict], environments)
    assert [alarm.name for alarm in read_alarms(tmp_path)] == ["reward"]


def test_first_tokens_of_other_pictures_are_not_compared(tmp_path) -> None:
    """Members of a group that come one after the other: their ids are equal, their pictures are not."""
    watched = WatchedClient(Answers(), OrchestratorAlarms(tmp_path, lambda: 5, seed=0))
    groups = []
    for number, tensors in enumerate((b"one", b"one", b"two", b"one")):
        prompt = ImagePrompt([5, 101, 6], tensors, 101)
        groups.append(watched._find_group(prompt, SamplingParams(), f"run/g0/g0-r{number}/0"))
    assert groups[0] is groups[1] is groups[3] is not None
    assert groups[2] is None


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
