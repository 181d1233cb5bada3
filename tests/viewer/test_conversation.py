"""Rollouts of several turns: what the reader makes of a file, and how the page and the terminal show it."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pellucid.errors import DataError
from pellucid.viewer import rollouts, terminal
from pellucid.viewer.access import Exports
from pellucid.viewer.rollouts import SavedRollouts

ARGUMENTS = {
    "query": "what is the capital of Norway, and how cold is it there?",
    "limits": {"pages": 3, "sites": ["a.example", "b.example"]},
}
CALL = {"id": "c0", "type": "function", "function": {"name": "search", "arguments": json.dumps(ARGUMENTS)}}


def turn(text: str, prompt: int, tokens: int, **more: Any) -> dict[str, Any]:
    own = {"text": text, "num_prompt_tokens": prompt, "num_tokens": tokens, "finish_reason": "stop"}
    return own | {"policy_versions": [[3, tokens]], "wait_s": 0.5} | more


def agent(hostile: str, **changes: Any) -> dict[str, Any]:
    """Four turns: a call, an answer after the tool's, one after history was rewritten, and a judge's.

    Times: 0.5 s each in the engine, 0.25 s in the tool, 0.1 s before the summary, 1 s in the reward.
    """
    return {
        "schema": 2,
        "group_id": "s1g0",
        "rollout_id": "s1g0-r1",
        "env_name": "math",
        "example_id": "e0",
        "outcome": "sent",
        "reason": "",
        "error": None,
        "reward": 1.2,
        "advantage": 0.5,
        "metrics": {"right": 1.0, "brief": 0.4, "calls": 1.0},
        "weights": {"right": 1.0, "brief": 0.5},
        "num_tokens": 10,
        "stop_reason": "stop",
        "messages": [{"role": "system", "content": "Search first."}, {"role": "user", "content": "Oslo?"}],
        "trajectory": [
            turn(
                f"<think>hm</think>let me look<tool_call>{json.dumps(ARGUMENTS)}</tool_call>",
                10,
                4,
                tool_calls=[CALL],
            ),
            turn(
                "it is cold",
                20,
                3,
                start_s=0.75,
                messages=[
                    {
                        "role": "tool",
                        "tool_call_id": "c0",
                        "name": "search",
                        "content": f"{hostile} \u202ekcab",
                    }
                ],
            ),
            turn(
                "12 degrees",
                12,
                2,
                start_s=1.35,
                keeps=1,
                messages=[{"role": "user", "content": "Oslo, in degrees?"}],
                sample=1,
                policy_versions=[[3, 1], [4, 1]],
            ),
            turn(
                "yes",
                5,
                1,
                start_s=1.85,
                after=-1,
                keeps=0,
                messages=[{"role": "user", "content": "Right?"}],
                sample=2,
                trainable=False,
            ),
        ],
        "time_s": 3.35,
    } | changes


def old(number: int) -> dict[str, Any]:
    """A rollout of two turns as files had it before `schema`."""
    told = [
        {
            "text": text,
            "num_prompt_tokens": 6,
            "num_tokens": 4,
            "finish_reason": "stop",
            "policy_versions": [[3, 4]],
        }
        for text in ("first", "second")
    ]
    return {
        "rollout_id": f"old{number}",
        "group_id": "g9",
        "outcome": "zero_advantage",
        "reward": 0.5,
        "messages": [{"role": "user", "content": "hi"}],
        "trajectory": told,
    }


@pytest.fixture
def read(tmp_path: Path, save_rollouts: Any) -> Any:
    def rows(*saved: Any, **options: Any) -> list[dict[str, Any]]:
        save_rollouts(tmp_path, 1, *saved)
        return SavedRollouts(tmp_path).rows(1, **options)

    return rows


def test_turns_say_what_they_go_on_from(read: Any, hostile: str) -> None:
    [row] = read(agent(hostile))
    assert [(each["role"], each["text"]) for each in row["messages"]][:4] == [
        ("system", "Search first."),
        ("user", "Oslo?"),
        ("assistant", f"<think>hm</think>let me look<tool_call>{json.dumps(ARGUMENTS)}</tool_call>"),
        ("tool", f"{hostile} \u202ekcab"),
    ]
    assert row["messages"][2]["calls"] == [("search", json.dumps(ARGUMENTS), "c0")]
    assert (row["messages"][3]["name"], row["messages"][3]["id"]) == ("search", "c0")
    names = ("first", "reply", "after", "keeps", "prompt", "tokens", "sample", "trains", "start", "wait")
    assert [tuple(turn[name] for name in names) for turn in row["turns"]] == [
        (2, 2, -1, None, 10, 4, 0, True, 0, 0.5),
        (3, 4, 0, None, 20, 3, 0, True, 0.75, 0.5),
        (5, 6, 1, 1, 12, 2, 1, True, 1.35, 0.5),
        (7, 8, -1, 0, 5, 1, 2, False, 1.85, 0.5),
    ]
    assert row["turns"][2]["versions"] == [[3, 1], [4, 1]]
    assert (row["isConversation"], row["cut"], row["weights"], row["time"]) == (
        True,
        False,
        {"right": 1.0, "brief": 0.5},
        3.35,
    )


def test_older_files_open_without_what_they_lack(read: Any) -> None:
    [row] = read(old(0))
    assert [each["text"] for each in row["messages"]] == ["hi", "first", "second"]
    assert [(each["first"], each["reply"], each["after"], each["wait"]) for each in row["turns"]] == [
        (1, 1, -1, None),
        (2, 2, 0, None),
    ]
    assert (row["isConversation"], row["weights"], row["time"]) == (False, {}, None)


@pytest.mark.parametrize(
    "damage",
    [
        {"after": 7},
        {"after": "x"},
        {"keeps": -1},
        {"messages": "x", "tool_calls": {"a": 1}},
        {"tool_calls": [{"name": "f", "arguments": json.loads("[" * 600 + "]" * 600)}]},
        {"messages": [3, {"role": 4, "content": [{"text": "t"}, 5]}], "tool_calls": [1, {"function": 2}]},
        {"sample": "x", "start_s": "y", "wait_s": [], "policy_versions": [[1], 2, ["a", "b"]]},
    ],
)
def test_a_damaged_turn_is_shown_as_far_as_it_goes(read: Any, hostile: str, damage: dict[str, Any]) -> None:
    record = agent(hostile)
    record["trajectory"][1] |= damage
    [row] = read(record)
    assert len(row["turns"]) == 4 and -1 <= row["turns"][1]["after"] <= 0
    assert row["messages"][row["turns"][1]["reply"]]["text"] == "it is cold"
    json.dumps(row)


def test_long_texts_are_shortened_in_the_list_and_whole_alone(
    tmp_path: Path, read: Any, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(str(digit % 10) for digit in range(50_000))
    long = agent(hostile, messages=[{"role": "user", "content": text}])
    rows = read(old(0), long)
    left_out = f"\n… {50_000 - rollouts.MAX_TEXT:,} characters are left out …\n"
    assert rows[1]["messages"][0]["text"] == text[:10_000] + left_out + text[-10_000:]
    assert [row["cut"] for row in rows] == [False, True]
    alone = SavedRollouts(tmp_path).row(1, rows[1]["number"])
    assert (alone["messages"][0]["text"], alone["cut"]) == (text, False)
    small = read(*[long] * 5, max_text=20_000)
    sizes = [len(row["messages"][0]["text"]) for row in small]
    assert sum(sizes) < 21_000 and min(sizes) > 2_000
    assert small[0]["messages"][0]["text"].startswith(text[:1000])
    with pytest.raises(DataError, match="step 1 has no saved rollout 7"):
        SavedRollouts(tmp_path).row(1, 7)


def test_the_terminal_shows_the_last_conversation(tmp_path: Path, save_rollouts: Any, hostile: str) -> None:
    save_rollouts(tmp_path, 1, agent(hostile))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "rl.toml").write_text("")
    out = StringIO()
    terminal.show(Exports(tmp_path), tokenizer=None, record_index=0, console=Console(file=out, width=140))
    text = out.getvalue()
    assert "rollout s1g0-r1 · 4 turns · reward 1.2 · sent" in text
    assert "turn 3 · 12 in, 2 out · engine 0.5 s · version 3, 4 · stop · history rewritten" in text
    assert "turn 4 · 5 in, 1 out · engine 0.5 s · version 3 · stop · another conversation" in text
    assert "⟨U+202E⟩" in text and "\u202e" not in text
    assert "right 1 × 1" in text and "brief 0.4 × 0.5" in text and "calls 1" in text


# In a browser


@pytest.fixture(scope="module")
def talked(made_run: Any, save_rollouts: Any, hostile: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with tokens: its record `s1g0-r1` as a conversation, a retried rollout, one of an old run."""
    folder = tmp_path_factory.mktemp("talked") / "talked"
    shutil.copytree(made_run.folder, folder)
    failed = agent(
        hostile, rollout_id="s1g0-r2", outcome="failed_rollout", error="ValueError: no", reward=None
    )
    again = agent(hostile, rollout_id="s1g0-r2~1", outcome="stale", reason="too old")
    save_rollouts(folder, 1, agent(hostile), failed, again, old(0))
    evaluated = agent(hostile, rollout_id="eval-x-v1-0-r0", outcome="eval")
    (folder / "rollouts" / "step_1" / "eval_rollouts.jsonl").write_text(json.dumps(evaluated) + "\n")
    return folder


