"""Segments against the matrix of who sees whom; and the path of a GPU against that of a CPU."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.checks.rehearsal import _REPLACED, emulated_varlen, rehearsing
from pellucid.errors import ModelError
from pellucid.model.attention import PLAIN, PackedAttention, SharedAttention
from pellucid.model.kernels import check_kernel
from pellucid.model.segments import (
    Family,
    attend_segments,
    place,
    segments_of,
    takes_segments,
)
from tolerance import eps, near

CPU = torch.device("cpu")


def matrix_of(families) -> torch.Tensor:
    """Who sees whom, written down token by token."""
    size, start = sum(family.num_tokens for family in families), 0
    sees = torch.zeros(size, size, dtype=torch.bool)
    for family in families:
        prefix = range(start, start + family.prefix)
        start += family.prefix
        for row in prefix:
            sees[row, prefix.start : row + 1] = True
        for own in family.own:
            for row in range(start, start + own):
                sees[row, list(prefix)] = True
                sees[row, start : row + 1] = True
            start += own
    return sees


def matrix_by(segments, size) -> torch.Tensor:
    """Who sees whom, as flash attention reads segments: the last query stands at the last key."""
    sees = torch.zeros(size, size, dtype=torch.bool)
    tokens = range(size) if segments.selected is None else segments.selected.tolist()
    first_query = first_key = 0
    for num_queries, num_keys in zip(segments.queries, segments.keys, strict=True):
        for query in range(num_queries):
            for key in range(num_keys - num_queries + query + 1):
                sees[first_query + query, tokens[first_key + key]] = True
        first_query, first_key = first_query + num_queries, first_key + num_keys
    assert (first_query, first_key) == (size, len(tokens))
    return sees


SMALL = [
    Family(prefix, list(own))
    for prefix in range(4)
    for num_members in ((1, 2, 3) if prefix else (1,))
    for own in product((1, 2, 3), repeat=num_members)
]
"""All families with a prefix of up to three tokens and up to three members of up to three."""


@pytest.mark.parametrize("others", [[], [Family(0, [2])], [Family(2, [1, 2])]])
def test_segments_of_every_small_family_are_their_matrix(others) -> None:
    for families in ([*others, each, *others] for each in SMALL):
        segments = segments_of(families)
        expected = matrix_of(families)
        assert torch.equal(matrix_by(segments, len(expected)), expected), families
        assert len(segments.queries) == sum(len(family.own) for family in families)


def test_without_prefixes_nothing_is_selected() -> None:
    assert segments_of([Family(0, [3]), Family(0, [2])]) == ([3, 2], [3, 2], None)
    assert segments_of([Family(4, [3])]) == ([7], [7], None)
    worked = segments_of([Family(2, [2, 1])])
    assert (worked.queries, worked.keys) == ([4, 1], [4, 3])
    assert worked.selected.tolist() == [0, 1, 2, 3, 0, 1, 4]


def kernel(query, key, value, starts_q, starts_k, most_q, most_k, *, scale, window_size, enable_gqa):
    """`varlen_attn` on a CPU, in any dtype."""
    return emulated_varlen(
        query, key, value, starts_q, starts_k, most_q, most_k, False, scale, list(window_size), enable_gqa
    )[0]


def states(size, dtype, heads=(4, 2, 2), width=8):
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(1, number, size, width, generator=generator).to(dtype).requires_grad_()
        for number in heads
    ]


families_of_any_shape = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 14), min_size=1, max_size=3)), min_size=1, max_size=6
).map(
    lambda shapes: sorted(
        (Family(prefix, own if prefix else own[:1]) for prefix, own in shapes),
        key=lambda family: family.prefix > 0,
    )
)


@given(families_of_any_shape)
@settings(max_examples=25)
def test_segments_give_what_calls_give(families) -> None:
    """In float64, where rounding hides nothing: values and gradients, with two query heads per key head."""
    size = sum(family.num_tokens for family in families)
    inputs = states(size, torch.float64)
    expected = SharedAttention(families).attend(0, *inputs, None, PLAIN)
    found = attend_segments(*inputs, place(segments_of(families), CPU), None, kernel=kernel)
    assert found == near(expected, terms=size + 8, dtype=torch.float64)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (found, expected)]
    scale = max(gradient.abs().max() for gradient in gradients[1])
    for ours, theirs in zip(*gradients, strict=True):
        assert ours == near(theirs, terms=4 * (size + 8), scale=scale, dtype=torch.float64)


@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_a_window_counts_the_keys_in_front_of_a_query(window) -> None:
    families = [Family(0, [6]), Family(3, [2, 4])]
    sees = matrix_of(families)
    order = torch.tensor([*range(6), *range(3), 3, 4, 3, 4, 5, 6])  # places in the members' sequences
    sees &= order[:, None] - order[None] < window
    query, key, value = states(15, torch.float64, heads=(2, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
    placed = place(segments_of(families), CPU)
    found = attend_segments(query, key, value, placed, None, window=window, kernel=kernel)
    assert found == near(expected, terms=15 + 8, dtype=torch.float64)


FAMILIES = {
    "packed": [Family(0, [length]) for length in (5, 1, 9, 2)],
    "shared": [Family(0, [7]), Family(6, [1, 5, 3]), Family(2, [3, 3])],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_path_of_a_gpu_gives_what_a_cpu_gives(name) -> None:
    """One call of the kernel, one copy, no mask and no sync; in bfloat16, against the CPU in float64."""
    families = FAMILIES[name]
    size = sum(family.num_tokens for family in families)
    inputs = states(size, torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = SharedAttention(families).attend(0, *exact, 0.3, PLAIN)
    upstream = torch.randn(expected.shape).bfloat16()
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    with rehearsing() as rehearsal:
        moved = [each.detach().to(rehearsal.device).requires_grad_() for each in inputs]
        gradient = upstream.to(rehearsal.device)
        plan = SharedAttention(families)
        with rehearsal.phase("attend"):
            found = plan.attend(0, *moved, 0.3, PLAIN)
            gradients = torch.autograd.grad(found, moved, gradient)
        assert rehearsal.count("sync", "attend") == 0, rehearsal.table()
        assert [event.operation for event in rehearsal.events["attention"]] == ["varlen"]
        assert (rehearsal.count("h2d", "attend"), rehearsal.count("attention")) == (1, 1)
        with rehearsal.phase("next layer"):
            plan.attend(1, *moved, 0.3, PLAIN)
        assert rehearsal.count("h2d", "next layer") == 0
        # Numbers are added up in float32; results are rounded to bfloat16, gradients of keys twice.
        largest = max(gradient.abs().max() for gradient in expected_gradients)
        assert found.cpu() == near(expected, within=eps(torch.bfloat16) * expected.abs().max())
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert ours.cpu() == near(theirs, within=2 * eps(torch.bfloat16) * largest)


def test_what_flash_attention_does_not_take_goes_another_way() -> None:
    families = FAMILIES["shared"]
    with rehearsing() as rehearsal:
        for dtype, width, is_taken in (
            (torch.bfloat16, 8, True),
            (torch.bfloat16, 12, False),
            (torch.bfloat16, 264, False),
            (torch.float32, 8, False),
        ):
            inputs = states(30, dtype, width=width)
            moved = [each.detach().to(rehearsal.device) for each in inputs]
            assert takes_segments(moved[0]) == is_taken
            assert not takes_segments(inputs[0])
            if dtype == torch.float32:
                expected = SharedAttention(families).attend(0, *inputs, None, PLAIN)
                found = SharedAttention(families).attend(0, *moved, None, PLAIN)
                assert found.cpu() == near(expected, terms=30 + 8)


def test_the_kernel_of_a_device_is_checked(monkeypatch) -> None:
    """One that aligns segments at their first key (as flash attention once did) is refused; so is none."""
    with rehearsing() as rehearsal:
        check_kernel(rehearsal.device)
        right = _REPLACED["_varlen_attn"]

        def at_the_first_key(query, key, value, starts_q, starts_k, most_q, most_k, *others):
            firsts = zip(starts_k[:-1].tolist(), starts_q.diff().tolist(), strict=True)
            kept = [place for first, number in firsts for place in range(first, first + number)]
            return right(query, key[kept], value[kept], starts_q, starts_q, most_q, most_q, *others)

        monkeypatch.setitem(_REPLACED, "_varlen_attn", at_the_first_key)
        with pytest.raises(ModelError, match='off by .* does not end at the last key .* "float32"'):
            check_kernel(rehearsal.device)

        def missing(*_):
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

        monkeypatch.setitem(_REPLACED, "_varlen_attn", missing)
        with pytest.raises(ModelError, match="no flash attention on rehearsal:0: FlashAttention only"):
            check_kernel(rehearsal.device)


def test_launches_do_not_depend_on_the_number_of_sequences() -> None:
    launches = set()
    for lengths in ([40], [10] * 4, [1] * 40):
        with rehearsing() as rehearsal:
            moved = [each.detach().to(rehearsal.device) for each in states(40, torch.bfloat16)]
            with rehearsal.phase("attend"):
                PackedAttention(lengths).attend(0, *moved, None, PLAIN)
            launches.add(rehearsal.count("launch", "attend"))
    assert launches == {1}
