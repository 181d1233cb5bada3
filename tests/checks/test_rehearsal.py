"""The pretend accelerator itself: it computes what the CPU computes, and sees what would make a GPU wait."""

import json

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from pellucid.checks.rehearsal import emulated_varlen, emulated_varlen_backward, rehearsing
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.model import load_policy
from pellucid.model.policy import Policy
from tolerance import near

MIXED = "expected all tensors on rehearsal:0, but one of shape"


def waits(do) -> list[tuple[str, str]]:
    """Runs `do` on a device tensor; returns operation and place of each sync."""
    with rehearsing() as rehearsal:
        values = torch.tensor([3.0, 0.0, 5.0]).to(rehearsal.device, non_blocking=True)
        with rehearsal.phase("do"):
            do(values)
        assert rehearsal.count("sync") == rehearsal.count("sync", "do")
        return [(event.operation, event.where) for event in rehearsal.events["sync"].elements()]


@pytest.mark.parametrize(
    ("do", "operation"),
    [
        (lambda values: values[0].item(), "_local_scalar_dense"),
        (lambda values: bool(values[0] > 1), "_local_scalar_dense"),
        (lambda values: int(values[2]), "_local_scalar_dense"),
        (lambda values: values.tolist(), "d2h copy"),
        (lambda values: values.cpu(), "d2h copy"),
        (lambda values: values.nonzero(), "nonzero"),
        (lambda values: values[values > 1], "index"),
        (lambda values: torch.equal(values, values), "equal"),
        (lambda values: torch.ones(3).to(values.device), "h2d copy"),
        (lambda values: torch.tensor([1, 2], device=values.device), "h2d copy"),
        (lambda values: values[torch.tensor([0, 2])], "index by a host tensor"),
        (lambda values: values.repeat_interleave(values.long()), "repeat_interleave without output_size"),
        (lambda values: torch.rehearsal.synchronize(), "synchronize"),
    ],
)
def test_what_makes_the_host_wait_is_recorded_with_its_line(do, operation) -> None:
    ((found, where),) = waits(do)
    assert found == operation
    assert where == f"checks/test_rehearsal.py:{do.__code__.co_firstlineno}"


def test_what_does_not_wait_is_not_recorded() -> None:
    def do(values) -> None:
        values.masked_fill_(values > 4, 1.0)
        torch.where(values > 1, values, 0.0).sum()
        values[torch.arange(2, device=values.device)]
        values.repeat_interleave(2)
        values.to("cpu", non_blocking=True)
        values * 2.0 + torch.tensor(1.0)  # a host tensor without dimensions is an argument of the kernel

    assert waits(do) == []


def test_values_and_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    linear, states = torch.nn.Linear(8, 8), torch.randn(5, 8)
    expected = torch.nn.functional.silu(linear(states)).square().sum()
    expected.backward()
    gradient, linear.weight.grad, linear.bias.grad = linear.weight.grad.clone(), None, None
    with rehearsing() as rehearsal:
        linear.to(rehearsal.device)
        found = torch.nn.functional.silu(linear(states.to(rehearsal.device))).square().sum()
        found.backward()
        assert found.item() == near(expected, terms=8 + 40)
        assert linear.weight.grad.cpu() == near(gradient, terms=8 + 5)


@pytest.mark.parametrize(
    "mix",
    [
        lambda device: torch.ones(3, device=device) + torch.ones(3),
        lambda device: torch.ones(3) + torch.ones(3, device=device),
        lambda device: torch.nn.Linear(3, 3).to(device)(torch.ones(1, 3)),
        lambda device: torch.cat([torch.ones(3), torch.ones(3, device=device)]),
    ],
)
def test_mixing_host_and_device_raises(mix) -> None:
    with rehearsing() as rehearsal, pytest.raises(RuntimeError, match=MIXED):
        mix(rehearsal.device)


def test_tied_weights_stay_tied() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    with rehearsing() as rehearsal:
        both = torch.nn.ModuleList([first, second]).to(rehearsal.device)
        assert both[0].weight is both[1].weight


def test_launches_copies_and_memory_are_counted() -> None:
    with rehearsing() as rehearsal:
        states = torch.ones(4, 8).to(rehearsal.device)
        before = rehearsal.num_bytes
        with rehearsal.phase("multiply"):
            product = (states @ states.T).exp_()
            del product
        with rehearsal.phase("view"):
            states.view(8, 4).T[1:].detach()
        assert (rehearsal.count("h2d"), rehearsal.bytes("h2d")) == (1, 4 * 8 * 4)
        assert (rehearsal.count("launch", "multiply"), rehearsal.count("launch", "view")) == (2, 0)
        assert before == rehearsal.num_bytes == 4 * 8 * 4
        assert rehearsal.peak_bytes["multiply"] == before + 4 * 4 * 4
        assert "multiply  exp_  checks/test_rehearsal.py" in rehearsal.table("launch")


def test_shapes_that_no_machine_holds_are_counted() -> None:
    with rehearsing(holds_values=False) as rehearsal:
        weight = torch.empty(1 << 20, 1 << 14, device=rehearsal.device, requires_grad=True)
        (torch.empty(1 << 10, 1 << 14, device=rehearsal.device) @ weight.T).sum().backward()
        assert rehearsal.num_bytes == 2 * 4 << 34
        assert rehearsal.count("sync") == 0


