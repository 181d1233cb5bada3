"""A server with vLLM behind it, in its own environment; `make test-vllm` says where that is."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from pellucid.model.tiny import character_tokenizer, make_tiny_model, make_tiny_moe_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return os.path.abspath(os.environ["PELLUCID_VLLM_PYTHON"])


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention for CPUs wants heads of at least 32."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, num_layers=2, num_kv_heads=2)
    return folder


@pytest.fixture(scope="session")
def vllm_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of three layers is dense."""
    folder = tmp_path_factory.mktemp("moe")
    make_tiny_moe_model(folder, hidden_size=128, dense_layers=[0])
    return folder


SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
OTHERS = {
    "qwen2_moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "intermediate_size": 64,
    },
    "olmoe": {"intermediate_size": 64},
}


@pytest.fixture(scope="session", params=OTHERS)
def other_vllm_moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other kinds of experts that vLLM takes new weights of; one has shared experts beside them."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIG_MAPPING[request.param](**SIZES, **OTHERS[request.param])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


INTERPRETER = """
from triton.backends import backends


class Driver:
    @staticmethod
    def is_active():
        return True


class Interpreter:
    driver, compiler = Driver, None


backends["cpu"] = Interpreter
"""
"""Program with which Python starts: vLLM's CPU build takes Triton if it has a backend of that name."""


@pytest.fixture
def interpreted(tmp_path: Path) -> Mapping[str, str]:
    """Environment of a server that interprets its Triton kernels on the CPU; empty where there is a GPU."""
    if torch.cuda.is_available():
        return {}
    if (triton := os.environ.get("PELLUCID_VLLM_TRITON")) is None:
        pytest.skip(
            "needs a GPU, or a folder with Triton (PELLUCID_VLLM_TRITON, as `make test-vllm` sets it)"
        )
    folder = tmp_path / "interpreter"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(INTERPRETER)
    path = (str(folder), os.path.abspath(triton), os.environ.get("PYTHONPATH", ""))
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture(scope="session")
def rehearsed() -> Mapping[str, str]:
    """Environment of a process in which something takes the place of GPUs; see `rehearsal`."""
    folder = Path(__file__).parent / "rehearsal"
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


@pytest.fixture(scope="session")
def vllm_server(vllm_python: str, vllm_model: Path) -> Callable[..., AbstractContextManager[str]]:
    """`with vllm_server(folder, *flags) as url`."""

    @contextmanager
    def serve(
        folder: Path, *flags: str, model: Path = vllm_model, env: Mapping[str, str] | None = None
    ) -> Iterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [
            *(vllm_python, "-m", "pellucid.cli", "inference", "--model.name", str(model)),
            *("--inference.backend", "vllm", "--inference.port", str(port), "--inference.threads", "1"),
            *("--inference.max-model-len", "256", "--inference.max-concurrent", "8"),
            *("--inference.vllm.kv-cache-bytes", str(64 << 20), "--output-dir", str(folder), *flags),
        ]
        with (folder / "server.log").open("wb") as log:
            own = {**os.environ, **(env or {})}
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=own)
        try:
            while process.poll() is None and not answers(f"http://127.0.0.1:{port}/health"):
                time.sleep(0.1)
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            code = process.wait(60)
        assert code in (0, -15), (folder / "server.log").read_text()[-3000:]

    return serve
