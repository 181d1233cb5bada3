"""No attention path may leak from one sequence into another; a test per path."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import ModelConfig
from pellucid.data import Completion
from pellucid.errors import ModelError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, load_policy, packed_layout, shared_layout
from pellucid.model.attention import _CALL_PAIRS, _MASK_PAIRS, ATTENTION, PLAIN, SharedAttention
from pellucid.model.segments import Family
from pellucid.model.tiny import make_tiny_model
from tolerance import gradient_chain, near, near_logprobs

LENGTHS = [5, 1, 9, 2]


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return load_policy(ModelConfig(name=str(tiny_model)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_model) -> Policy:
    """Another architecture through the same registry, with fewer key/value heads than query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return load_policy(ModelConfig(name=str(folder)))


def tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 101, (length,), generator=generator) for length in lengths]


def forward(policy, sequences, groups=None):
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = shared_layout(lengths, ids.numpy(), groups) if groups else packed_layout(lengths)
    return policy(ids, positions, torch.ones(len(ids)), layout)


@pytest.mark.parametrize("model", ["policy", "llama"])
def test_packed_equals_one_by_one(model, request) -> None:
    policy = request.getfixturevalue(model)
    sequences = tokens(LENGTHS)
    packed = forward(policy, sequences)
    exact = copy.deepcopy(policy).double()
    alone = [forward(exact, [sequence]) for sequence in sequences]
    longest = max(LENGTHS)
    assert packed.logprobs == near_logprobs(torch.cat([out.logprobs for out in alone]), policy, longest)
    assert packed.entropy == near_logprobs(torch.cat([out.entropy for out in alone]), policy, longest)


@pytest.mark.parametrize("model", ["policy", "llama"])
def test_packed_matches_huggingface(model, request) -> None:
    """Against the unpacked forward of the library itself, with its own attention."""
    policy = request.getfixturevalue(model)
    sequence = tokens([9])[0]
    ours = forward(policy, [sequence]).logprobs
    policy.hf.set_attn_implementation("eager")
    try:
        logits = policy.hf(input_ids=sequence[None], use_cache=False).logits[0, :-1]
    finally:
        policy.hf.set_attn_implementation(ATTENTION)
    theirs = logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]
    assert ours[1:] == near_logprobs(theirs, policy)


def test_a_change_in_one_sequence_reaches_no_other(policy) -> None:
    """Bitwise: values and gradients of the other sequences do not move at all."""
    sequences = tokens(LENGTHS)
    changed = [*sequences[:2], tokens([9], seed=1)[0], sequences[3]]
    before, after = forward(policy, sequences).logprobs, forward(policy, changed).logprobs
    untouched = torch.tensor([True] * 6 + [False] * 9 + [True] * 2)
    assert torch.equal(before[untouched], after[untouched])
    assert not torch.equal(before[~untouched], after[~untouched])


def test_gradients_do_not_cross_sequences(policy) -> None:
    sequences = tokens(LENGTHS)
    embedded = []
    hook = policy.hf.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embedded.append(output.requires_grad_().retain_grad() or output)
    )
    try:
        forward(policy, sequences).logprobs[6:15].sum().backward()
    finally:
        hook.remove()
        policy.zero_grad()
    reached = embedded[0].grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False] * 6 + [True] * 8 + [False] * 3


def family(seed=0):
    """Three members of a group (prompt of 6, own parts of 1, 5 and 3 tokens) and a stranger beside them."""
    prompt, *own = tokens([6, 1, 5, 3], seed)
    return [*(torch.cat([prompt, part]) for part in own), tokens([4], seed=seed + 7)[0]]


GROUPS = ["g", "g", "g", ""]