def test_a_tensor_outlives_no_rehearsal() -> None:
    with rehearsing() as rehearsal:
        left = torch.ones(1, device=rehearsal.device)
        assert torch.accelerator.is_available()
    with pytest.raises(RuntimeError, match="after its rehearsal has ended"):
        left + 1
    assert torch.accelerator.is_available() == torch.cuda.is_available()


WINDOWS = [(-1, 0), (-1, -1), (2, 0), (1, 1)]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_emulated_kernel_is_attention(window) -> None:
    """Two segments of queries, [2, 3], at the ends of [4, 3] keys; two query heads for each key head."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for tokens, heads in ((5, 4), (7, 2), (7, 2))
    )
    sees = torch.zeros(5, 7, dtype=torch.bool)
    for row in range(5):
        place = row + 2  # queries 0, 1 stand at keys 2, 3; queries 2, 3, 4 at 4, 5, 6
        first, last = (0, 4) if row < 2 else (4, 7)
        left, right = window
        for column in range(first, last):
            sees[row, column] = (left < 0 or column >= place - left) and (
                right < 0 or column <= place + right
            )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (query, key, value)), attn_mask=sees, enable_gqa=True
    ).transpose(0, 1)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
    arguments = (query.detach(), key.detach(), value.detach())
    out, log_sums, random = emulated_varlen(*arguments, *starts, 3, 4, False, None, list(window))
    assert out == near(expected, terms=8 + 7, dtype=torch.float64)
    gradient = torch.randn(out.shape, dtype=torch.float64)
    found = emulated_varlen_backward(
        gradient, *arguments, out, log_sums, *starts, 3, 4, False, random, None, list(window)
    )
    expected_gradients = torch.autograd.grad(expected, (query, key, value), gradient)
    for ours, theirs in zip(found, expected_gradients, strict=True):
        assert ours == near(theirs, terms=4 * (8 + 7), dtype=torch.float64)


def test_attention_kernels_take_what_cudas_take() -> None:
    with rehearsing() as rehearsal:
        starts = torch.tensor([0, 3], dtype=torch.int32).to(rehearsal.device)
        states = torch.randn(3, 2, 8).to(rehearsal.device)
        half = states.bfloat16()
        out = varlen_attn(half, half, half, starts, starts, 3, 3, window_size=(-1, 0))
        assert out[0].tolist() == half[0].tolist()  # the first token sees itself alone
        by_head = half.transpose(0, 1)[None]
        torch.nn.functional.scaled_dot_product_attention(by_head, by_head, by_head, is_causal=True)
        mask = torch.ones(3, 3, dtype=torch.bool, device=rehearsal.device)
        torch.nn.functional.scaled_dot_product_attention(by_head, by_head, by_head, attn_mask=mask)
        assert [event.operation for event in rehearsal.events["attention"]] == [
            "varlen",
            "flash",
            "efficient",
        ]
        assert rehearsal.bytes("attention") == 3 * 3 * 2
        with pytest.raises(RuntimeError, match="only supports fp16 and bf16"):
            varlen_attn(states, states, states, starts, starts, 3, 3)


def rehearsed(capsys, model, *flags) -> tuple[int, dict[str, dict[str, float]]]:
    code = main(["verify", "--rehearse", "--json", "--model.name", str(model), "--seq-len", "64", *flags])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {line["phase"]: line for line in lines}


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("tiny_model", []),
        ("tiny_model", ["--model.lora.rank", "4", "--trainer.model.activation-checkpointing"]),
        ("tiny_model", ["--trainer.model.compile"]),
        ("tiny_moe", ["--trainer.enable-router-replay"]),
    ],
)
def test_verify_rehearses_a_model_by_its_shape(model, flags, capsys, request) -> None:
    folder = request.getfixturevalue(model)
    code, phases = rehearsed(capsys, folder, *flags)
    assert code == 0
    assert list(phases) == ["load", "forward", "loss", "backward", "update"]
    assert [phases[name]["syncs"] for name in list(phases)[:4]] == [0, 0, 0, 0]
    assert [phases[name]["copies"] for name in list(phases)[:4]] == [2, 1, 0, 0]
    num_weights = sum(each.numel() for each in load_policy(ModelConfig(name=str(folder))).parameters())
    itemsize = 2 if "--model.lora.rank" in flags else 4  # frozen weights are held as the forward computes
    assert itemsize * num_weights <= phases["load"]["peak_bytes"] < 1.5 * itemsize * num_weights
    assert phases["backward"]["launches"] > phases["forward"]["launches"] > 100


def test_verify_fails_where_the_host_would_wait(tiny_model, capsys, monkeypatch) -> None:
    predict = Policy.predict

    def waiting(policy, hidden, *others):
        hidden.sum().item()
        return predict(policy, hidden, *others)

    monkeypatch.setattr(Policy, "predict", waiting)
    code, phases = rehearsed(capsys, tiny_model)
    assert (code, phases["forward"]["syncs"]) == (1, 1)
