"""The book of what servers serve: lines, metrics, and the line of `pellucid ledger`."""

import pytest

from pellucid.errors import WeightsError
from pellucid.ledger.weights import WEIGHTS_BOOK, WeightsBook, read_weights_book

PUBLISHED = {"a": "F32-0a", "b": "F32-0b", "c": "F32-0c", "d": "F32-0d"}


def test_a_share_is_over_the_tensors_of_all_servers_with_the_newest_version(tmp_path) -> None:
    book = WeightsBook(tmp_path / WEIGHTS_BOOK)
    assert book.metrics() == {}
    book.enter(1, "s0", PUBLISHED, PUBLISHED)
    book.enter(1, "s1", PUBLISHED, {"a": "F32-0a"})
    assert book.metrics()["weights/verified"] == 5 / 8
    book.enter(2, "s0", PUBLISHED, PUBLISHED)
    assert book.metrics()["weights/verified"] == 1
    book.enter(2, "s1", PUBLISHED, PUBLISHED, as_read=True)
    assert book.metrics() == {
        "weights/verified": 0.5,
        "weights/verified_as_read": 0.5,
        "weights/unverified_servers": 1,
    }


def test_a_difference_is_written_down_and_raised_with_its_remedy(tmp_path) -> None:
    book = WeightsBook(tmp_path / WEIGHTS_BOOK)
    book.enter(1, "s0", PUBLISHED, PUBLISHED)
    with pytest.raises(
        WeightsError,
        match=r"s0 serves other weights than the trainer published: in policy version 2, b has digest "
        r"F32-99 there and F32-0b as published \(1 of 4 tensors differ\).*Restart that server",
    ):
        book.enter(2, "s0", PUBLISHED, {**PUBLISHED, "b": "F32-99"})
    assert book.metrics()["weights/verified"] == 3 / 4
    with pytest.raises(WeightsError, match=r"version 2, e has digest F32-0e there and none as published"):
        WeightsBook().enter(2, "s0", PUBLISHED, {**PUBLISHED, "e": "F32-0e"})
    summary = read_weights_book(tmp_path)
    assert (summary.num_versions, summary.num_verified) == (2, 1)
    assert summary.line() == (
        "weights: s0 served other weights than policy version 2: b had digest F32-99, F32-0b as published"
    )


def test_the_last_word_on_a_version_and_a_server_counts(tmp_path) -> None:
    assert read_weights_book(tmp_path) is None
    book = WeightsBook(tmp_path / WEIGHTS_BOOK)
    book.enter(1, "s0", PUBLISHED, None)
    book.enter(2, "s0", {}, PUBLISHED)
    assert read_weights_book(tmp_path).line() == (
        "weights: 0 of 2 policy versions verified; the last that is not: 2 on s0"
    )
    for version in (1, 2):
        book.enter(version, "s0", PUBLISHED, PUBLISHED)
    assert read_weights_book(tmp_path).line() == (
        "weights: 2 policy versions verified, every tensor as the server serves it"
    )
    book.enter(3, "s\x1b[31m", PUBLISHED, None)
    assert read_weights_book(tmp_path).line().endswith("the last that is not: 3 on s\\x1b[31m")
    with (tmp_path / WEIGHTS_BOOK).open("ab") as file:
        file.write(b'{"version":4,"ser')
    assert read_weights_book(tmp_path).num_versions == 3
