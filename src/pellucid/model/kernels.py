"""Checks of a device before it trains: whether its kernels compute what pellucid takes them for."""

import torch

from pellucid.data.tokenizer import first_line
from pellucid.errors import ConfigError, ModelError
from pellucid.model.attention import PLAIN, SharedAttention
from pellucid.model.segments import Family


def check_kernel(device: torch.device) -> None:
    """Raises ModelError unless flash attention on this device aligns segments as `model/segments.py` says.

    A CPU has none, and nothing to check.
    Both ways attend to the same numbers. Their results differ by the roundings of bfloat16, or by the size of
    the values where a query sees other keys.
    """
    if device.type == "cpu":
        return
    generator = torch.Generator().manual_seed(0)
    plan = SharedAttention([Family(0, [5]), Family(3, [2, 6, 1])])
    query, key, value = (
        torch.randn(1, heads, 17, 64, generator=generator).bfloat16().to(device) for heads in (4, 2, 2)
    )
    remedy = 'set trainer.model.precision and model.dtype to "float32", which need no flash attention'
    with torch.no_grad():
        expected = plan.attend(0, query.float(), key.float(), value.float(), None, PLAIN)
        try:
            found = plan.attend(0, query, key, value, None, PLAIN)
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(f"no flash attention on {device}: {first_line(error)}; {remedy}") from error
        gap = float((found.float() - expected).abs().max())
    limit = 4 * torch.finfo(torch.bfloat16).eps * float(value.abs().max())
    if not gap <= limit:
        raise ModelError(
            f"flash attention on {device} is off by {gap:.2g} where rounding explains {limit:.1g}: its "
            f"causal mask does not end at the last key of a sequence; {remedy}"
        )


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError unless torch can compile for this device, which needs compilers outside of torch."""
    compiled = torch.compile(lambda numbers: numbers * 2 + 1, dynamic=True)
    try:
        compiled(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        cause = getattr(error, "inner_exception", error)
        raise ConfigError(
            f"trainer.model.compile = true, but torch cannot compile for {device.type} "
            f"({type(cause).__name__}: {first_line(cause)}); install g++, and Triton for a GPU, or leave it "
            "out"
        ) from error
