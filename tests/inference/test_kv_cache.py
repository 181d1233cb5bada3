import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import ModelConfig
from pellucid.inference.kv_cache import KVCache, _capacities
from pellucid.model import load_policy

MAX_LENGTH = 300
NUM_SLOTS = 12


@pytest.fixture(scope="module")
def policy(tiny_model):
    return load_policy(ModelConfig(name=str(tiny_model)))


def test_shelves_double_up_to_the_maximum() -> None:
    assert _capacities(300) == [48, 96, 192, 300]
    assert _capacities(192) == [48, 96, 192]
    assert _capacities(10) == [10]


def write(row, position, value):
    """What a step computes at a position: a number that tells the sequence, the position and the layer."""
    for layer, pair in enumerate(row.shelf.layers()):
        for store, sign in zip(pair, (1, -1), strict=True):
            rows = store.view(len(row.shelf.rows), -1, *store.shape[1:])
            rows[row.index, :, position] = sign * (value * 1000 + position + layer / 8)


def read(row, layer, kind):
    store = row.shelf.layers()[layer][kind]
    return store.view(len(row.shelf.rows), -1, *store.shape[1:])[row.index, :, : row.length - 1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 200)),
            st.tuples(st.just("remove"), st.integers(0, NUM_SLOTS - 1)),
            st.tuples(st.just("step"), st.integers(1, 70)),
        ),
        max_size=25,
    )
)
def test_a_sequence_keeps_what_was_written_wherever_it_moves(policy, actions) -> None:
    """Random arrivals, departures and growth; a step writes one position of every sequence."""
    cache = KVCache(policy, NUM_SLOTS, MAX_LENGTH)
    running = {}
    for number, (action, argument) in enumerate(actions):
        if action == "add" and len(running) < NUM_SLOTS:
            row = cache.add(argument)
            cache.arrange()
            for position in range(argument - 1):
                write(row, position, number)
            running[row] = number
        elif action == "remove" and argument < len(running):
            row = list(running)[argument]
            cache.remove(row)
            del running[row]
        elif action == "step":
            for _ in range(argument):
                rows = cache.arrange()
                assert set(rows) == set(running)
                for row in rows:
                    write(row, row.length - 1, running[row])
                    row.length = min(row.length + 1, MAX_LENGTH)
    rows = cache.arrange()
    assert [(row.shelf, row.index) for row in rows] == [
        (shelf, index) for shelf in cache.shelves for index in range(len(shelf.rows))
    ]
    for row, number in running.items():
        assert row.length <= row.shelf.capacity
        expected = number * 1000 + torch.arange(row.length - 1.0)
        for layer in (0, 1):
            for kind, sign in ((0, 1), (1, -1)):
                found = read(row, layer, kind)
                assert (found == sign * (expected + layer / 8)[:, None]).all()


def test_a_shelf_that_empties_gives_its_memory_back(policy) -> None:
    cache = KVCache(policy, NUM_SLOTS, MAX_LENGTH)
    rows = [cache.add(40) for _ in range(NUM_SLOTS)]
    cache.arrange()
    first, second = cache.shelves[:2]
    assert first._store.shape[2] == NUM_SLOTS
    for row in rows:
        row.length = 49
    assert cache.arrange() == rows
    assert (first._store.shape[2], second._store.shape[2]) == (0, NUM_SLOTS)