OPEN = "#rollouts?rollout=1%2Fs1g0-r1&talk=1"


@pytest.fixture(scope="module")
def address(talked: Path, page_of: Any) -> str:
    return str(page_of(talked))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["page", "server"])
def test_a_conversation_by_role_with_calls_times_and_parts_of_the_reward(
    visit: Any, address: str, served: Any, talked: Path, kind: str, hostile: str
) -> None:
    page = visit((address if kind == "page" else served(talked)) + OPEN, ".talk li[data-turn='3']")
    roles = page.locator(".talk > li > .talk-message .role").all_inner_texts()
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    call = page.locator(".talk > li > .talk-message .talk-call")
    assert call.locator("code").inner_text() == "search"
    assert call.locator("pre").inner_text() == (
        '{\n  "query": "what is the capital of Norway, and how cold is it there?",\n'
        '  "limits": {"pages": 3, "sites": ["a.example", "b.example"]}\n}'
    )
    first = page.locator("li[data-turn='0'] .talk-text")
    assert first.locator("summary").inner_text() == "thinking, 2 characters"
    assert first.locator("> pre").inner_text() == "let me look"
    assert page.locator("li[data-turn='1'] .talk-tool pre").inner_text() == f"{hostile} ⟨U+202E⟩kcab"
    told = [text.removesuffix("tokens").split() for text in page.locator(".talk-turn").all_inner_texts()]
    assert [" ".join(words) for words in told] == [
        "turn 1 10 in, 4 out · engine 500 ms · version 3 · stop · sample 0",
        "turn 2 20 in, 3 out · engine 500 ms · environment before 250 ms · version 3 · stop · sample 0",
        "turn 3 12 in, 2 out · engine 500 ms · environment before 100 ms · versions 3 (1), 4 (1) · stop"
        " · sample 1",
        "turn 4 5 in, 1 out · engine 500 ms · version 3 · stop · sample 2 · not trained",
    ]
    parts = [row.split("\t") for row in page.locator(".talk-side tbody tr").all_inner_texts()]
    assert parts == [
        ["right", "1", "× 1", "+1.000"],
        ["brief", "0.4", "× 0.5", "+0.200"],
        ["reward", "", "", "1.200"],
    ]
    assert page.locator(".talk-side .details-rule").count() == 0  # the parts add up
    side = page.locator(".talk-side dl").all_inner_texts()
    assert side[0].split() == ["calls", "1"]
    assert side[1].split("\n")[1::2] == ["2.0 s", "350 ms", "1.0 s"]
    assert "3.4 s: 2.0 s engine, 1.4 s environment" in page.locator(".talk-view .facts").inner_text()