@pytest.mark.parametrize("model", ["policy", "llama"])
def test_a_shared_prompt_gives_the_unshared_values_and_gradients(model, request) -> None:
    policy = request.getfixturevalue(model)
    weights = torch.randn(31, generator=torch.Generator().manual_seed(0))
    results = []
    for groups in (None, GROUPS):
        output = forward(policy, family(), groups)
        (output.logprobs * weights).sum().backward()
        results.append((output, [parameter.grad.clone() for parameter in policy.parameters()]))
        policy.zero_grad()
    (plain, expected), (shared, found) = results
    assert shared.logprobs == near_logprobs(plain.logprobs, policy, 11)
    assert shared.entropy == near_logprobs(plain.entropy, policy, 11)
    scale = max(gradient.abs().max() for gradient in expected)
    for left, right in zip(found, expected, strict=True):
        assert left == near(right, terms=gradient_chain(policy, 31), scale=scale)


def test_members_of_a_family_do_not_see_each_other(policy) -> None:
    before = forward(policy, family(), GROUPS).logprobs
    changed = family()
    changed[1] = torch.cat([changed[1][:6], tokens([5], seed=3)[0]])
    after = forward(policy, changed, GROUPS).logprobs
    untouched = torch.tensor([True] * 13 + [False] * 5 + [True] * 13)
    assert after[untouched] == near_logprobs(before[untouched], policy, 11)
    assert not torch.allclose(after[~untouched], before[~untouched], atol=1e-3)


def sample(policy, prompts, **engine_options):
    finished: dict[int, Completion] = {}
    requests = [
        Request(
            prompt,
            SamplingParams(max_tokens=6, seed=seed),
            Account(),
            lambda c, i=i: finished.__setitem__(i, c),
        )
        for i, (prompt, seed) in enumerate(prompts)
    ]
    run_to_end(Engine(policy, num_slots=4, max_length=64, **engine_options), requests)
    return [finished[index] for index in range(len(prompts))]


def test_prefill_and_decode_do_not_leak_between_slots(policy) -> None:
    """The same request alone and among strangers: the same tokens, the same logprobs."""
    prompts = [(sequence.tolist(), index) for index, sequence in enumerate(tokens([7, 1, 12, 3, 5, 20]))]
    together = sample(policy, prompts)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = sample(policy, [prompt])[0]
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == near_logprobs(completion.logprobs, policy, 26)


def test_a_shared_prompt_does_not_leak_between_its_members(policy) -> None:
    prompt = tokens([11])[0].tolist()
    stranger = tokens([8], seed=3)[0].tolist()
    group = sample(policy, [(prompt, 0), (stranger, 9), (prompt, 1), (prompt, 2)])
    for index, seed in ((0, 0), (2, 1), (3, 2)):
        alone = sample(policy, [(prompt, seed)])[0]
        assert alone.token_ids == group[index].token_ids
        assert alone.logprobs == near_logprobs(group[index].logprobs, policy, 17)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 14), min_size=1, max_size=3)), min_size=1)
)
@settings(deadline=None, max_examples=40)
def test_any_families_attend_as_their_matrix_says(shapes) -> None:
    """Whether they are computed in one batch or in several."""
    families = [Family(prefix, own if prefix else own[:1]) for prefix, own in shapes]
    families.sort(key=lambda family: family.prefix > 0)
    size = sum(family.num_tokens for family in families)
    sees, start = torch.zeros(size, size, dtype=torch.bool), 0
    for family in families:
        prefix = slice(start, start + family.prefix)
        for length in (family.prefix, *family.own):
            rows = slice(start, start + length)
            sees[rows, prefix] = True
            sees[rows, rows] = True
            start += length
    sees &= torch.ones(size, size, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(size)
    query, key, value = (
        torch.randn(1, heads, size, 4, generator=generator, requires_grad=True) for heads in (2, 1, 1)
    )
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        exact[0], *(each.expand_as(exact[0]) for each in exact[1:]), attn_mask=sees
    )
    weights = torch.randn(expected.shape, generator=generator)
    found = SharedAttention(families).attend(0, query, key, value, None, PLAIN)
    assert found == near(expected, terms=size + 4, scale=value.abs().max())
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    scale = max(gradient.abs().max() for gradient in gradients)
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), (query, key, value)), gradients, strict=True
    ):
        assert own == near(other, terms=2 * (size + 4) + size, scale=scale)


@pytest.fixture(scope="module")
def demo_policy(tmp_path_factory) -> Policy:
    """As wide as the demo's model, which is the smallest that anyone trains."""
    folder = tmp_path_factory.mktemp("demo")
    make_tiny_model(folder, num_layers=2)
    return load_policy(ModelConfig(name=str(folder)))


