"""Experts recorded and replayed: what a router chooses, what it weighs, and what is left of a gradient."""

import math

import pytest
import torch
from torch.nn.functional import softmax

from pellucid.config import ModelConfig
from pellucid.errors import ModelError
from pellucid.model import ExpertRecorder, RouterShape, load_policy, packed_layout, shared_layout
from pellucid.model.routing import ExpertReplay, routers_of
from tolerance import gradient_chain, logprob_bound, near, near_logprobs

LENGTHS = [9, 14, 1]


def policy_of(folder, **options):
    return load_policy(ModelConfig(name=str(folder)), **options)


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 100, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return ids, positions, torch.ones(len(ids))


@pytest.fixture(scope="module")
def recorded(tiny_moe, tokens):
    """The model's own experts for these tokens, and what it says of them."""
    policy = policy_of(tiny_moe)
    recorder = ExpertRecorder(policy.hf)
    with torch.no_grad():
        output = policy(*tokens, packed_layout(LENGTHS))
    return recorder.last(), output


def replaying(folder):
    policy = policy_of(folder, trainable=True)
    policy.replay_experts()
    return policy


def test_the_record_is_what_the_routers_choose(tiny_moe, tokens, recorded) -> None:
    """Dense layers have no place in it."""
    experts, _ = recorded
    assert experts.shape == (24, 2, 2) and experts.dtype == torch.uint8
    hf = policy_of(tiny_moe).hf
    seen = []
    for layer in (0, 2):
        hf.model.layers[layer].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    ids, positions, _ = tokens
    with torch.no_grad():
        hf.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            plan=packed_layout(LENGTHS).plan,
        )
        logits = [
            seen[0] @ hf.model.layers[0].mlp.gate.weight.T,
            seen[1] @ hf.model.layers[2].mlp.gate.weight.T,
        ]
    expected = torch.stack([scores.topk(2).indices for scores in logits], dim=1)
    assert experts.tolist() == expected.tolist()
    assert len(experts.unique()) == 8


def test_a_routers_own_experts_change_not_a_bit(tiny_moe, tokens, recorded) -> None:
    experts, expected = recorded
    policy = replaying(tiny_moe)
    output = policy(*tokens, packed_layout(LENGTHS), experts)
    assert torch.equal(output.logprobs, expected.logprobs)
    assert torch.equal(output.entropy, expected.entropy)
    assert output.replaced.tolist() == [0.0] * 24
    output.logprobs.sum().backward()
    plain = policy_of(tiny_moe, trainable=True)
    plain(*tokens, packed_layout(LENGTHS)).logprobs.sum().backward()
    for (name, own), other in zip(policy.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name
    gates = [own.grad for name, own in policy.named_parameters() if "mlp.gate." in name]
    assert len(gates) == 2 and all(gate.abs().max() > 1e-3 for gate in gates)


@pytest.fixture(scope="module")
def weighed(tiny_moe, tokens):
    """The model's own experts for these tokens, and their weights, as an engine packs them."""
    policy = policy_of(tiny_moe)
    recorder = ExpertRecorder(policy.hf, weights=True)
    with torch.no_grad():
        policy(*tokens, packed_layout(LENGTHS))
    experts, weights = recorder.shape.pack(recorder.last().numpy().tobytes())
    return torch.tensor(experts.array()), torch.tensor(weights.array())


def test_weights_are_recorded_beside_the_experts(recorded, weighed) -> None:
    """Each token's add up to 1, as the model renormalises them, best first."""
    experts, weights = weighed
    assert experts.tolist() == recorded[0].tolist()
    assert weights.shape == (24, 2, 2) and weights.dtype == torch.float32
    assert weights.sum(-1) == near(torch.ones(24, 2), terms=2)
    assert (weights[..., 0] >= weights[..., 1]).all() and weights.std() > 0.05


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_routers_own_weights_change_not_a_bit_and_leave_it_without_gradient(
    tiny_moe, tokens, recorded, weighed, checkpointed
) -> None:
    policy = policy_of(tiny_moe, trainable=True)
    policy.replay_experts(weights=True)
    if checkpointed:
        policy.checkpoint_activations()
    output = policy(*tokens, packed_layout(LENGTHS), *weighed)
    assert torch.equal(output.logprobs, recorded[1].logprobs)
    assert torch.equal(output.entropy, recorded[1].entropy)
    output.logprobs.sum().backward()
    for name, own in policy.named_parameters():
        assert (own.grad.abs().max() == 0) == ("mlp.gate." in name), name


def test_experts_are_replayed_in_rows(tiny_moe, tokens, recorded) -> None:
    """Other experts than the routers', so that a row that is off by one would show."""
    others = (recorded[0].long() + 3) % 8
    outputs = []
    for layout in ("packed", "rows"):
        policy = policy_of(tiny_moe, trainable=True, layout=layout)
        policy.replay_experts()
        outputs.append(policy(*tokens, packed_layout(LENGTHS), others))
    packed, rows = outputs
    assert rows.logprobs == near_logprobs(packed.logprobs.detach(), policy, max(LENGTHS))
    assert torch.equal(rows.replaced, packed.replaced)
    assert packed.replaced.max() == 1.0


def hooked_router(top_k: int, norm: bool):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(
        hidden_size=3, num_experts=4, num_experts_per_tok=top_k, norm_topk_prob=norm, num_hidden_layers=1
    )
    holder = torch.nn.Module()
    holder.gate = Qwen3MoeTopKRouter(config)
    with torch.no_grad():
        holder.gate.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]))
    return holder.gate, ExpertReplay(holder)