@pytest.mark.slow
def test_rewritten_history_shows_where_and_what_changed(visit: Any, address: str) -> None:
    page = visit(address + OPEN, ".talk li[data-turn='3']")
    branch = page.locator("li[data-turn='2'] .talk-branch")
    assert "History rewritten" in branch.inner_text()
    assert "Of 5 messages of turn 2, the first stays; 4 messages are replaced." in branch.inner_text()
    assert "a sample of their own, number 1" in branch.inner_text()
    # The user's message is in place of another one; the three after it are gone.
    assert branch.locator("> details > summary").inner_text() == "3 messages left out"
    diff = page.locator("li[data-turn='2'] > .talk-user pre.diff")
    assert diff.inner_text().endswith("Oslo, in degrees?")
    assert (diff.locator("del").count(), diff.locator("ins").inner_text()) == (0, ", in degrees")
    assert "Another conversation" in page.locator("li[data-turn='3'] .talk-branch").inner_text()
    assert page.locator("li[data-turn='1'] .talk-branch").count() == 0
    places = page.evaluate("() => $views_conversation.conversationOf($main.app.view.conversation.one, 2)")
    assert places == [0, 5, 6]


@pytest.mark.slow
def test_a_turn_leads_to_its_tokens_and_a_token_to_its_turn(visit: Any, address: str, made_run: Any) -> None:
    page = visit(address + OPEN, ".talk li[data-turn='3']")
    page.get_by_role("button", name="tokens of turn 2").click()
    page.wait_for_selector(".record-view .token.pinned")
    assert page.evaluate("() => [$main.app.state.step, $main.app.state.record, $main.app.state.token]") == [
        1,
        1,
        20,
    ]
    assert made_run.steps[1][1]["rollout_id"] == "s1g0-r1"
    page.evaluate("() => $main.app.go({ token: 11 })")  # between the first reply's tokens
    page.get_by_role("button", name="conversation").click()
    page.wait_for_selector(".talk li[data-turn='0'][aria-current]")
    assert page.evaluate("() => $main.app.state.rollout") == "1/s1g0-r1"
    page.go_back()
    page.evaluate("() => $main.app.go({ token: 14 })")  # what the tool said belongs to the turn that reads it
    page.keyboard.press("v")
    page.wait_for_selector(".talk li[data-turn='1'][aria-current]")
    page.get_by_role("button", name="tokens of turn 4").click()
    page.wait_for_selector(".flash:has-text('No token of this turn trains')")
    page.evaluate("() => $main.app.go({ view: 'group', record: 1 })")
    page.locator(".member[aria-current]").get_by_role("button", name="conversation").click()
    page.wait_for_selector(".talk li[data-turn='3']")


