"""Policy versions straight from the trainer's GPU to vLLM's workers, by vLLM's own weight-transfer engine.

    server                                                     trainer
    POST /weights/step_7/transfer {"session": "6d1f…", …}  ->  init_weight_transfer_engine {master_address, …}
         its workers do so; {…, "num_done": 1}             ->  start_weight_update
         {…, "num_done": 2}                                ->  update_weights {names, shapes, …}
         its workers take the tensors by NCCL or CUDA IPC  <-  (the tensors)
         {…, "num_done": 3}                                ->  finish_weight_update
         {…, "num_done": 4}                                ->  done

vLLM's trainer side calls the server; here the server asks for the next call instead, at the offer that it
pulls from (`weights_offer`), with the same key. So versions, leases and digests are those of a pull:

- What is sent is the published version as it lies on the trainer's disk, whatever training does meanwhile.
- One server is served at a time. A transfer makes a group of processes and leaves it at the end, so nothing
  is left of a server, or of a trainer, that was started again.
- Nothing is changed before the names and shapes fit the model. What breaks later leaves weights that nobody
  knows, and ends the server.
- Where it cannot be done, the server pulls: the trainer refuses with the reason, and the log has it.
"""

import base64
import logging
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch

from pellucid.errors import TransportError
from pellucid.transport.weights import published_shapes, read_weights

logger = logging.getLogger(__name__)

Transfer = Literal["nccl", "ipc"]
Method = Literal[
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "wait",
    "done",
    "broken",
    "refused",
]
PATIENCE_S = 300.0
"""Seconds that a side waits for the other one's next word."""

_TURN_S = 60.0
"""Seconds that a server waits for its turn before it pulls."""

_RETRY_S = 10.0
_POLL_S = 0.02


class TransferAsk(msgspec.Struct, frozen=True, omit_defaults=True):
    """`POST /weights/step_N/transfer`: asks for the next call. Asking again changes nothing."""

    session: str
    """Random, new for each transfer."""

    backend: Transfer
    num_workers: int
    """Workers of the server that take the tensors: its data-parallel ranks × GPUs of each."""

    num_done: int = 0
    """Calls that have been carried out."""

    error: str = ""
    """Why the next one could not be."""


class TransferCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next call for the server's workers, by vLLM's name of it; or to `wait`, that all is `done`, that
    the transfer is `broken`, or that this trainer does none (`refused`)."""

    method: Method
    arguments: dict[str, Any] = {}
    reason: str = ""
    shapes: dict[str, list[int]] = {}
    """Shapes of all tensors that will come, with the first answer."""


class TensorMeta(NamedTuple):
    """vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class PublishedSource:
    """vLLM's `WeightSource` of a published version: its tensors one at a time, on the trainer's device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device

    def metadata(self) -> list[TensorMeta]:
        shapes = published_shapes(self._folder)
        return [TensorMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_weights(self._folder):
            yield name, tensor.to(self._device)


class TrainerEngine(Protocol):
    """vLLM's `TrainerWeightTransferEngine`, once it is connected."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class Endpoint(NamedTuple):
    backend: Transfer
    host: str
    """Address of the trainer at which the server has reached it."""

    port: int
    num_workers: int
    device: torch.device


Connect = Callable[[Endpoint, "TransferSession", PublishedSource], TrainerEngine]


def connect_vllm(endpoint: Endpoint, session: "TransferSession", source: PublishedSource) -> TrainerEngine:
    """Connects vLLM's trainer side with the workers of one server."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if endpoint.device.type == "cuda":
        torch.cuda.set_device(endpoint.device)  # a thread begins on the first
    info: Any
    if endpoint.backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        world_size = 1 + endpoint.num_workers
        info = NCCLTrainerInitInfo(endpoint.host, endpoint.port, world_size, rank=0)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=0)
    engine: TrainerEngine = WeightTransferTrainerFactory.trainer_init(info, client=session, source=source)
    return engine


def why_no_transfer(backend: Transfer, *, has_gpu: bool | None = None) -> str:
    """Returns why vLLM's weight-transfer engine cannot be used in this process, or ""."""
    if not (torch.cuda.is_available() if has_gpu is None else has_gpu):
        return "there is no GPU here"
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: F401
    except ImportError as error:
        return f"vLLM with a weight-transfer engine (0.32.0) is not installed here ({error})"
    if backend == "ipc" and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return "ipc is for a trainer of one process, on the GPU of the server"
    return ""


class RefusedTransferError(TransportError):
    """This trainer sends nothing in this way; servers pull."""


class TransferSession:
    """One transfer as the trainer sees it; to vLLM it is the server's client (`VLLMWeightSyncClient`)."""

    def __init__(self, ask: TransferAsk, patience_s: float = PATIENCE_S) -> None:
        self.ask = ask
        self.asked_at = time.monotonic()
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._calls: list[TransferCall] = []
        self._num_done = 0
        self._error = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if handles := update_info.get("ipc_handles"):
            update_info = {name: value for name, value in update_info.items() if name != "ipc_handles"}
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: Method, **arguments: Any) -> None:
        with self._changed:
            self._calls.append(TransferCall(method, arguments))
            number = len(self._calls)
            self._changed.wait_for(lambda: self._num_done >= number or self._error, self._patience_s)
            if self._num_done < number:
                raise TransportError(
                    self._error or f"the server has not answered {method} for {self._patience_s:g} s"
                )

    def end(self, error: str = "") -> None:
        with self._changed:
            self._calls.append(TransferCall("broken", reason=error) if error else TransferCall("done"))

    def next(self, ask: TransferAsk) -> TransferCall:
        """Takes what became of the calls so far; returns the next one, or `wait`."""
        with self._changed:
            self.asked_at = time.monotonic()
            self._num_done, self._error = ask.num_done, ask.error
            self._changed.notify_all()
            return self._calls[ask.num_done] if ask.num_done < len(self._calls) else TransferCall("wait")