@pytest.mark.parametrize("norm", [True, False])
def test_scores_are_the_routers_own_at_the_recorded_experts(norm) -> None:
    """Hidden state (2, 1, 0): logits 2, 1, 0, 3, so that the router itself takes experts 3 and 0."""
    router, replay = hooked_router(2, norm)
    hidden = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    experts = torch.tensor([[[1, 3]], [[2, 1]], [[-1, -1]]], dtype=torch.int16)
    with replay.of(experts) as replayed:
        logits, scores, chosen = router(hidden)
    assert logits[0].tolist() == [2.0, 1.0, 0.0, 3.0]
    assert chosen.tolist() == [[1, 3], [2, 1], [3, 0]]
    shares = softmax(torch.tensor([2.0, 1.0, 0.0, 3.0], dtype=torch.float64), 0)
    expected = torch.stack([shares[[1, 3]], shares[[2, 1]], shares[[3, 0]]])
    if norm:
        expected = expected / expected.sum(1, keepdim=True)
    assert scores == near(expected, terms=4 + 2, each=True)
    assert replayed.share_replaced().tolist() == [0.5, 1.0, 0.0]


def test_recorded_weights_take_the_place_of_scores_where_there_are_some() -> None:
    """The second token has a record of experts alone: 2 and 1 of logits 2, 1, 0, 3."""
    router, _ = hooked_router(2, True)
    holder = torch.nn.Module()
    holder.gate = router
    router._forward_hooks.clear()
    replay = ExpertReplay(holder, weights=True)
    weights = torch.tensor([[[0.75, 0.125]], [[math.nan, math.nan]]])
    with replay.of(torch.tensor([[[1, 3]], [[2, 1]]]), weights):
        _, scores, chosen = router(torch.tensor([[2.0, 1.0, 0.0]] * 2))
    assert chosen.tolist() == [[1, 3], [2, 1]]
    assert scores[0].tolist() == [0.75, 0.125]
    assert scores[1] == near([1 / (1 + math.e), math.e / (1 + math.e)], terms=6)
    scores[0].sum().backward(retain_graph=True)
    assert router.weight.grad.abs().max() == 0
    scores[1, 0].backward()
    assert router.weight.grad.abs().max() > 0.1
    with pytest.raises(ModelError, match="forward without weights of experts"), replay.of(chosen[:, None]):
        pass


def test_a_gradient_reaches_the_router_through_the_recorded_experts() -> None:
    """Of expert 1's score σ(1 − 3) among experts 1 and 3: σ(1 − σ) times ±(2, 1, 0)."""
    router, replay = hooked_router(2, True)
    with replay.of(torch.tensor([[[1, 3]]])):
        _, scores, _ = router(torch.tensor([[2.0, 1.0, 0.0]]))
    scores[0, 0].backward()
    slope = 1 / (1 + math.exp(-2.0)) / (1 + math.exp(2.0))
    expected = [[0.0, 0.0, 0.0], [2 * slope, slope, 0.0], [0.0, 0.0, 0.0], [-2 * slope, -slope, 0.0]]
    assert router.weight.grad == near(expected, terms=4 + 2)


def test_other_experts_change_what_follows_and_are_counted(tiny_moe, tokens, recorded) -> None:
    """Token 3 of the second sequence goes elsewhere in the first layer: it, and those after it, see that."""
    experts, expected = recorded
    changed = experts.clone()
    changed[12, 0] = torch.tensor([own for own in range(8) if own not in experts[12, 0].tolist()][:2])
    with torch.no_grad():
        output = replaying(tiny_moe)(*tokens, packed_layout(LENGTHS), changed)
    off = logprob_bound(policy_of(tiny_moe), max(LENGTHS), expected.logprobs.abs().max().item())
    moved = ((output.logprobs - expected.logprobs).abs() > off).nonzero()[:, 0].tolist()
    assert moved == list(range(13, 23))
    # Half of its experts are those of the first layer; what follows may be routed anew in the last.
    assert output.replaced[13].item() >= 0.5
    assert output.replaced[:13].tolist() == [0.0] * 13


