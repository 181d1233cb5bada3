"""How a policy version gets into a server's engine: from a folder, by a pull, or from the trainer's GPU.

weights.transport = "filesystem"    the folder of the run, and no other
"http", "object-store"              read into the server's own folder, while the engine samples on
"http" with weights.transfer        vLLM's workers take the tensors from the trainer; else they are read
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from pellucid.errors import TransportError
from pellucid.inference.client import UpdateWeightsRequest, offered_at
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.entrance import RequestError
from pellucid.transport.digests import digest_of_bytes
from pellucid.transport.weights import weights_folder
from pellucid.transport.weights_pull import OfferClient, WeightsPuller
from pellucid.transport.weights_transfer import (
    Receiving,
    RefusedTransferError,
    Transfer,
    TransferAsk,
    TransferCall,
    why_no_transfer,
)
from pellucid.workers import DaemonThreads

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TransferringEngine(Protocol):
    @property
    def num_workers(self) -> int: ...

    def receive_weights(self, version: int, receiving: Receiving) -> None: ...


class Transfers:
    """Asks the trainer to send versions to the workers of an engine."""

    def __init__(
        self,
        engine: TransferringEngine,
        offer: OfferClient,
        backend: Transfer,
        *,
        reason_against: str | None = None,
    ) -> None:
        """`reason_against`: why this machine cannot take them; default: what `why_no_transfer` says."""
        self._engine, self._offer, self._backend = engine, offer, backend
        self.is_possible = True
        if reason := why_no_transfer(backend) if reason_against is None else reason_against:
            self._give_up(reason)

    def digest(self, version: int) -> str:
        """Returns the digest of a version's `digests.json`."""
        return digest_of_bytes(self._offer.digests(version))

    def begin(self, version: int) -> Receiving | None:
        """Waits for this server's turn; returns None if the version has to be read instead."""
        path = f"/weights/step_{version}/transfer"

        def post(ask: TransferAsk) -> TransferCall:
            return msgspec.json.decode(self._offer.post(path, msgspec.json.encode(ask)), type=TransferCall)

        try:
            return Receiving(post, self._backend, self._engine.num_workers)
        except RefusedTransferError as error:
            self._give_up(f"the trainer refuses: {error}")
        except TransportError as error:
            logger.warning("policy version %d is read, and not sent by %s: %s", version, self._backend, error)
        return None

    def receive(self, version: int, receiving: Receiving) -> None:
        self._engine.receive_weights(version, receiving)

    def _give_up(self, reason: str) -> None:
        self.is_possible = False
        logger.warning(
            'weights.transfer = "%s" cannot be used, so this server reads weights from the trainer: %s',
            self._backend,
            reason,
        )


class WeightsArrival:
    def __init__(
        self,
        thread: EngineThread,
        run_dir: Path,
        puller: WeightsPuller | None,
        transfers: Transfers | None = None,
    ) -> None:
        """`run_dir`: the folder of the run, whose weights are the only ones that can be loaded, unless
        `puller` reads them from the trainer's offer."""
        self._thread = thread
        self._run_dir = run_dir.resolve()
        self._puller, self._transfers = puller, transfers
        self._pulls = DaemonThreads(1, "weights")

    @property
    def is_fetching(self) -> bool:
        return self._puller is not None and self._puller.is_pulling

    @property
    def fetched_bytes(self) -> int:
        return 0 if self._puller is None else self._puller.num_bytes

    async def take(self, asked: UpdateWeightsRequest, served: int) -> None:
        """Has the engine serve the version, or only reads it. `served`: the version that it serves."""
        if self._puller is None:
            await self._thread.update_weights(asked.version, self._own_weights(asked), asked.run)
            return
        self._check_url(self._puller, asked)
        if (transfers := self._possible_transfers()) is not None and (
            asked.only_fetch or await self._transferred(transfers, asked)
        ):
            return
        is_served = (asked.version, asked.run) == (served, self._thread.run)
        folder = await self._beside(partial(self._puller.pull, asked.version, is_served=is_served))
        if not asked.only_fetch:
            await self._thread.update_weights(asked.version, folder, asked.run)

    def _possible_transfers(self) -> Transfers | None:
        return self._transfers if self._transfers is not None and self._transfers.is_possible else None

    async def _transferred(self, transfers: Transfers, asked: UpdateWeightsRequest) -> bool:
        """Has the engine take a version from the trainer's GPU; returns whether it serves it now."""
        try:
            digest = await self._beside(partial(transfers.digest, asked.version))
        except TransportError:
            return False  # a pull knows how to wait, and when not to
        if self._thread.serves(asked.version, asked.run, digest):
            return True
        receiving = await self._beside(partial(transfers.begin, asked.version))
        if receiving is None:
            return False
        receive = partial(transfers.receive, asked.version, receiving)
        await self._thread.receive_weights(asked.version, digest, asked.run, receive)
        return True

    async def _beside(self, work: Callable[[], T]) -> T:
        """Does what takes long in another thread, while the engine samples on."""
        return await asyncio.get_running_loop().run_in_executor(self._pulls, work)

    def _check_url(self, puller: WeightsPuller, asked: UpdateWeightsRequest) -> None:
        """Refuses another address than that of this server's run, unasked."""
        url = offered_at(puller.offer.url, asked.version)
        if asked.url != url:
            raise RequestError(
                f"url = {asked.url!r} is not {url!r}, where this server's run offers policy version "
                f"{asked.version}; start all parts with the same weights.transport, host and port",
                param="url",
            )

    def _own_weights(self, asked: UpdateWeightsRequest) -> Path:
        """Returns the folder of a policy version of the server's own run; refuses any other unopened."""
        folder = weights_folder(self._run_dir, asked.version)
        folder = folder.parent.resolve() / folder.name
        if Path(asked.folder) != folder or folder.is_symlink():
            raise RequestError(
                f"folder = {asked.folder!r} is not {str(folder)!r}, where this server's run keeps policy "
                f"version {asked.version}; start the server with the output_dir of the run that publishes it",
                param="folder",
            )
        return folder

    def close(self) -> None:
        self._pulls.shutdown(wait=False, cancel_futures=True)
