"""Rows of transformers' caches: numbers stay with their sequences, and what is not known is refused."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from pellucid.errors import ModelError
from pellucid.inference.cache_rows import has_keys, join_rows, take_rows, trim

WINDOW = 4


def cache(rows, length):
    """One layer of each kind; keys are 10 × row + position, values their negatives, states 100 × row."""
    made = DynamicCache(config=LlamaConfig(num_hidden_layers=1))
    made.layers = [DynamicLayer(), DynamicSlidingWindowLayer(WINDOW), LinearAttentionLayer()]
    for place in range(length):
        keys = torch.tensor([[[[10.0 * row + place]]] for row in rows])
        for layer in (0, 1):
            made.update(keys, -keys, layer)
        made.update_conv_state(torch.tensor([[[100.0 * row]] for row in rows]), 2)
    return made


def keys_of(made, layer) -> list[list[float]]:
    assert torch.equal(made.layers[layer].keys, -made.layers[layer].values)
    return made.layers[layer].keys[:, 0, :, 0].tolist()


def states_of(made) -> list[float]:
    return made.layers[2].conv_states[0].flatten().tolist()


def test_rows_are_taken_in_any_order_and_repeatedly() -> None:
    whole = cache([1, 2, 3], 2)
    taken = take_rows(whole, torch.tensor([2, 0, 2]), 3)
    assert keys_of(taken, 0) == [[30, 31], [10, 11], [30, 31]]
    assert states_of(taken) == [300, 100, 300]
    taken.update_conv_state(torch.zeros(3, 1, 1), 2)
    assert states_of(whole) == [100, 200, 300], "what is taken shares nothing that changes"


def test_shorter_sequences_are_padded_at_their_start_and_padding_goes_with_the_longest() -> None:
    joined = join_rows([{"past": cache([1], 6)}, {"past": cache([2, 3], 2)}], [1, 2])["past"]
    assert keys_of(joined, 0) == [[10, 11, 12, 13, 14, 15], [0, 0, 0, 0, 20, 21], [0, 0, 0, 0, 30, 31]]
    assert keys_of(joined, 1) == [[13, 14, 15], [0, 20, 21], [0, 30, 31]], "those that a window still sees"
    assert states_of(joined) == [100, 200, 300]
    assert [joined.layers[layer].get_seq_length() for layer in (0, 1)] == [6, 6]
    left = take_rows(joined, torch.tensor([2, 1]), 3)
    trim(left, 2)
    assert [keys_of(left, layer) for layer in (0, 1)] == [[[30, 31], [20, 21]]] * 2
    assert [left.layers[layer].get_seq_length() for layer in (0, 1)] == [2, 2]
    assert states_of(left) == [300, 200]


def test_keys_are_told_from_states() -> None:
    made = cache([1], 2)
    assert has_keys(made)
    made.layers = made.layers[2:]
    assert not has_keys(made)


def test_what_is_not_known_is_refused() -> None:
    made = cache([1, 2], 2)
    made.layers[0].slopes = torch.ones(5)
    with pytest.raises(ModelError, match="a tensor of its cache begins with 5, not with 2 rows"):
        take_rows(made, torch.tensor([0]), 2)
    made.layers[0].slopes = object()
    with pytest.raises(ModelError, match="holds a object"):
        take_rows(made, torch.tensor([0]), 2)

    class OwnLayer(DynamicLayer):
        pass

    made.layers = [OwnLayer()]
    with pytest.raises(ModelError, match="not known how to join the rows of a DynamicCache"):
        join_rows([made, made], [2, 2])