class WeightsSender:
    """The trainer's side: a thread for each transfer, one of which sends at a time."""

    def __init__(
        self,
        backend: Transfer,
        device: torch.device,
        *,
        connect: Connect = connect_vllm,
        reason_against: str | None = None,
        turn_s: float = _TURN_S,
    ) -> None:
        """`reason_against`: why nothing can be sent; default: what `why_no_transfer` says."""
        self._backend, self._device, self._connect = backend, device, connect
        self._reason_against = why_no_transfer(backend) if reason_against is None else reason_against
        self._turn_s = turn_s
        self._sending = threading.Lock()
        self._sessions: dict[str, TransferSession] = {}
        if self._reason_against:
            logger.warning(
                'weights.transfer = "%s" cannot be used by this trainer, so servers pull: %s',
                backend,
                self._reason_against,
            )

    def answer(self, folder: Path, ask: TransferAsk, host: str) -> TransferCall:
        """Returns the next call of a transfer, which begins with the first question of its session. `host`:
        address of this machine that the server has reached. Raises TransportError if `folder` is gone."""
        if self._reason_against or ask.backend != self._backend:
            reason = self._reason_against or f'the trainer has weights.transfer = "{self._backend}"'
            return TransferCall("refused", reason=reason)
        session = self._sessions.get(ask.session)
        if session is not None:
            call = session.next(ask)
            if call.method in ("done", "broken") or ask.error:
                self._forget(session)
            return call
        if ask.num_done or ask.error:
            return TransferCall(
                "broken", reason="the trainer knows nothing of it; it may have been restarted"
            )
        metas = PublishedSource(folder, self._device).metadata()
        session = self._sessions[ask.session] = TransferSession(ask)
        threading.Thread(
            target=self._send, args=(session, folder, host), name="transfer", daemon=True
        ).start()
        return TransferCall("wait", shapes={each.name: list(each.shape) for each in metas})

    def _forget(self, session: TransferSession) -> None:
        """Forgets a transfer that is over, and those whose server has not asked for long."""
        longest = time.monotonic() - 2 * PATIENCE_S
        over = [key for key, each in self._sessions.items() if each is session or each.asked_at < longest]
        for key in over:
            del self._sessions[key]

    def _send(self, session: TransferSession, folder: Path, host: str) -> None:
        if not self._sending.acquire(timeout=self._turn_s):
            session.end(f"another server's transfer has lasted for {self._turn_s:g} s")
            return
        try:
            if time.monotonic() - session.asked_at > _RETRY_S:
                return  # the server has given it up
            port = _free_port(host)
            endpoint = Endpoint(self._backend, host, port, session.ask.num_workers, self._device)
            engine = self._connect(endpoint, session, PublishedSource(folder, self._device))
            try:
                engine.send_weights()
            finally:
                engine.shutdown()
            session.end()
        except Exception as error:
            logger.warning("the transfer of %s to a server broke: %s", folder.name, _name_of(error))
            session.end(_name_of(error))
        finally:
            self._sending.release()


def _name_of(error: Exception) -> str:
    return str(error) if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Receiving:
    """One transfer as the server sees it: the calls for its workers, in order."""

    def __init__(
        self,
        post: Callable[[TransferAsk], TransferCall],
        backend: Transfer,
        num_workers: int,
        *,
        turn_s: float = _TURN_S,
        patience_s: float = PATIENCE_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Waits for its turn. `post` may raise OSError, and is tried again.

        Raises RefusedTransferError if this trainer does no transfers, and TransportError if it does not begin
        one in time.
        """
        self._post, self._patience_s, self._retry_s = post, patience_s, retry_s
        self._ask = TransferAsk(secrets.token_hex(8), backend, num_workers)
        call = self._ask_trainer()
        self.shapes = call.shapes
        self._call = self._next(call, turn_s)

    def _next(self, call: TransferCall, patience_s: float) -> TransferCall:
        deadline = time.monotonic() + patience_s
        while call.method == "wait":
            if time.monotonic() > deadline:
                raise TransportError(f"the trainer sends nothing for {patience_s:g} s")
            time.sleep(_POLL_S)
            call = self._ask_trainer()
        if call.method == "refused":
            raise RefusedTransferError(call.reason)
        if call.method == "broken":
            raise TransportError(call.reason)
        return call

    def _ask_trainer(self) -> TransferCall:
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                return self._post(self._ask)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TransportError(f"the trainer cannot be reached: {error}") from error
            time.sleep(_POLL_S)

    def carry_out(self, do: Callable[[str, dict[str, Any]], object]) -> None:
        """Does what the trainer calls for until all has come; tells it of an error, and raises it."""
        while self._call.method != "done":
            try:
                do(self._call.method, self._call.arguments)
            except Exception as error:
                self.refuse(f"{type(error).__name__}: {error}")
                raise
            self._ask = msgspec.structs.replace(self._ask, num_done=self._ask.num_done + 1)
            self._call = self._next(self._ask_trainer(), self._patience_s)

    def refuse(self, reason: str) -> None:
        """Ends the transfer; the trainer is told as far as it can be reached."""
        self._ask = msgspec.structs.replace(self._ask, error=reason)
        with suppress(TransportError):
            self._ask_trainer()