def test_the_last_token_of_a_sequence_can_go_anywhere(tiny_moe, tokens, recorded) -> None:
    """Which is why it needs no record: see `pellucid.data.join_experts`."""
    experts, expected = recorded
    changed = experts.clone()
    changed[[8, 22, 23]] = torch.tensor([7, 7], dtype=torch.uint8)
    with torch.no_grad():
        output = replaying(tiny_moe)(*tokens, packed_layout(LENGTHS), changed)
    assert output.logprobs == near_logprobs(expected.logprobs, policy_of(tiny_moe), max(LENGTHS))
    assert output.replaced.tolist() == [0.0] * 24


def test_a_layer_that_is_computed_again_takes_the_same_experts(tiny_moe, tokens, recorded) -> None:
    """Experts that the routers would not choose, and another forward before the backward pass."""
    experts, _ = recorded
    others = (experts + 3) % 8
    gradients = []
    for checkpointed in (False, True):
        policy = replaying(tiny_moe)
        if checkpointed:
            policy.checkpoint_activations()
        output = policy(*tokens, packed_layout(LENGTHS), others)
        with torch.no_grad():
            policy(*tokens, packed_layout(LENGTHS), experts)
        output.logprobs.sum().backward()
        gradients.append({name: own.grad for name, own in policy.named_parameters()})
        assert output.replaced[1].item() > 0.5
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_shared_prompt_is_shared_as_far_as_its_experts_are_equal(tiny_moe) -> None:
    ids = torch.tensor([6, 7, 8, 9, 10, 6, 7, 8, 9, 11])
    positions = torch.arange(5).repeat(2)
    policy = replaying(tiny_moe)
    experts = torch.randint(0, 8, (10, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    experts[5:8] = experts[:3]
    experts[8] = (experts[3] + 1) % 8
    layout = shared_layout([5, 5], ids.numpy(), ["g", "g"], routed_experts=experts.numpy())
    assert layout.computed.tolist() == [0, 1, 2, 3, 4, 8, 9]
    shared = policy(ids, positions, torch.ones(10), layout, experts)
    shared.logprobs.sum().backward()
    gradients = [own.grad for own in policy.parameters()]
    policy.zero_grad(set_to_none=True)
    alone = policy(ids, positions, torch.ones(10), packed_layout([5, 5]), experts)
    alone.logprobs.sum().backward()
    assert shared.logprobs == near_logprobs(alone.logprobs, policy, 5)
    assert shared.replaced.tolist() == alone.replaced.tolist()
    assert max(alone.replaced.tolist()) > 0.5
    scale = max(gradient.abs().max() for gradient in gradients)
    for own, other in zip(gradients, policy.parameters(), strict=True):
        assert own == near(other.grad, terms=gradient_chain(policy, 10), scale=scale)


@pytest.mark.parametrize(("num_experts", "name", "num_bytes"), [(256, "uint8", 16), (257, "int16", 32)])
def test_an_experts_number_is_as_small_as_can_be(num_experts, name, num_bytes) -> None:
    shape = RouterShape(num_layers=2, top_k=8, num_experts=num_experts)
    assert (shape.dtype.name, shape.num_bytes) == (name, num_bytes)


@pytest.mark.parametrize("family", ["Olmoe", "Qwen2Moe", "Qwen3Moe"])
def test_every_router_that_is_known_is_what_it_is_taken_for(family) -> None:
    """Replaying its own experts changes not a bit of its scores."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    hf = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for router in routers_of(hf, "a test"):
        torch.nn.init.normal_(router.weight)
    recorder = ExpertRecorder(hf)
    ids = torch.arange(12)[None]
    expected = hf(input_ids=ids).logits
    experts = recorder.last()
    assert experts.shape == (12, 2, 2)
    with ExpertReplay(hf).of(experts) as replayed:
        assert torch.equal(hf(input_ids=ids).logits, expected)
    assert replayed.share_replaced().tolist() == [0.0] * 12


def test_a_model_without_routers_is_refused(tiny_model) -> None:
    policy = policy_of(tiny_model)
    with pytest.raises(ModelError, match="enable_router_replay = true, but Qwen3ForCausalLM has no routers"):
        policy.replay_experts()
    with pytest.raises(ModelError, match="inference.record_experts = true, but Qwen3ForCausalLM"):
        ExpertRecorder(policy.hf)


def test_a_forward_without_experts_is_refused_where_they_are_replayed(tiny_moe, tokens) -> None:
    with pytest.raises(ModelError, match="forward without recorded experts"):
        replaying(tiny_moe)(*tokens, packed_layout(LENGTHS))
