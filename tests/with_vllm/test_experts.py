"""A model with experts: logprobs under the first weights and published ones, and vLLM's record of experts.

The record needs a GPU, or Triton's interpreter, which takes the place of one for a tiny model. vLLM's CPU
build has no Triton, and is refused.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.guard import server_key
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.http import HttpInferenceClient
from pellucid.model import ExpertRecorder, load_policy, packed_layout
from pellucid.transport.weights import weights_folder, write_version
from tolerance import near_logprobs

ENV = Account("run", "env")
PROMPT = list(range(5, 45))
RECORD = "--inference.record-experts"


async def sampled(client, version):
    """Two requests whose prompt is longer than a block of vLLM's cache: one stops itself, vLLM ends one."""
    whole = await client.generate(PROMPT, SamplingParams(0.0, 20), ENV, f"{version}/whole")
    stop = SamplingParams(0.0, 20, stop_token_ids=[whole.token_ids[9]])
    return [whole, await client.generate(PROMPT, stop, ENV, f"{version}/stopped")]


def check(policy, answers, *, is_recorded):
    recorder = ExpertRecorder(policy.hf)
    for answer in answers:
        ids = torch.tensor([*PROMPT, *answer.token_ids])
        with torch.no_grad():
            output = policy(ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)]))
        assert answer.logprobs == near_logprobs(output.logprobs[len(PROMPT) :], policy, len(ids))
        expected = recorder.last().numpy()[:-1]
        if is_recorded:
            found = answer.routed_experts.array()
            assert found.shape == expected.shape
            # vLLM lists a token's experts in an order of its own; rounding may decide one in a hundred.
            assert (np.sort(found, axis=2) == np.sort(expected, axis=2)).mean() > 0.99


def sample_under_three_versions(
    vllm_server, model: Path, folder: Path, env=None, *, is_recorded=False
) -> None:
    before, after = (load_policy(ModelConfig(name=str(model))) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in after.hf.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    async def ask(url: str) -> None:
        client = HttpInferenceClient(url, server_key(folder, None))
        try:
            await client.wait_until_ready()
            check(before, await sampled(client, 0), is_recorded=is_recorded)
            for version, policy in ((1, after), (2, before)):
                published = weights_folder(folder, version)
                published.mkdir(parents=True)
                write_version(policy.hf, published)
                await client.update_weights(version, published)
                check(policy, await sampled(client, version), is_recorded=is_recorded)
        finally:
            await client.close()

    with vllm_server(folder, *([RECORD] if is_recorded else []), model=model, env=env) as url:
        asyncio.run(ask(url))


def test_experts_take_new_weights(vllm_server, vllm_moe: Path, tmp_path: Path) -> None:
    sample_under_three_versions(vllm_server, vllm_moe, tmp_path)


def test_other_kinds_of_experts_take_new_weights(vllm_server, other_vllm_moe: Path, tmp_path: Path) -> None:
    sample_under_three_versions(vllm_server, other_vllm_moe, tmp_path)


def test_experts_are_those_of_the_trainers_routers(
    vllm_server, vllm_moe: Path, interpreted, tmp_path: Path
) -> None:
    sample_under_three_versions(vllm_server, vllm_moe, tmp_path, interpreted, is_recorded=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM records experts where there is a GPU")
def test_recording_experts_without_triton_is_refused_with_the_remedy(
    vllm_server, vllm_moe: Path, tmp_path: Path
) -> None:
    refused = pytest.raises(AssertionError, match="needs Triton; run it on a GPU")
    with refused, vllm_server(tmp_path, RECORD, model=vllm_moe):
        pass
