import asyncio
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.transport import size_in_process
from pellucid.data import Completion, Example, Rollout
from pellucid.data.tokenizer import CHATML
from pellucid.errors import InferenceError, ModelError, RolloutError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.session import PromptCache, Sampler, SamplingEnd, Session
from pellucid.orchestrator.verdict import build_samples

TOKENIZER = character_tokenizer()
USER = [{"role": "user", "content": "abc"}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class RecordingClient(FakeInferenceClient):
    """Remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        remaining = iter(answers)
        super().__init__(lambda prompt_ids, generator: encode(next(remaining)))
        self.prompts: list[Sequence[int]] = []
        self.params: list[SamplingParams] = []
        self.request_ids: list[str] = []

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        self.prompts.append(prompt_ids)
        self.params.append(params)
        self.request_ids.append(request_id)
        return await super().generate(prompt_ids, params, account, request_id)


def open_session(
    client: FakeInferenceClient,
    rollout_id: str = "g0-r0",
    template: str = CHATML,
    max_model_len: int = 500,
    patience_s: float = 10.0,
) -> tuple[Session, Rollout]:
    chat = ChatTemplate(character_tokenizer(template))
    rollout = Rollout(rollout_id, "g0", Example("0", USER), "env", 0.7)
    sampler = Sampler(client, chat, "run", 11, 0.7, 20, max_model_len, SamplingEnd(patience_s=patience_s))
    return Session(rollout, sampler, PromptCache(chat)), rollout


def block_texts(rollout: Rollout) -> list[tuple[str, str]]:
    turn = rollout.turns[-1]
    token_ids = turn.known_ids.tolist()
    return [(role, TOKENIZER.decode(token_ids[start:stop])) for role, start, stop in turn.role_spans]


def test_single_turn() -> None:
    client = RecordingClient("cba<|im_end|>")
    session, rollout = open_session(client)
    assert asyncio.run(session.respond(USER)) == "cba"
    assert client.prompts == [encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")]
    [turn] = rollout.turns
    assert [part.tolist() for part in turn.tokens[:2]] == [client.prompts[0], encode("cba<|im_end|>")]
    assert turn.text == "cba"
    [params] = client.params
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (
        0.7,
        20,
        [TOKENIZER.eos_token_id],
    )
    assert client.delivered == {Account("run", "env"): 4}


def test_role_spans_tile_the_sequence() -> None:
    session, rollout = open_session(RecordingClient("yes<|im_end|>"))
    asyncio.run(session.respond([{"role": "system", "content": "be brief"}, *USER]))
    assert block_texts(rollout) == [
        ("system", "<|im_start|>system\nbe brief<|im_end|>\n"),
        ("user", "<|im_start|>user\nabc<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\nyes<|im_end|>"),
    ]


def test_a_message_that_the_template_refuses_alone_joins_the_next_block() -> None:
    strict = (
        "{% if messages | length < 2 %}{{ raise_exception('two messages at least') }}{% endif %}" + CHATML
    )
    session, rollout = open_session(RecordingClient("yes<|im_end|>"), template=strict)
    asyncio.run(session.respond([{"role": "system", "content": "be brief"}, *USER]))
    assert block_texts(rollout) == [
        ("user", "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\nyes<|im_end|>"),
    ]


@pytest.mark.parametrize("closed", ["<|im_end|>", ""])
def test_the_next_prompt_keeps_the_sampled_tokens(closed: str) -> None:
    """Whether the model closed its turn or was cut short, the tokens in between are the template's."""
    client = RecordingClient("x <|pad|>y" + closed, "z<|im_end|>")
    session, rollout = open_session(client)

    async def converse() -> None:
        reply = await session.respond(USER)
        assert reply == "x y"
        assistant, tool = {"role": "assistant", "content": reply}, {"role": "tool", "content": "ok"}
        await session.respond([*USER, assistant, tool])

    asyncio.run(converse())
    opening = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nx <|pad|>y<|im_end|>\n"
    assert client.prompts[1] == encode(opening + "<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n")
    first = rollout.turns[0]
    known = first.known_ids.tolist()
    assert list(client.prompts[1][: len(known)]) == known
    assert block_texts(rollout) == [
        ("user", "<|im_start|>user\nabc<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\nx <|pad|>y<|im_end|>\n"),
        ("tool", "<|im_start|>tool\nok<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\nz<|im_end|>"),
    ]
    assert client.params[0].seed != client.params[1].seed


def test_a_rewritten_history_is_rendered_from_its_beginning() -> None:
    client = RecordingClient("x<|im_end|>", "z<|im_end|>")
    session, _ = open_session(client)
    other = [*USER, {"role": "assistant", "content": "not x"}, {"role": "user", "content": "so"}]

    async def converse() -> None:
        await session.respond(USER)
        await session.respond(other)

    asyncio.run(converse())
    assert client.prompts[1] == encode(
        "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nnot x<|im_end|>\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    )


def test_seeds_depend_on_run_rollout_and_turn_alone() -> None:
    seeds = []
    for rollout_id in ("g0-r0", "g0-r1", "g0-r0"):
        client = RecordingClient("x<|im_end|>")
        asyncio.run(open_session(client, rollout_id)[0].respond(USER))
        seeds.append(client.params[0].seed)
    assert seeds == [3401151068, 1598188705, 3401151068]


def test_a_completion_gets_the_room_that_is_left() -> None:
    num_prompt = len(encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"))
    client = RecordingClient("abcdefgh")
    session, rollout = open_session(client, max_model_len=num_prompt + 5)
    assert asyncio.run(session.respond(USER)) == "abcde"
    assert rollout.stop_reason == "length"


def test_a_prompt_without_room_is_refused_with_the_numbers() -> None:
    num_prompt = len(encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"))
    session, rollout = open_session(RecordingClient(), max_model_len=num_prompt)
    with pytest.raises(RolloutError, match=rf"{num_prompt} tokens .*max_model_len = {num_prompt};"):
        asyncio.run(session.respond(USER))
    assert rollout.turns == []


def test_an_aborted_turn_is_recorded_and_fails() -> None:
    async def abort_midway() -> Rollout:
        client = FakeInferenceClient(lambda prompt, generator: encode("abcdef"))
        session, rollout = open_session(client)
        turn = asyncio.create_task(session.respond(USER))
        while client.sampled.total() < 3:
            await asyncio.sleep(0)
        await client.abort(["run/g0/g0-r0/0"])
        with pytest.raises(RolloutError, match="cut the completion short after 3 tokens"):
            await turn
        return rollout

    rollout = asyncio.run(abort_midway())
    assert rollout.num_sampled == 3 and rollout.stop_reason == "abort"


def test_a_group_renders_its_prompt_once() -> None:
    prompts = PromptCache(ChatTemplate(TOKENIZER))
    first = prompts.render(USER)
    assert prompts.render(list(USER)) is first
    assert prompts.render([*USER, *USER]).token_ids == encode(
        "<|im_start|>user\nabc<|im_end|>\n" * 2 + "<|im_start|>assistant\n"
    )
    assert prompts.render(USER) is first


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate(tokenizer)


LETTERS = "abcdefghij"


def slow_client(delay_s: float = 0.05, **changes: Any) -> FakeInferenceClient:
    """Ten letters in `delay_s`."""
    return FakeInferenceClient(
        lambda prompt, generator: encode(LETTERS), delay_s=lambda generator: delay_s, **changes
    )


async def sampled(client: FakeInferenceClient, num_tokens: int) -> None:
    while client.sampled.total() < num_tokens:
        await asyncio.sleep(0.001)


def test_a_cancelled_call_records_what_was_sampled_before_it_goes_on() -> None:
    async def give_up() -> None:
        client = slow_client(delay_s=3.0, transit_s=0.002)
        session, rollout = open_session(client)
        call = asyncio.create_task(session.respond(USER))
        await sampled(client, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert 0 < rollout.num_sampled < 10 and rollout.stop_reason == "abort"
        assert client.delivered.total() == client.sampled.total() == rollout.num_sampled
        assert LETTERS.startswith(rollout.turns[0].text)

    asyncio.run(give_up())


def test_an_answer_on_its_way_is_received_even_if_the_caller_is_cancelled_twice() -> None:
    async def cancel_twice() -> None:
        client = slow_client(transit_s=0.05)
        session, rollout = open_session(client)
        call = asyncio.create_task(session.respond(USER))
        await sampled(client, 10)
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done() and rollout.turns == []
        with pytest.raises(asyncio.CancelledError):
            await call
        assert rollout.num_sampled == client.delivered.total() == 10

    asyncio.run(cancel_twice())


def test_a_request_that_its_abort_overtook_is_aborted_again() -> None:
    async def time_out_at_once() -> None:
        client = FakeInferenceClient(
            lambda prompt, generator: encode(LETTERS), delay_s=lambda generator: 60.0, transit_s=0.02
        )
        session, rollout = open_session(client)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.respond(USER), 0.001)
        assert rollout.stop_reason == "abort" and client.num_running == 0

    asyncio.run(time_out_at_once())


def test_a_server_that_never_answers_is_given_up() -> None:
    class Deaf(FakeInferenceClient):
        async def abort(self, request_ids: Sequence[str]) -> None:
            raise InferenceError("cannot be reached")

    async def time_out() -> None:
        client = Deaf(lambda prompt, generator: encode(LETTERS), delay_s=lambda generator: 60.0)
        session, rollout = open_session(client, patience_s=0.1)
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.respond(USER), 0.01)
        assert rollout.turns == [] and client.num_running == 0

    asyncio.run(time_out())


def test_concurrent_calls_have_seeds_and_ids_of_their_own() -> None:
    async def ask_three_times() -> None:
        client = RecordingClient("x<|im_end|>", "y<|im_end|>", "z<|im_end|>")
        session, rollout = open_session(client)
        replies = await asyncio.gather(*(session.respond(USER) for _ in range(3)))
        assert replies == ["x", "y", "z"] and len(rollout.turns) == 3
        assert client.request_ids == ["run/g0/g0-r0/0", "run/g0/g0-r0/1", "run/g0/g0-r0/2"]
        assert len({params.seed for params in client.params}) == 3

    asyncio.run(ask_three_times())


def test_closing_cuts_short_what_is_running_and_records_it() -> None:
    async def close_midway() -> None:
        client = slow_client()
        session, rollout = open_session(client)
        calls = [asyncio.create_task(session.respond(USER)) for _ in range(3)]
        await sampled(client, 6)
        await session.close()
        assert len(rollout.turns) == 3
        assert 6 <= rollout.num_sampled == client.delivered.total() == client.sampled.total() < 30
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RolloutError) and "cut the completion short" in str(outcome)
        with pytest.raises(RolloutError, match="the rollout is over; no further turn is sampled"):
            await session.respond(USER)

    asyncio.run(close_midway())


def test_a_second_try_goes_on_from_the_tokens_of_the_last_full_reply() -> None:
    """The reply `x <|pad|>y` reads `x y`: rendered again, it would not be what was sampled."""
    delays = [0.0, 60.0, 0.0]
    answers = iter(["x <|pad|>y<|im_end|>", "cut", "z<|im_end|>"])

    async def converse() -> None:
        client = FakeInferenceClient(
            lambda prompt, generator: encode(next(answers)), delay_s=lambda generator: delays.pop(0)
        )
        session, rollout = open_session(client)
        reply = await session.respond(USER)
        history = [*USER, {"role": "assistant", "content": reply}, {"role": "user", "content": "so"}]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.respond(history), 0.02)
        assert await session.respond(history) == "z"
        first, cut_short, again = rollout.turns
        known = first.known_ids.tolist()
        assert known[first.num_prompt_tokens :] == encode("x <|pad|>y<|im_end|>")
        prompt = again.tokens.prompt_ids.tolist()
        assert prompt[: len(known)] == known and prompt == cut_short.tokens.prompt_ids.tolist()

    asyncio.run(converse())


def test_tools_are_rendered_and_a_conversation_goes_on_only_with_the_same() -> None:
    template = "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}" + CHATML
    client = RecordingClient("x<|im_end|>", "y<|im_end|>", "z<|im_end|>")
    session, rollout = open_session(client, template=template)

    async def converse() -> None:
        first = await session.sample(USER, tools=[{"name": "f"}])
        history = [*USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "go"}]
        await session.sample(history, tools=[{"name": "f"}])
        await session.sample(history, tools=[{"name": "g"}])

    asyncio.run(converse())
    opening = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    rest = "x<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert client.prompts == [
        encode(f"[f]{opening}"),
        encode(f"[f]{opening}{rest}"),
        encode(f"[g]{opening}{rest}"),
    ]
    assert len(build_samples(rollout, run_id="run", advantage=1.0)) == 2


