"""A pretend accelerator: runs code that is meant for a GPU without one, and counts what would slow it down.

    with rehearsing() as rehearsal:
        model.to(rehearsal.device)
        with rehearsal.phase("forward"):
            model(tokens)
    assert rehearsal.count("sync", "forward") == 0, rehearsal.table()

Tensors of the device hold host memory: values are those of the CPU's kernels. With `holds_values=False` there
are none, but shapes that no machine holds can be counted. By CUDA's rules:

    sync       the host waits for the device: .item(), bool(), nonzero, a mask as index, a blocking copy
    h2d, d2h   copies between host and device, with their bytes
    launch     operations that are neither views nor allocations: at least one kernel each
    attention  calls of an attention kernel, by its name, with the bytes of a mask

Each is recorded with the operation and the innermost lines of pellucid that asked for it. An operation that
mixes host and device raises, as CUDA does. A second stream copies to the host as late as a GPU might: when
something waits for it. Not there: other overlap, pinned memory, FSDP2, and how long anything takes.
"""

import math
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten

Kind = Literal["sync", "h2d", "d2h", "launch", "attention"]

_PACKAGE = "/pellucid/"
_NAME = "rehearsal"


class Event(NamedTuple):
    phase: str
    operation: str
    where: str
    """Lines of pellucid that asked for it, innermost first."""