SHAPES = {
    "one long member": (100, [1400, *[60] * 7]),
    "ragged": (200, [20, 40, 80, 160, 320, 640, 900, 30]),
    "around the prompt's length": (120, [40, 80, 110, 120, 121, 130, 180, 250]),
    "long prompt": (400, [100] * 4),
    "long prompt, ragged": (400, [100, 60, 30, 1, 7, 200, 390, 399]),
    "short prompt": (20, [100] * 8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_shape_of_group_takes_more_memory_or_pairs_than_its_members_alone(name, demo_policy) -> None:
    """Bytes of numbers that a forward keeps for its backward pass, each storage once; and attention's pairs,
    with what a call costs in pairs.

    Indices are left out: 8 bytes for each gathered token, where its numbers take thousands.
    """
    prompt, own = SHAPES[name]
    common, *parts = tokens([prompt, *own])
    sequences = [torch.cat([common, part]) for part in parts]
    ids, lengths = torch.cat(sequences), [len(sequence) for sequence in sequences]
    plans = [
        layout.plan
        for layout in (packed_layout(lengths), shared_layout(lengths, ids.numpy(), ["g"] * len(own)))
    ]
    alone, shared = (plan.num_pairs + _CALL_PAIRS * (len(plan._sizes) + len(plan._calls)) for plan in plans)
    assert shared <= alone + len(own)  # halves of squares are rounded
    kept = []
    for groups in (None, ["g"] * len(own)):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages=storages) -> torch.Tensor:
            if tensor.is_floating_point():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = forward(demo_policy, sequences, groups)
        kept.append(sum(storages.values()))
        del output
    assert kept[1] <= kept[0]


def test_members_of_one_length_are_one_call_and_ragged_ones_share_a_mask() -> None:
    assert len(SharedAttention([Family(2000, [500] * 8)])._calls) == 2  # the prompt, and its members
    families = [Family(20 + index % 9, [5, 7, 9]) for index in range(16)]
    assert len(SharedAttention(families)._calls) <= 6
    ragged = SharedAttention([Family(400, [100, 300, 200])])._calls[1:]
    query = torch.zeros(1, 1, 1, 8)
    assert len({call._mask.like(query).untyped_storage().data_ptr() for call in ragged}) == 1


def test_short_members_of_a_family_are_one_row_and_long_ones_a_row_each() -> None:
    """Gathering the prompt for each costs more than the pairs of one row in which members do not see
    each other."""
    assert [call.tokens.tolist() for call in SharedAttention([Family(3, [1, 2])])._calls] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    _, call = SharedAttention([Family(3, [1, 2])])._calls
    seen = [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    mask = call._mask.like(torch.zeros(1, 1, 1, 8))
    assert (mask == 0).int().tolist() == [[seen]] and mask[0, 0, 0, 4] == -torch.inf
    demo = SharedAttention([Family(28, [7] * 8)] * 16)._calls
    assert [call._queries.shape for call in demo] == [(16, 28), (16, 56)]
    long = SharedAttention([Family(400, [300] * 4)])._calls
    assert [call._queries.shape for call in long] == [(1, 400), (4, 300)]


@pytest.mark.parametrize("prefix", [3_000, 30_000])
def test_members_are_joined_as_far_as_their_mask_is_small(prefix) -> None:
    _, *calls = SharedAttention([Family(prefix, [60] * 128)])._calls
    joined = [call._mask for call in calls if any(len(row.members) > 1 for row in call._mask._rows)]
    num_pairs = [mask.like(torch.zeros(1, 1, 1, 8)).numel() for mask in joined]
    assert max(num_pairs, default=0) <= _MASK_PAIRS
    assert bool(joined) == (2 * 60 * (prefix + 2 * 60) <= _MASK_PAIRS)


def test_a_forward_without_a_plan_is_refused(policy) -> None:
    with pytest.raises(ModelError, match="without an attention plan"):
        policy.hf(input_ids=torch.tensor([[5, 6]]), use_cache=False)