def test_a_reply_may_stand_in_the_conversation_in_another_form() -> None:
    """A call is parsed; the template is never asked to write it again."""
    calls = "{% if message['tool_calls'] %}{{ raise_exception('written again') }}{% endif %}"
    template = CHATML.replace("{% endfor %}", calls + "{% endfor %}", 1)
    client = RecordingClient("f()  <|im_end|>", "z<|im_end|>")
    session, _ = open_session(client, template=template)
    reply = {"role": "assistant", "content": "", "tool_calls": ["f"]}

    async def converse() -> None:
        await session.sample(USER, as_message=lambda turn: reply)
        await session.sample([*USER, reply, {"role": "tool", "content": "1"}])

    asyncio.run(converse())
    assert client.prompts[1] == encode(
        "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nf()  <|im_end|>\n"
        "<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_refuses_the_stand_in_renders_from_the_beginning() -> None:
    lacks_call = "messages | length > 1 and not messages[1]['tool_calls']"
    strict = f"{{% if {lacks_call} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}"
    client = RecordingClient("f()<|im_end|>", "z<|im_end|>")
    session, _ = open_session(client, template=strict + CHATML)
    reply = {"role": "assistant", "content": "f()", "tool_calls": ["f"]}

    async def converse() -> None:
        await session.sample(USER, as_message=lambda turn: reply)
        await session.sample([*USER, reply, {"role": "tool", "content": "1"}])

    asyncio.run(converse())
    assert TOKENIZER.decode(client.prompts[1]).startswith(
        "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nf()"
    )


def test_a_turn_that_is_withdrawn_stays_in_the_rollout() -> None:
    session, rollout = open_session(RecordingClient("x<|im_end|>", "x<|im_end|>"))

    async def converse() -> None:
        first, _ = await session.sample(USER), await session.sample(USER)
        session.withdraw(first)

    asyncio.run(converse())
    assert [turn.trainable for turn in rollout.turns] == [False, True]
    assert rollout.num_sampled == 4


def test_a_reply_may_be_kept_shorter_and_never_longer() -> None:
    client = RecordingClient("x<|im_end|>", "x<|im_end|>")
    session, _ = open_session(client)

    async def converse() -> None:
        await session.sample(USER, max_tokens=7)
        await session.sample(USER, max_tokens=70)

    asyncio.run(converse())
    assert [params.max_tokens for params in client.params] == [7, 20]


@dataclass
class Simple:
    """What a session does, by lists: every conversation is kept whole, and compared with each question."""

    chat: ChatTemplate
    known: list[tuple[list[Any], list[int], list[tuple[str, int, int]]]] = field(default_factory=list)

    def prompt(self, messages: list[Any]) -> tuple[list[int], list[tuple[str, int, int]]]:
        found = [each for each in reversed(self.known) if messages[: len(each[0])] == each[0] != messages]
        if found:
            before, tokens, spans = max(found, key=lambda each: len(each[0]))
            rendered = self.chat.continuation(messages, len(before) - 1)
            assert rendered is not None
            repeated = tokens[-1] in self.chat.end_of_turn_ids and rendered.token_ids[:1] == tokens[-1:]
            offset = len(tokens) - repeated
            (role, stop), *later = rendered.stops
            blocks = [*spans[:-1], (role, spans[-1][1], max(len(tokens), offset + stop))]
            token_ids = tokens[:offset] + rendered.token_ids
        else:
            rendered = self.chat.prompt(messages)
            blocks, later, offset, token_ids = [], rendered.stops, 0, rendered.token_ids
        for role, stop in later:
            blocks.append((role, blocks[-1][2] if blocks else 0, offset + stop))
        return token_ids, blocks

    def record(self, messages: list[Any], reply: str, tokens: list[int], blocks: list[Any]) -> list[Any]:
        """The blocks of the turn."""
        spans = [*blocks, ("assistant", blocks[-1][2], len(tokens))]
        self.known.append(([*messages, {"role": "assistant", "content": reply}], tokens, spans))
        return spans


@given(
    st.lists(
        st.tuples(st.integers(-1, 12), st.sampled_from("ab"), st.sampled_from(["x<|im_end|>", "x", "y", ""])),
        min_size=1,
        max_size=10,
    )
)
def test_conversations_that_branch_have_the_prompts_of_the_simple_way(
    moves: list[tuple[int, str, str]],
) -> None:
    """Each move goes on from an earlier conversation, or starts anew, and the environment edits in place."""
    client = RecordingClient(*(answer for _, _, answer in moves))
    session, rollout = open_session(client, max_model_len=5000)
    simple = Simple(session.chat)

    async def converse() -> None:
        for parent, said, answer in moves:
            before = simple.known[parent][0] if 0 <= parent < len(simple.known) else []
            messages = [*before, {"role": "user", "content": said}]
            token_ids, blocks = simple.prompt(messages)
            given = copy.deepcopy(messages)
            text = await session.respond(given)
            given[0]["content"] = "edited"
            assert client.prompts[-1] == token_ids
            tokens = [*token_ids, *encode(answer)]
            spans = simple.record(messages, text, tokens, blocks)
            turn = rollout.turns[-1]
            assert turn.known_ids.tolist() == tokens and turn.role_spans == spans

    asyncio.run(converse())


def converse(num_turns: int, num_sampled: int) -> Rollout:
    """A rollout whose environment answers each reply; the session and all that it knew are gone."""
    client = FakeInferenceClient(lambda prompt_ids, generator: encode("r" * (num_sampled - 1) + "<|im_end|>"))
    chat = ChatTemplate(TOKENIZER)
    rollout = Rollout("g0-r0", "g0", Example("0", USER), "env", 0.7)
    session = Session(rollout, Sampler(client, chat, "run", 11, 0.7, num_sampled, 10**6), PromptCache(chat))

    async def talk() -> None:
        messages = []
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{number:048}"})
            messages.append({"role": "assistant", "content": await session.respond(messages)})
        await session.close()

    asyncio.run(talk())
    return rollout


def test_a_rollout_of_200_turns_holds_what_its_tokens_take() -> None:
    """Texts are left aside; `test_samples` has the same for turns that no session made."""
    num_turns, num_sampled = 200, 100
    rollout = converse(num_turns, num_sampled)
    texts = sum(sys.getsizeof(turn.text) + len(turn.trace.messages) for turn in rollout.turns)
    held = size_in_process(rollout.turns) - texts
    num_tokens = rollout.turns[-1].num_known
    tokens_bytes = 4 * num_tokens + 4 * num_turns * num_sampled + 2 * num_tokens // 8  # ids, logprobs, masks
    assert num_tokens == 33_599
    assert held <= 1.5 * tokens_bytes, (held, tokens_bytes)