class Rehearsal:
    """Counts of what happened on the device, by phase, operation and place."""

    def __init__(self, device: torch.device, memory: torch.device, total_memory: int) -> None:
        self.device = device
        self.memory = memory
        """Device that holds the values: the CPU, or meta."""

        self.total_memory = total_memory
        self.num_bytes = 0
        """Bytes of all tensors that exist on the device now."""

        self.peak_bytes: Counter[str] = Counter()
        """Most bytes that existed at once, by phase."""

        self.events: dict[str, Counter[Event]] = defaultdict(Counter)
        self.event_bytes: dict[str, Counter[Event]] = defaultdict(Counter)
        self.stream: _Stream | None = None
        """Stream that copies to the host are given to; None: the main one, which makes them at once."""

        self._phase = ""
        self._storages: dict[int, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: what happens inside is counted under `name`."""
        before, self._phase = self._phase, name
        self.peak_bytes[name] = max(self.peak_bytes[name], self.num_bytes)
        try:
            yield
        finally:
            self._phase = before

    def count(self, kind: Kind, phase: str | None = None) -> int:
        return sum(times for event, times in self.events[kind].items() if phase in (None, event.phase))

    def bytes(self, kind: Kind, phase: str | None = None) -> int:
        return sum(size for event, size in self.event_bytes[kind].items() if phase in (None, event.phase))

    def table(self, *kinds: Kind) -> str:
        """Lists events of these kinds, by default all but launches, with the most frequent first."""
        lines = []
        for kind in kinds or ("sync", "h2d", "d2h", "attention"):
            lines.append(f"{kind}: {self.count(kind):,}, {self.bytes(kind):,} bytes")
            for event, times in self.events[kind].most_common():
                size = self.event_bytes[kind][event]
                lines.append(f"  {times:6,} × {size:15,} B  {'  '.join(event)}")
        return "\n".join(lines)

    def note(self, kind: Kind, operation: str, num_bytes: int = 0) -> None:
        event = Event(self._phase, operation, _asked_from(sys._getframe(1)))
        self.events[kind][event] += 1
        self.event_bytes[kind][event] += num_bytes

    def keep_account(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor until nobody refers to it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = storage.nbytes()
        self.num_bytes += storage.nbytes()
        self.peak_bytes[self._phase] = max(self.peak_bytes[self._phase], self.num_bytes)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._storages.pop(key)


def _asked_from(frame: FrameType | None) -> str:
    own: list[str] = []
    nearest = ""
    while frame is not None and len(own) < 3:
        path = frame.f_code.co_filename
        if path != __file__:
            if _PACKAGE in path:
                own.append(f"{path.rpartition(_PACKAGE)[2]}:{frame.f_lineno}")
            elif not nearest and "/torch/" not in path:
                nearest = f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return " < ".join(own) or nearest


_now: Rehearsal | None = None


@contextmanager
def rehearsing(*, holds_values: bool = True, total_memory: int = 80 * 10**9) -> Iterator[Rehearsal]:
    """Context manager: makes the device, and counts what happens on it until the end.

    `total_memory` is that of the pretended device, in bytes. A process has one rehearsal at a time.
    """
    global _now
    assert _now is None, "a rehearsal is already running in this process"
    device, memory = _registered_device(), torch.device("cpu" if holds_values else "meta")
    is_swapping = torch.__future__.get_swap_module_params_on_conversion()
    # Without it, Module.to would make new parameters and so untie tied weights; CUDA's does not.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _now = Rehearsal(device, memory, total_memory)
    try:
        # In this thread: the engine's know no device that was registered after the first backward pass.
        with torch.autograd.set_multithreading_enabled(False):
            yield _now
    finally:
        _now = None
        torch.__future__.set_swap_module_params_on_conversion(is_swapping)


def _current() -> Rehearsal:
    if _now is None:
        raise RuntimeError(f"a tensor of the device {_NAME!r} is used after its rehearsal has ended")
    return _now


class DeviceTensor(Tensor):
    """A tensor of the device; `held` is a host or meta tensor of the same shape, strides and offset."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    held: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:  # torch refuses it to subclasses
        return self.detach().cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {_NAME} device type tensor to numpy. Use Tensor.cpu() first")

    def record_stream(self, stream: Any) -> None:
        """Does nothing: work that is given to a stream holds what it reads."""


def _wrap(held: Tensor) -> Tensor:
    with torch.inference_mode(False):  # in it, a view of a normal tensor has to be a normal one
        tensor = Tensor._make_wrapper_subclass(
            DeviceTensor,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_registered_device(),
        )
    tensor.held = held
    _current().keep_account(held)
    return tensor


def _unwrap(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("is_pinned", "is_same_size", "record_stream", "_local_scalar_dense", "set_", "detach_"),
}
"""Operations that launch no kernel, beside views."""

_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("bincount", "equal"),
}
"""Operations whose result, or its shape, the host needs."""

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_SCALARS = {"where", "masked_fill", "masked_fill_", "fill_", *_INDEXING}
"""Operations that take a host tensor without dimensions, beside pointwise ones."""


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Does an operation of torch on what its tensors hold, and counts it."""
    name = func._schema.name.rpartition("::")[2]
    rehearsal = _current()
    if name in ("copy_", "_copy_from"):
        return _copy(*(args if name == "copy_" else (args[1], args[0], *args[2:])), **kwargs)
    if name == "scaled_dot_product_attention":  # in inference mode; elsewhere, autograd's key has it
        return _attend(*args, **kwargs)
    if name not in _REPLACED:  # likewise: elsewhere, composite operations come as their parts
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    if (wanted := kwargs.get("device")) is not None:
        if torch.device(wanted).type == "cpu":  # `_to_copy`
            target = torch.empty_like(args[0].held, dtype=kwargs.get("dtype"), device="cpu")
            return _copy(target, args[0], kwargs.get("non_blocking", False))
        kwargs = {**kwargs, "device": rehearsal.memory}
    _refuse_mixed(func, name, args, kwargs)
    _count(func, name, args, kwargs)
    if name == "_local_scalar_dense" and rehearsal.memory.type == "meta":
        return 1.0
    kernel = _REPLACED.get(f"{name}.{func._overloadname}", _REPLACED.get(name, func))
    result = kernel(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns):
        written = kwargs.get("out", args[0])  # in place, or into `out`
        if isinstance(written, DeviceTensor) and written.shape != written.held.shape:
            raise NotImplementedError(f"{func} resizes what it writes to")
        return written
    return tree_map_only(Tensor, _wrap, result)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    rehearsal = _current()
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        rehearsal.note("launch", "copy_")
    else:
        kind: Kind = "h2d" if isinstance(target, DeviceTensor) else "d2h"
        rehearsal.note(kind, "non-blocking" if non_blocking else "blocking", _num_bytes(source))
        if not non_blocking:
            rehearsal.note("sync", f"{kind} copy")
    if not isinstance(target, DeviceTensor) and rehearsal.memory.type == "meta":
        return target.zero_()
    if rehearsal.stream is not None and not isinstance(target, DeviceTensor):
        rehearsal.stream.give(partial(target.copy_, _unwrap(source)))
        return target
    _unwrap(target).copy_(_unwrap(source))
    return target


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _refuse_mixed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    is_pointwise = name in _SCALARS or torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    for position, tensor in enumerate(_tensors([*args, *kwargs.values()])):
        if isinstance(tensor, DeviceTensor) or (tensor.dim() == 0 and is_pointwise):
            continue
        if name not in _INDEXING or not position:
            raise RuntimeError(
                f"{func}: expected all tensors on {_NAME}:0, but one of shape {list(tensor.shape)} "
                "is on the CPU"
            )
        _current().note("h2d", f"{name} by a host tensor", _num_bytes(tensor))  # CUDA moves it, and waits
        _current().note("sync", f"{name} by a host tensor")


def _count(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    note = _current().note
    is_mask = name in _INDEXING and any(index.dtype == torch.bool for index in _tensors([args[1]]))
    if name in _WAITING or (
        is_mask and (name == "index" or args[2].numel() > 1)
    ):  # one value: as masked_fill
        note("sync", name)
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        note("sync", "repeat_interleave without output_size")
    elif name == "_grouped_mm" and args[0].dtype != torch.bfloat16:  # CUDA's fallback: one product per expert
        note("sync", "_grouped_mm in another dtype than bfloat16")
    is_view = any(
        each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
    )
    if not is_view and name not in _FREE:
        note("launch", name)
    if name == "_varlen_attn":
        note("attention", "varlen")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Chooses a kernel as CUDA does: flash takes neither masks nor float32, the efficient one both."""
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.full((), -torch.inf, dtype=query.dtype, device=query.device)
        bias = torch.where(attn_mask, 0.0, hidden)
    kernel = "flash" if bias is None and query.dtype != torch.float32 else "efficient"
    _current().note("attention", kernel, 0 if bias is None else _num_bytes(bias))
    bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
    attended: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )[0]
    return attended


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = flash(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    none = torch.zeros((), dtype=torch.long, device=q.device)
    return out, log_sums, none, none


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    needs: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = backward(gradient, q, k, v, out, log_sums, 0.0, is_causal, attn_mask=bias, scale=scale)
    return (*found, None)


def _scores(
    query: Tensor,
    key: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    scale: float | None,
    window: list[int] | None,
) -> tuple[Tensor, float]:
    """Computes the scores [heads, queries, keys], −inf where a query does not see a key, and their scale.

    The last query of a segment stands at its last key (the alignment of flash attention), and sees up to
    `window` keys to its left and right, -1 for all.
    """
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    (num_q, num_k), (left, right) = (len(query), len(key)), window or (-1, -1)
    segment_q, segment_k = (
        torch.bucketize(torch.arange(number), starts[1:].long(), right=True)
        for number, starts in ((num_q, starts_q), (num_k, starts_k))
    )
    ends_q, ends_k = starts_q[1:].long()[segment_q], starts_k[1:].long()[segment_k]
    distance = (torch.arange(num_k) - ends_k)[None] - (torch.arange(num_q) - ends_q)[:, None]
    sees = segment_q[:, None] == segment_k[None]
    sees &= (distance >= -left) if left >= 0 else True
    sees &= (distance <= right) if right >= 0 else True
    by_head = torch.einsum("qhw,khw->hqk", query, _for_each_query_head(key, query))
    return (by_head * scale).masked_fill(~sees, -torch.inf), scale


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def emulated_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes torch_attn::_varlen_attn on host tensors of any dtype, by one dense matrix per head."""
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if query.is_meta:
        return torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32), random
    assert int(cu_seq_q[-1]) == len(query) and int(cu_seq_k[-1]) == len(key)
    assert int(cu_seq_q.diff().max()) == max_q and int(cu_seq_k.diff().max()) == max_k
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (tensor.to(wide) for tensor in (query, key, value))
    scores, _scale = _scores(q, k, cu_seq_q, cu_seq_k, scale, window_size)
    log_sums = scores.logsumexp(-1)
    weights = (scores - log_sums[..., None]).exp()
    out = torch.einsum("hqk,khw->qhw", weights, _for_each_query_head(v, q))
    return out.to(query.dtype), log_sums, random


def emulated_varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients as the kernel does: from the given output and log-sum-exp, whatever they are."""
    if query.is_meta:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, o, gradient = (tensor.to(wide) for tensor in (query, key, value, out, grad_out))
    scores, scale = _scores(q, k, cu_seq_q, cu_seq_k, scale, window_size)
    weights = (scores - lse.to(wide)[..., None]).exp()
    of_weights = torch.einsum("qhw,khw->hqk", gradient, _for_each_query_head(v, q))
    of_scores = weights * (of_weights - (gradient * o).sum(-1).T[..., None]) * scale
    of_query = torch.einsum("hqk,khw->qhw", of_scores, _for_each_query_head(k, q))
    by_group = (len(key), key.shape[1], -1, key.shape[2])
    of_key = torch.einsum("hqk,qhw->khw", of_scores, q).view(by_group).sum(2)
    of_value = torch.einsum("hqk,qhw->khw", weights, gradient).view(by_group).sum(2)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _flash_only(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses the dtypes that CUDA's flash attention refuses."""

    def checked(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {first.dtype}")
        return kernel(first, *args, **kwargs)

    return checked


def _histogram(values: Tensor, *args: Any) -> Tensor:
    """Counts integers, too, as CUDA's kernel does."""
    return aten.histc(values.float(), *args).to(values.dtype)  # type: ignore[no-any-return]


def _wide_product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiplies without rounding to the inputs' dtype, which the CPU has no kernel for."""
    return left.to(out_dtype) @ right.to(out_dtype)


_REPLACED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_varlen_attn": _flash_only(emulated_varlen),
    "_varlen_attn_backward": _flash_only(emulated_varlen_backward),
    "_fused_rms_norm": aten._fused_rms_norm.default,  # one kernel on CUDA
    "histc": _histogram,
    "mm.dtype": _wide_product,
}


class _DeviceHook(_DummyPrivateUse1Hook):
    """Tells torch whether the device is there: while a rehearsal runs, and not afterwards."""

    def is_available(self) -> bool:
        return _now is not None


class _DeviceModule(_DummyBackendModule):
    """The functions that torch looks up as `torch.rehearsal`; random numbers are drawn on the host."""

    def is_available(self) -> bool:
        return _now is not None

    def device_count(self) -> int:
        return int(_now is not None)

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(total_memory=_current().total_memory)

    def synchronize(self, *_: Any) -> None:
        """Counts a sync; torch's profiler asks for one after a rehearsal, too, where nothing is counted."""
        if _now is not None:
            _now.note("sync", "synchronize")

    def current_stream(self, *_: Any) -> Any:
        return _Stream() if _now is None or _now.stream is None else _now.stream

    def Stream(self, *_: Any) -> Any:
        return _Stream()

    @contextmanager
    def stream(self, stream: Any = None) -> Iterator[None]:
        """Context manager: copies to the host are given to a stream of `Stream`; None is the main one."""
        rehearsal = _current()
        before, rehearsal.stream = rehearsal.stream, stream
        try:
            yield
        finally:
            rehearsal.stream = before


class _Stream:
    """A stream: what it is given is done when it is waited for."""

    def __init__(self) -> None:
        self._given: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def give(self, work: Callable[[], Any]) -> None:
        self._given.append(work)

    def wait_stream(self, other: Any) -> None:
        other.finish()

    def wait_event(self, event: Any) -> None:
        event.finish()

    def record_event(self) -> Any:
        finish = partial(self.finish, len(self._given))
        return SimpleNamespace(finish=finish, synchronize=partial(self.synchronize, finish))

    def finish(self, num_given: int | None = None) -> None:
        """Does the first `num_given` parts of its work, or all, unless they are done."""
        with self._lock:
            for number, work in enumerate(self._given[:num_given]):
                work()
                self._given[number] = lambda: None

    def synchronize(self, finish: Callable[[], None] | None = None) -> None:
        """Counts a wait of the host, unless a thread beside the main one waits."""
        (finish or self.finish)()
        if _now is not None and threading.current_thread() is threading.main_thread():
            _now.note("sync", "synchronize")


@cache
def _registered_device() -> torch.device:
    """Registers the device with torch, once in a process."""
    _setup_privateuseone_for_python_backend(_NAME, _DeviceModule(), _DeviceHook())
    library = torch.library.Library("aten", "IMPL")
    bare = (aten.empty.memory_format, aten.empty_strided.default, aten._copy_from.default)
    for operation in (*bare, aten.arange.default, aten.arange.start, aten.arange.start_step):
        library.impl(operation, partial(_run, operation), "PrivateUse1")  # no tensor to dispatch on
    library.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    _foreach_utils._foreach_supported_types.append(DeviceTensor)  # optimizers ask for it by type
    _registered.append(library)
    return torch.device(_NAME, 0)


_registered: list[Any] = []
"""Libraries of the registration: torch forgets one that nobody refers to."""
