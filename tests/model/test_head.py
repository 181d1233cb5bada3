"""The head in chunks against full logits: values and gradients."""

import pytest
import torch

from pellucid.checks.rehearsal import rehearsing
from pellucid.model import head
from pellucid.model.head import MAX_LOGITS, entropy_of, max_logits_on, predict
from tolerance import eps, near

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


@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (False, 1.5), (True, 4.0)])
@pytest.mark.parametrize("max_logits", [1, 4 * VOCABULARY, 7 * VOCABULARY + 3, TOKENS * VOCABULARY])
def test_chunks_give_what_full_logits_give(bias, softcap, max_logits) -> None:
    hidden, weight, offset, ids, temperatures, upstream = inputs(bias=bias)
    parameters = [each for each in (hidden, weight, offset) if each is not None]
    logits = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits / temperatures[:, None], -1)
    chosen = full.gather(-1, ids.long()[:, None])[:, 0]
    expected = torch.autograd.grad((chosen * upstream).sum(), parameters)
    output = predict(
        *(hidden, weight, offset, ids, temperatures, torch.arange(TOKENS)),
        max_logits=max_logits,
        softcap=softcap,
    )
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


def test_a_gpu_takes_chunks_by_its_memory() -> None:
    assert max_logits_on(torch.device("cpu")) == MAX_LOGITS
    for memory in (24 * 10**9, 80 * 10**9):
        with rehearsing(holds_values=False, total_memory=memory) as rehearsal:
            assert 8 * max_logits_on(rehearsal.device) == memory // 16


def test_a_large_head_takes_few_launches_and_the_memory_it_may() -> None:
    """Llama 3 8B with 32,768 tokens on 80 GB: 7 chunks; before, there were 253."""
    num_tokens, width, vocabulary = 1 << 15, 4096, 128_256
    with rehearsing(holds_values=False) as rehearsal:

        def made(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=rehearsal.device)

        hidden, weight = made(num_tokens, width).requires_grad_(), made(vocabulary, width).requires_grad_()
        ids, read = (made(num_tokens, dtype=torch.int64) for _ in range(2))
        temperatures = made(num_tokens, dtype=torch.float32)
        before = rehearsal.num_bytes
        with rehearsal.phase("forward"):
            logprobs = predict(hidden, weight, None, ids, temperatures, read).logprobs
        with rehearsal.phase("backward"):
            logprobs.sum().backward()
        assert rehearsal.count("sync") == 0
        assert rehearsal.count("launch") <= 200, rehearsal.table("launch")
        products = [event for event in rehearsal.events["launch"].elements() if event.operation == "mm"]
        assert len(products) == 7 * (1 + 3)  # logits; logits again, and both gradients
        limit = 80 * 10**9 // 16
        assert rehearsal.peak_bytes["forward"] - before <= limit + 10**6
        # Backward, the weight's gradient exists twice, in float32; and states that are read, with theirs.
        gradients = 2 * 4 * vocabulary * width + 3 * 2 * num_tokens * width
        assert rehearsal.peak_bytes["backward"] - before <= limit + gradients + 10**6


@pytest.mark.parametrize("num_chunks", [2, 64])
def test_the_gradient_adds_up_in_float32(num_chunks) -> None:
    """In bfloat16, logits are rounded, their gradients, and the result; not once more for every chunk."""
    torch.manual_seed(0)
    num_tokens, width, vocabulary = 512, 16, 64
    hidden, weight = torch.randn(num_tokens, width).bfloat16(), torch.randn(vocabulary, width).bfloat16()
    ids, read = torch.randint(0, vocabulary, (num_tokens,)), torch.arange(num_tokens)
    temperatures, upstream = torch.ones(num_tokens), torch.rand(num_tokens) + 0.5
    exact = weight.double().requires_grad_()
    logprobs = (hidden.double() @ exact.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    (expected,) = torch.autograd.grad((logprobs * upstream).sum(), exact)
    max_logits = num_tokens * vocabulary // num_chunks
    found = {}
    with rehearsing() as rehearsal:
        for device in ("cpu", rehearsal.device):
            moved = [each.detach().to(device) for each in (hidden, weight, ids, temperatures, read, upstream)]
            moved[1].requires_grad_()
            output = predict(moved[0], moved[1], None, *moved[2:5], max_logits=max_logits)
            (output.logprobs * moved[5]).sum().backward()
            found[str(device)] = moved[1].grad.cpu().double()
    for gradient in found.values():
        error = (gradient - expected).norm() / expected.norm()
        print(num_chunks, float(error))
        assert error <= eps(torch.bfloat16) / 2, num_chunks
