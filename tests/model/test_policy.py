import math
from collections import Counter
from functools import partial

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.errors import ModelError
from pellucid.model import PackedAttention, load_policy, packed_layout, token_logprobs
from pellucid.model.head import entropy_of
from pellucid.model.load import check_tokenizer
from pellucid.model.tiny import character_tokenizer
from tolerance import near_logprobs


def test_logprobs_and_entropy_by_hand() -> None:
    """Two equal logits at any temperature: log ½ and log 2. Logits (0, 2) at temperature 2: sigmoid(1)."""
    logprobs = token_logprobs(torch.tensor([[3.0, 3.0], [0.0, 2.0]]), torch.tensor([5.0, 2.0]))
    p = 1 / (1 + math.exp(-1))
    assert logprobs[0].tolist() == pytest.approx([math.log(0.5)] * 2)
    assert logprobs[1].tolist() == pytest.approx([math.log(1 - p), math.log(p)])
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert entropy_of(logprobs).tolist() == pytest.approx([math.log(2), entropy])


def test_entropy_of_a_certain_token_is_zero() -> None:
    logprobs = token_logprobs(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1.0]))
    assert entropy_of(logprobs).tolist() == [0.0]


def test_first_tokens_have_no_prediction_and_temperature_is_the_tokens_own(tiny_model) -> None:
    policy = load_policy(ModelConfig(name=str(tiny_model)))
    ids = torch.tensor([5, 6, 7, 8, 9])
    positions = torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        hot = policy(ids, positions, torch.tensor([9.0, 1.0, 2.0, 9.0, 0.5]), packed_layout([3, 2]))
        plain = policy(ids, positions, torch.ones(5), packed_layout([3, 2]))
        hidden = policy.hf.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, plan=PackedAttention([3, 2])
        ).last_hidden_state[0]
    vocabulary = math.log(policy.vocab_size)
    for output in (hot, plain):
        assert output.logprobs[[0, 3]].tolist() == pytest.approx([-vocabulary] * 2)
        assert output.entropy[[0, 3]].tolist() == pytest.approx([vocabulary] * 2)
    assert hot.logprobs[1] == plain.logprobs[1]
    for token, before, temperature in ((2, 1, 2.0), (4, 3, 0.5)):
        expected = (policy.logits(hidden[before]) / temperature).log_softmax(-1)[ids[token]]
        assert hot.logprobs[token] == near_logprobs(expected, policy, 3)


def test_a_missing_folder_says_what_to_do() -> None:
    with pytest.raises(
        ModelError, match="model.name = './no/such': no such folder; give a local model folder"
    ):
        load_policy(ModelConfig(name="./no/such"))


def test_a_folder_without_a_model_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(ModelError, match="could not be loaded .* check that it holds config.json"):
        load_policy(ModelConfig(name=str(tmp_path)))


def test_a_tokenizer_that_does_not_fit_is_refused(tiny_model) -> None:
    policy = load_policy(ModelConfig(name=str(tiny_model)))
    tokenizer = character_tokenizer()
    check_tokenizer(policy, tokenizer, "m")
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ModelError, match="the tokenizer has 102 tokens, the model only 101"):
        check_tokenizer(policy, tokenizer, "m")


def test_checkpointed_activations_are_computed_again_and_give_the_same_gradient(tiny_model) -> None:
    arguments = (
        torch.arange(5, 12),
        torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        torch.ones(7),
        packed_layout([4, 3]),
    )
    gradients, calls = [], Counter()
    for checkpointed in (False, True):
        policy = load_policy(ModelConfig(name=str(tiny_model)), trainable=True)
        if checkpointed:
            policy.checkpoint_activations()
        begun = partial(calls.update, [checkpointed])
        policy.layers[0].mlp.register_forward_pre_hook(lambda *_, begun=begun: begun())
        policy(*arguments).logprobs.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    assert calls == {False: 1, True: 2}
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
