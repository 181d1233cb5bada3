"""Weights through vLLM's own weight-transfer engine, on a machine without GPUs.

Both sides are vLLM's: its trainer's engine, its workers', their handshake, its layerwise reloading. What NCCL
does between them is rehearsed; see `rehearsal/sitecustomize.py`.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pellucid.guard import server_key, weights_key
from pellucid.inference.http import HttpInferenceClient
from pellucid.transport.digests import read_digests
from pellucid.transport.spool import MARKER
from pellucid.transport.weights import weights_folder, write_version
from pellucid.transport.weights_transfer import TensorMeta, TransferSession
from tests.with_vllm.test_server import changed, rounding, worst_difference

HERE = Path(__file__).parent


@contextmanager
def offered(vllm_python: str, folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    argv = [vllm_python, str(HERE / "trainer.py"), str(folder), weights_key(server_key(folder, None))]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}, text=True
    ) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def publish(model: Path, folder: Path, version: int, scale: float):
    policy = changed(model, scale)
    path = weights_folder(folder, version)
    path.mkdir(parents=True)
    write_version(policy.hf, path)
    (path / MARKER).touch()
    return policy


@contextmanager
def serving(vllm_server, folder: Path, offer: str, env, *flags: str) -> Iterator[str]:
    port = offer.rpartition(":")[2]
    own = ("--weights.transport", "http", "--weights.port", port, "--weights.transfer", "nccl")
    with vllm_server(folder, *own, *flags, env=env) as url:
        yield url


def test_the_trainer_sends_each_rank_the_tensors_that_it_published(
    vllm_python, vllm_server, vllm_model, rehearsed, tmp_path
) -> None:
    after, later = publish(vllm_model, tmp_path, 3, 0.05), publish(vllm_model, tmp_path, 4, 0.02)
    publish(vllm_model, tmp_path, 91, 0.02)

    async def ask(url: str, offer: str) -> None:
        client = HttpInferenceClient(url, server_key(tmp_path, None), weights_url=offer)
        try:
            await client.wait_until_ready()
            for version, policy in ((3, after), (4, later)):
                await client.fetch_weights(version)
                await client.update_weights(version, tmp_path)
                assert await worst_difference(client, policy, 1.0, version) <= rounding(policy)
                report = await client.served_weights()
                published = read_digests(weights_folder(tmp_path, version)).tensors
                assert [(each.rank, each.digests) for each in report.ranks] == [
                    (0, published),
                    (1, published),
                ]
            await client.update_weights(91, tmp_path)
            report = await client.served_weights()
            published = read_digests(weights_folder(tmp_path, 91)).tensors
            assert {name for name, digest in published.items() if report.digests[name] != digest} == {
                "model.norm.weight"
            }
        finally:
            await client.close()

    async def ask_anew(url: str, offer: str) -> None:
        """A server that was started again is sent what it serves; a version that fits nobody is refused."""
        client = HttpInferenceClient(url, server_key(tmp_path, None), weights_url=offer)
        try:
            await client.wait_until_ready()
            await client.update_weights(4, tmp_path)
            assert await worst_difference(client, later, 1.0, 4) <= rounding(later)
        finally:
            await client.close()

    with offered(vllm_python, tmp_path, rehearsed) as offer:
        ranks = ("--inference.vllm.data-parallel-size", "2")
        with serving(vllm_server, tmp_path, offer, rehearsed, *ranks) as url:
            asyncio.run(ask(url, offer))
        with serving(vllm_server, tmp_path, offer, rehearsed, "--inference.replica", "1") as url:
            asyncio.run(ask_anew(url, offer))
    assert not list(tmp_path.glob("weights_cache/**/*.safetensors")), "nothing was pulled"


def test_without_a_gpu_the_server_pulls_and_says_so(vllm_python, vllm_server, vllm_model, tmp_path) -> None:
    after = publish(vllm_model, tmp_path, 3, 0.05)

    async def ask(url: str, offer: str) -> None:
        client = HttpInferenceClient(url, server_key(tmp_path, None), weights_url=offer)
        try:
            await client.wait_until_ready()
            await client.update_weights(3, tmp_path)
            assert await worst_difference(client, after, 1.0, 3) <= rounding(after)
        finally:
            await client.close()

    with offered(vllm_python, tmp_path, {}) as offer, serving(vllm_server, tmp_path, offer, {}) as url:
        asyncio.run(ask(url, offer))
    assert (
        "so this server reads weights from the trainer: there is no GPU here"
        in (tmp_path / "server.log").read_text()
    )


SIGNATURES = """
import dataclasses, inspect, json
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import base, factory, ipc_engine, nccl_engine
from vllm.v1.worker.gpu_worker import Worker

def names(function):
    return list(inspect.signature(function).parameters)

def fields(kind):
    return [each.name for each in dataclasses.fields(kind)]

worker = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
          "shutdown_weight_transfer_engine")
print(json.dumps({
    "worker": {name: names(getattr(Worker, name)) for name in worker},
    "client": {name: names(getattr(base.VLLMWeightSyncClient, name)) for name in worker[:-1]},
    "engine": {name: names(getattr(base.TrainerWeightTransferEngine, name))
               for name in ("send_weights", "shutdown")},
    "connect": names(factory.WeightTransferTrainerFactory.trainer_init),
    "source": sorted(base.WeightSource.__abstractmethods__),
    "meta": fields(base.ParamMeta),
    "nccl": fields(nccl_engine.NCCLTrainerInitInfo),
    "ipc": fields(ipc_engine.IPCTrainerInitInfo),
    "ipc_update": fields(ipc_engine.IPCWeightTransferUpdateInfo),
    "receives": [hasattr(each, "receive_weights") for each in
                 (nccl_engine.NCCLWeightTransferEngine, ipc_engine.IPCWeightTransferEngine)],
    "backend": fields(WeightTransferConfig),
}))
"""


def test_vllm_has_the_interface_that_transfers_use(vllm_python) -> None:
    """Another vLLM may have changed what cannot be tried without a GPU."""
    printed = subprocess.run([vllm_python, "-c", SIGNATURES], capture_output=True, text=True, check=True)
    found = json.loads(printed.stdout.splitlines()[-1])
    assert found["worker"] == {
        "init_weight_transfer_engine": ["self", "init_info"],
        "start_weight_update": ["self"],
        "update_weights": ["self", "update_info"],
        "finish_weight_update": ["self"],
        "shutdown_weight_transfer_engine": ["self"],
    }
    for name, parameters in found["client"].items():
        code = getattr(TransferSession, name).__code__
        assert list(code.co_varnames[: code.co_argcount]) == parameters
    assert found["engine"] == {"send_weights": ["self"], "shutdown": ["self"]}
    assert found["connect"] == ["init_info", "client", "source"]
    assert found["source"] == ["__iter__", "metadata"] and tuple(found["meta"]) == TensorMeta._fields
    assert found["nccl"][:4] == ["rank", "master_address", "master_port", "world_size"]
    assert found["ipc"] == ["rank", "packed", "packed_buffer_size_bytes"]
    assert {"ipc_handles", "ipc_handles_pickled"} <= {*found["ipc_update"]}
    assert found["receives"] == [True, True] and found["backend"] == ["backend"]