@pytest.mark.slow
def test_keys_attempts_and_older_files(visit: Any, address: str) -> None:
    page = visit(f"{address}#rollouts?rollout=1%2Fs1g0-r1", ".rollouts-view tr[data-row] >> nth=4")
    page.keyboard.press("v")
    page.wait_for_selector(".talk li[data-turn='3']")
    assert "1 of 5" in page.locator(".talk-view h2").inner_text()
    page.keyboard.press("n")
    page.wait_for_selector(".talk li[data-turn='0'][aria-current]")
    page.keyboard.press("j")
    page.wait_for_selector(".talk-view h2:has-text('s1g0-r2')")
    page.keyboard.press("j")
    page.wait_for_selector(".talk-view h2:has-text('s1g0-r2~1')")
    assert "Attempt 2 of 2, 1 failed" in page.locator(".attempts").inner_text()
    page.get_by_role("button", name="1 failed").click()
    page.wait_for_selector(".talk-view .details-rule:has-text('ValueError: no')")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector(".talk-view h2:has-text('old0')")
    assert "This run saved replies only" in page.locator(".talk-view header").inner_text()
    assert page.locator(".talk-time").count() == 0
    page.keyboard.press("j")
    page.wait_for_selector(".talk-view h2:has-text('eval-x-v1-0-r0')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".rollouts-view tr[data-row]")
    assert page.evaluate("() => $main.app.state.talk") is False
    page.keyboard.press("v")
    page.wait_for_selector(".talk li[data-turn]")
    page.evaluate("() => $main.app.openState('stale')")  # a band of the flow leads to a list
    page.wait_for_selector(".rollouts-view tr[data-row]")
    assert page.locator(".rollouts-view tr[data-row]").count() == 1
    assert page.locator(".talk-view").count() == 0


@pytest.mark.slow
def test_without_an_export_a_turn_says_how_to_have_one(
    visit: Any, page_of: Any, save_rollouts: Any, hostile: str, tmp_path: Path
) -> None:
    run = tmp_path / "bare"
    (run / "configs").mkdir(parents=True)
    (run / "configs" / "rl.toml").write_text("")
    save_rollouts(run, 1, agent(hostile))
    page = visit(page_of(run) + OPEN, ".talk li[data-turn='3']")
    page.get_by_role("button", name="tokens of turn 1").click()
    page.wait_for_selector(".notice:has-text('No tokens are exported')")
    assert "--export" in page.locator(".notice").inner_text()


@pytest.mark.slow
def test_long_messages_are_folded_and_the_server_has_them_whole(
    visit: Any, served: Any, save_rollouts: Any, hostile: str, tmp_path: Path
) -> None:
    text = "word " * 10_000
    messages = [{"role": "user", "content": text}]
    run = tmp_path / "long"
    (run / "configs").mkdir(parents=True)
    (run / "configs" / "rl.toml").write_text("")
    save_rollouts(run, 1, agent(hostile, messages=messages))
    page = visit(served(run) + OPEN, ".talk-opening button")
    assert page.locator(".talk-opening pre").inner_text() == text[:1200]
    button = page.locator(".talk-opening button")
    assert button.inner_text() == "48,800 more characters"
    button.press("Enter")
    assert page.locator(".talk-opening pre").evaluate("(node) => node.textContent") == text
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "false"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_conversation_fits_and_is_accessible(visit: Any, address: str, violations: Any, theme: str) -> None:
    for width in (1440, 390):
        look = {"color_scheme": theme, "viewport": {"width": width, "height": 844}, "bypass_csp": True}
        page = visit(address + OPEN, ".talk li[data-turn='3']", **look)
        wide = page.evaluate(
            "() => [document.documentElement.scrollWidth, document.querySelector('#main').scrollWidth]"
        )
        assert max(wide) <= width
        page.evaluate("() => document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        assert violations(page) == []
