"""The head in chunks against full logits: values and gradients."""

import pytest
import torch

from pellucid.model import head
from pellucid.model.head import entropy_of, predict
from tolerance import near

TOKENS, WIDTH, VOCABULARY = 23, 8, 50


def inputs(*, bias: bool = False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).requires_grad_() if bias else None
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator, dtype=torch.int32)
    temperatures = torch.rand(TOKENS, generator=generator) + 0.5
    upstream = torch.randn(TOKENS, generator=generator)
    return hidden, weight, offset, ids, temperatures, upstream


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("max_logits", [1, 4 * VOCABULARY, 7 * VOCABULARY + 3, TOKENS * VOCABULARY])
def test_chunks_give_what_full_logits_give(bias, max_logits) -> None:
    hidden, weight, offset, ids, temperatures, upstream = inputs(bias=bias)
    parameters = [each for each in (hidden, weight, offset) if each is not None]
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    full = torch.log_softmax(logits / temperatures[:, None], -1)
    chosen = full.gather(-1, ids.long()[:, None])[:, 0]
    expected = torch.autograd.grad((chosen * upstream).sum(), parameters)
    output = predict(hidden, weight, offset, ids, temperatures, torch.arange(TOKENS), max_logits=max_logits)
    found = torch.autograd.grad((output.logprobs * upstream).sum(), parameters)
    terms, scale = WIDTH + VOCABULARY, full.abs().max().item()
    assert output.logprobs == near(chosen, terms=terms, scale=scale)
    assert output.entropy == near(entropy_of(full.detach()), terms=terms, scale=scale)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == near(theirs, terms=terms + VOCABULARY + TOKENS)


def test_tokens_that_no_loss_reads_have_values_and_no_backward() -> None:
    hidden, weight, _, ids, temperatures, upstream = inputs()
    read = torch.tensor([1, 4, 22])
    mask = torch.zeros(TOKENS).index_fill(0, read, 1.0)
    whole = predict(hidden, weight, None, ids, temperatures, torch.arange(TOKENS), max_logits=100)
    part = predict(hidden, weight, None, ids, temperatures, read, max_logits=100)
    assert torch.equal(whole.logprobs, part.logprobs)
    expected = torch.autograd.grad((whole.logprobs * upstream * mask).sum(), [hidden, weight])
    found = torch.autograd.grad((part.logprobs * upstream).sum(), [hidden, weight])
    assert found[0][0].tolist() == [0.0] * WIDTH
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == near(theirs, terms=WIDTH + 2 * VOCABULARY + TOKENS)


def test_full_logits_are_never_there(monkeypatch) -> None:
    """At most `max_logits` at once: all once forward, and those that are read once more backward."""
    seen = []

    def watched(hidden, weight, bias):
        seen.append(len(hidden) * len(weight))
        return torch.nn.functional.linear(hidden, weight, bias)

    monkeypatch.setattr(head, "linear", watched)
    hidden, weight, _, ids, temperatures, upstream = inputs()
    output = predict(hidden, weight, None, ids, temperatures, torch.arange(3), max_logits=250)
    (output.logprobs * upstream).sum().backward()
    assert max(seen) == 250
    assert sum(seen) == (TOKENS + 3) * VOCABULARY


def test_blocks_of_any_size_give_the_same(monkeypatch) -> None:
    hidden, weight, _, ids, temperatures, upstream = inputs()
    results = []
    for in_cache in (1, 3 * VOCABULARY, 1 << 19):
        monkeypatch.setattr(head, "_IN_CACHE", in_cache)
        output = predict(hidden, weight, None, ids, temperatures, torch.arange(TOKENS), max_logits=500)
        gradients = torch.autograd.grad((output.logprobs * upstream).sum(), [hidden, weight])
        results.append([output.logprobs, output.entropy, *gradients])
    for others in results[1:]:
        for ours, theirs in zip(results[0], others, strict=True):
            assert ours == near(theirs, terms=WIDTH + 2 * VOCABULARY + TOKENS)
