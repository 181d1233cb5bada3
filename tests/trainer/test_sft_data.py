"""A data set as samples, what is held out of it, and the order in which it is trained on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.config import SFTConfig
from pellucid.config.trainer import ValidationConfig
from pellucid.errors import ConfigError, DataError
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer.batches import DatasetBatches
from pellucid.trainer.sft import DataSize, Row, hold_out, load_data, read_samples


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def rows(*words):
    """Prompts of 3 tokens; a completion has a token per letter and its end."""
    return [
        Row(f"data.jsonl:{number}", str(number), {"prompt": "abc", "completion": word})
        for number, word in enumerate(words, start=1)
    ]


def sft(tmp_path, words, seq_len=64, **data) -> SFTConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(dict(row.record)) + "\n" for row in rows(*words)))
    return SFTConfig.model_validate(
        {
            "output_dir": tmp_path / "demo",
            "model": {"name": "m"},
            "seq_len": seq_len,
            "data": {"path": path, **data},
        }
    )


def completions(samples, tokenizer) -> list[str]:
    return [
        tokenizer.decode(sample.arrays["token_ids"].array()[3:], skip_special_tokens=True)
        for sample in samples
    ]


def test_a_sample_carries_its_place_and_its_roles(tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (sample,) = read_samples([Row("x:7", "7", {"messages": messages})], tokenizer, run_id="demo")
    assert sample.values == {
        "role_spans": [("user", 0, 9), ("assistant", 9, 23)],
        "env_name": "sft",
        "run_id": "demo",
        "example_id": "7",
        "sample_id": "7",
        "training_mode": "sft",
    }
    assert (sample.length, sample.num_sampled, sample.num_trainable) == (23, 0, 2)


def test_an_error_names_the_row(tokenizer) -> None:
    with pytest.raises(DataError, match="^data.jsonl:2: `completion` is 3; expected"):
        read_samples([*rows("x"), Row("data.jsonl:2", "2", {"prompt": "a", "completion": 3})], tokenizer)


def test_all_examples_train_unless_some_are_for_validation(tmp_path, tokenizer) -> None:
    data = load_data(sft(tmp_path, ["ab", "cd"]), tokenizer)
    assert (completions(data.train, tokenizer), data.validation) == (["ab", "cd"], [])
    assert {sample.values["run_id"] for sample in data.train} == {"demo"}


def test_a_validation_set_of_its_own(tmp_path, tokenizer) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "abc", "completion": "z"}))
    titles = []

    def track(rows, title):
        titles.append((title, len(rows)))
        return rows

    data = load_data(sft(tmp_path, ["ab", "cd"], validation={"path": other}), tokenizer, track)
    assert (completions(data.train, tokenizer), completions(data.validation, tokenizer)) == (
        ["ab", "cd"],
        ["z"],
    )
    assert titles == [("data", 2), ("data.validation", 1)]


def test_held_out_examples_do_not_depend_on_the_seed(tmp_path, tokenizer) -> None:
    words = [chr(97 + index) for index in range(20)]
    first = load_data(sft(tmp_path, words, validation={"fraction": 0.2}), tokenizer)
    held = completions(first.validation, tokenizer)
    assert len(held) == 4
    assert sorted(held + completions(first.train, tokenizer)) == words
    assert completions(first.train, tokenizer) == sorted(completions(first.train, tokenizer))
    other_seed = sft(tmp_path, words, validation={"num_examples": 4}).model_copy(update={"seed": 5})
    assert completions(load_data(other_seed, tokenizer).validation, tokenizer) == held


@given(st.integers(2, 200), st.floats(0.001, 0.999))
def test_a_fraction_keeps_at_least_one(total, fraction) -> None:
    try:
        data = hold_out(list(range(total)), ValidationConfig(fraction=fraction))  # type: ignore[arg-type]
    except ConfigError:
        assert round(total * fraction) >= total
        return
    assert sorted(data.train + data.validation) == list(range(total))  # type: ignore[type-var]
    assert len(data.validation) == max(1, round(total * fraction))


def test_something_has_to_be_left_to_train_on() -> None:
    with pytest.raises(ConfigError, match="data.validation.num_examples = 3 leaves nothing of 3 examples"):
        hold_out([1, 2, 3], ValidationConfig(num_examples=3))  # type: ignore[list-item]


def test_sizes_under_a_limit(tokenizer) -> None:
    """Lengths 6, 8 and 10; `seq_len` = 7 cuts two of them."""
    samples = read_samples(rows("ab", "abcd", "abcdef"), tokenizer)
    assert DataSize.of(samples, 64) == DataSize(3, 24, 15, num_cut=0, num_mute=0)
    assert DataSize.of(samples, 7) == DataSize(3, 20, 11, num_cut=2, num_mute=0)
    assert DataSize.of(samples, 3) == DataSize(3, 9, 0, num_cut=3, num_mute=3)


def test_a_limit_that_leaves_no_loss_at_all_is_refused(tmp_path, tokenizer) -> None:
    with pytest.raises(DataError, match="data: no example has a trainable token within .*seq_len = 3; raise"):
        load_data(sft(tmp_path, ["ab"], seq_len=3), tokenizer)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    forwards = [DatasetBatches(range(10), 4, seed=1).indices(step) for step in range(20)]
    backwards = [DatasetBatches(range(10), 4, seed=1).indices(step) for step in reversed(range(20))]
    assert forwards == backwards[::-1]
    one = DatasetBatches(range(10), 4, seed=1)
    assert [one.indices(step) for step in (7, 3, 7)] == [forwards[7], forwards[3], forwards[7]]
    assert [DatasetBatches(range(10), 4, seed=2).indices(step) for step in range(20)] != forwards


@given(st.integers(1, 30), st.integers(1, 70), st.integers(0, 2**32))
def test_every_epoch_has_every_example_once(num_examples, batch_size, seed) -> None:
    order = DatasetBatches(range(num_examples), batch_size, seed)
    num_steps = 3 * num_examples // batch_size + 1
    row = [index for step in range(num_steps) for index in order.indices(step)]
    assert len(row) == num_steps * batch_size
    for epoch in range(len(row) // num_examples):
        assert sorted(row[epoch * num_examples : (epoch + 1) * num_examples]) == list(range(num_examples))


def test_epochs_differ_in_their_order() -> None:
    order = DatasetBatches(range(10), 10, seed=0)
    assert len({tuple(order.indices(epoch)) for epoch in range(5)}) == 5


def test_batches_are_those_of_the_order(tokenizer) -> None:
    samples = read_samples(rows("a", "b", "c", "d", "e"), tokenizer)
    batches, order = DatasetBatches(samples, 3, seed=4), DatasetBatches(range(5), 3, seed=4)
    for step in (2, 0, 1):
        expected = [str(index + 1) for index in order.indices(step)]
        assert batches.next(step).table["example_id"].tolist() == expected
