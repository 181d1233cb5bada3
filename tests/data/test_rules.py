"""The rules of samples, for many sequences at once and for both forms of masks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data import TokenTable
from pellucid.data.rows import BitRows, Rows
from pellucid.data.rules import check_rules
from pellucid.errors import ColumnError


def columns(**changes) -> dict[str, Rows]:
    """Three sequences of 3, 2 and 2 tokens; the last token of each is sampled and trainable."""
    arrays = {
        "token_ids": np.arange(7, dtype=np.uint32),
        "loss_mask": np.array([False, False, True, False, True, False, True]),
        "sampled": np.array([False, False, True, False, True, False, True]),
        "inference_logprobs": np.array([-0.5, -0.25, -0.125], np.float32),
        "policy_versions": np.zeros(3, np.int32),
        "env_name": np.array(["a", "b", "c"], object),
        "training_mode": np.array(["rl", "sft", "rl"], object),
        **changes,
    }
    return dict(TokenTable(np.array([3, 2, 2]), arrays).columns)


def as_bits(rows: dict[str, Rows]) -> dict[str, Rows]:
    masks = {}
    for name in ("loss_mask", "sampled"):
        parts = np.split(rows[name].array, np.cumsum(rows[name].lengths)[:-1])
        bits = np.concatenate([np.packbits(part, bitorder="little") for part in parts])
        masks[name] = BitRows(bits, rows[name].lengths)
    return {**rows, **masks}


def cells(*spans) -> np.ndarray:
    made = np.empty(len(spans), object)
    made[:] = spans
    return made


CASES = [
    ({"env_name": np.array(["a", "", "c"], object)}, "sequence 1: env_name is empty"),
    (
        {"loss_mask": np.array([False, False, True, False, True, True, True])},
        "sequence 2: loss_mask marks the first token trainable",
    ),
    (
        {"loss_mask": np.array([False, True, True, False, True, False, True])},
        "sequence 0: loss_mask marks token 1 trainable, but it was not sampled",
    ),
    (
        {"inference_logprobs": np.array([-0.5, -0.25, np.nan], np.float32)},
        "sequence 2: inference_logprobs of token 1 is nan",
    ),
    (
        {"inference_logprobs": np.array([-0.5, -120, -1], np.float32)},
        "sequence 1: inference_logprobs of token 1 is -120; .* one below -44 overflows .* unset ",
    ),
    (
        {"inference_logprobs": np.array([-0.5, 0.02, -1], np.float32)},
        "sequence 1: inference_logprobs of token 1 is 0.02; a logprob is 0 at most",
    ),
    (
        {"teacher_logprobs": np.array([np.nan, -1, -np.inf, np.nan, -1, np.nan, -1], np.float32)},
        "sequence 0: teacher_logprobs of token 2 is -inf; a token whose teacher logprob is not finite",
    ),
    (
        {"teacher_logprobs": np.array([np.nan, -1, -90, np.nan, -1, np.nan, -9999], np.float32)},
        "sequence 2: teacher_logprobs of token 1 is -9999; .* -9999 is how engines write -inf",
    ),
    (
        {"teacher_logprobs": np.array([np.nan, -1, -90, np.nan, 3e38, np.nan, -1], np.float32)},
        "sequence 1: teacher_logprobs of token 1 is 3e[+]38; a logprob is 0 at most",
    ),
    (
        {"training_mode": np.array(["rl", "rl", "opd"], object)},
        "sequence 2: training_mode is opd; opd needs teacher_logprobs on every trainable token",
    ),
    (
        {
            "training_mode": np.array(["rl", "opd", "opd"], object),
            "teacher_logprobs": np.array([np.nan, -1, np.nan, np.nan, -1, -1, np.nan], np.float32),
        },
        "sequence 2: teacher_logprobs of token 1 is nan; opd needs teacher_logprobs",
    ),
    (
        {"policy_versions": np.array([0, -1, -(2**31)], np.int32)},
        "sequence 2: policy_versions holds -2147483648; a version is 0 or more, or -1",
    ),
    (
        {"env_name": np.array(["a", "b\x1b[2J", "c"], object)},
        r"sequence 1: env_name is 'b\\x1b\[2J', which cannot be printed",
    ),
    *(
        (
            {"run_id": np.array(["a", name, "r" * 200], object)},
            rf"sequence 1: run_id is '{shown}'; the name of a run has at most 200 characters, no `/`",
        )
        for name, shown in [("../run", "../run"), ("\x1b[2J", r"\\x1b\[2J"), ("r" * 201, "r" * 200)]
    ),
    (
        {
            "sample_id": np.array(["s", "", "s"], object),
            "rollout_id": np.array(["r", "r", "r"], object),
        },
        "sequence 2: sample_id is 's', which another sample has, too",
    ),
    (
        {
            "rollout_id": np.array(["r", "r", "r"], object),
            "group_id": np.array(["g", "g", "h"], object),
        },
        "sequence 2: rollout_id is 'r', of group 'h' here and of 'g' before",
    ),
    (
        {"role_spans": cells([("user", 0, 2)], [], [("user", 0, 1), ("assistant", 0, 2)])},
        "sequence 2: role_spans has 'assistant' from 0 to 2 of 2 tokens; roles .* come in order",
    ),
    ({"role_spans": cells([], [("user", 0, 3)], [])}, "sequence 1: role_spans has 'user' from 0 to 3 of 2"),
    ({"role_spans": cells([], [("user", -1, 1)], [])}, "sequence 1: role_spans has 'user' from -1 to 1 of 2"),
    ({"role_spans": cells([("x" * 65, 0, 1)], [], [])}, "sequence 0: role_spans has 'x+' from 0 to 1"),
    (
        {"role_spans": cells([("user", 0, 2**64)], [], [])},
        "role_spans holds a number that is no token's",
    ),
    (
        {"advantages": np.array([1, -2e19, 1], np.float32)},
        "sequence 1: advantages of token 1 is -2e[+]19; the loss would overflow",
    ),
    ({"advantage": np.array([1, 1, 3e38], np.float32)}, "sequence 2: advantage is 3e[+]38; the loss would"),
    (
        {"temperatures": np.array([0.5, np.inf, 1], np.float32)},
        "sequence 1: temperatures is inf; training needs numbers above 0",
    ),
    ({"temperature": np.array([1, 1, -2], np.float32)}, "sequence 2: temperature is -2"),
    ({"reward": np.array([1, np.inf, 0], np.float32)}, "sequence 1: reward is inf"),
    ({"advantage": np.array([1, 0, np.nan], np.float32)}, "sequence 2: advantage is nan"),
    (
        {"env_name": np.array(["a", "b", "all"], object)},
        "sequence 2: env_name is 'all', which stands for all",
    ),
]


@pytest.mark.parametrize("form", [dict, as_bits], ids=["spans", "bits"])
@pytest.mark.parametrize(("changes", "message"), CASES)
def test_the_first_sequence_that_breaks_a_rule_is_named(form, changes, message) -> None:
    with pytest.raises(ColumnError, match=message):
        check_rules(form(columns(**changes)))


@pytest.mark.parametrize("form", [dict, as_bits], ids=["spans", "bits"])
def test_what_is_allowed(form) -> None:
    """Sft trains on what nobody sampled; on tokens that do not train numbers may be anything.

    A teacher need not know every token, and may find one that was sampled as unlikely as it likes. A reward
    of NaN is one that nobody gave.
    """
    check_rules(form(columns()))
    check_rules(form(columns(reward=np.array([1, np.nan, 0], np.float32))))
    check_rules(
        form(
            columns(
                loss_mask=np.array([False, False, False, False, True, False, True]),
                sampled=np.array([False, False, True, False, False, True, True]),
                training_mode=np.array(["rl", "sft", "opd"], object),
                inference_logprobs=np.array([-np.inf, 3e38, -44], np.float32),
                policy_versions=np.array([-1, 2**31 - 1, 0], np.int32),
                rollout_id=np.array(["r", "", ""], object),
                sample_id=np.array(["", "s", "s"], object),
                role_spans=cells([("user", 0, 0), ("user", 0, 2), ("assistant", 2, 3)], [], [("tool", 1, 1)]),
                advantages=np.array([np.nan, np.inf, 1e19], np.float32),
                teacher_logprobs=np.array([np.nan, -1, -np.inf, np.nan, np.nan, -9999, -9998], np.float32),
            )
        )
    )


@pytest.mark.parametrize("form", [dict, as_bits], ids=["spans", "bits"])
def test_what_another_trainer_trained_on_may_be_of_any_size_but_has_to_be_finite(form) -> None:
    huge = {"inference_logprobs": np.array([-3e38] * 3, np.float32), "advantage": np.full(3, 3e38)}
    check_rules(form(columns(**huge)), is_trained=True)
    with pytest.raises(ColumnError, match="inference_logprobs of token 1 is nan"):
        check_rules(form(columns(inference_logprobs=np.array([-1, np.nan, -1], np.float32))), is_trained=True)


def test_many_sequences_with_odd_numbers_are_judged_together() -> None:
    """Numbers of tokens that do not train may be NaN, in thousands of sequences."""
    num = 20_000
    table = TokenTable(
        np.full(num, 3),
        {
            "token_ids": np.zeros(3 * num, np.uint32),
            "loss_mask": np.tile([False, False, True], num),
            "sampled": np.tile([False, True, True], num),
            "inference_logprobs": np.tile(np.array([np.nan, -1], np.float32), num),
            "policy_versions": np.zeros(2 * num, np.int32),
            "env_name": np.array(["a"] * num, object),
        },
    )
    columns = table.columns
    started_s = time.process_time()
    check_rules(columns)
    assert time.process_time() - started_s < 2e-6 * num, "30 µs each when they were judged one by one"
    values = table["inference_logprobs"].copy()
    values[-1] = np.nan
    with pytest.raises(ColumnError, match=f"sequence {num - 1}: inference_logprobs of token 2 is nan"):
        check_rules(TokenTable(table.lengths, {**table.columns, "inference_logprobs": values}).columns)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.data())
def test_spans_and_bits_judge_alike(tokens, data) -> None:
    """Against the rule spelled out token by token."""
    cut = data.draw(st.integers(1, len(tokens)))
    lengths = np.array([length for length in (cut, len(tokens) - cut) if length])
    loss_mask, sampled = (np.array(values) for values in zip(*tokens, strict=True))
    loss_mask[np.cumsum(lengths) - lengths] = False
    rows = dict(
        TokenTable(
            lengths,
            {
                "token_ids": np.zeros(len(tokens), np.uint32),
                "loss_mask": loss_mask,
                "sampled": sampled,
                "inference_logprobs": np.zeros(sampled.sum(), np.float32),
                "policy_versions": np.zeros(sampled.sum(), np.int32),
                "env_name": np.array(["a"] * len(lengths), object),
            },
        ).columns
    )
    holds = not (loss_mask & ~sampled).any()
    for form in (dict, as_bits):
        try:
            check_rules(form(rows))
            assert holds
        except ColumnError as error:
            assert not holds and "was not sampled" in str(error)
