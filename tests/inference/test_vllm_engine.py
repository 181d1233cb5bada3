"""What pellucid keeps of vLLM's requests: slots, books, versions. vLLM itself runs in `make test-vllm`."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fake_vllm import FakeCore
from pellucid.config import InferenceRunConfig
from pellucid.errors import ConfigError, InferenceError, TransportError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.server import open_engine
from pellucid.inference.slots import Request, Scoring, run_to_end
from pellucid.inference.vllm_core import (
    MAX_SCORINGS,
    RecordedLayers,
    VllmCore,
    agreed,
    engine_args,
    max_lora_rank,
)
from pellucid.inference.vllm_engine import VllmEngine, require_experts
from pellucid.inference.vllm_worker import PublishedWeights, forget_expert_kernels
from pellucid.model import RouterShape
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import write_version

ENV = Account("run", "env")


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def engine(core: FakeCore, **options) -> VllmEngine:
    options = {"num_slots": 2, "max_length": 64, "max_queued": 8, "vocab_size": 100, **options}
    return VllmEngine(core, **options)


def request(prompt, finished, **params) -> Request:
    return Request(prompt, SamplingParams(**params), ENV, finished.append)


def test_every_request_gets_its_tokens_and_they_are_in_the_books(core) -> None:
    finished: list = []
    own = engine(core)
    run_to_end(own, [request([10 * n], finished, max_tokens=n) for n in (3, 1, 2)])
    assert [each.token_ids for each in finished] == [[11], [31, 32, 33], [21, 22]]
    assert {each.finish_reason for each in finished} == {"length"}
    assert own.counts.sampled == own.counts.delivered == Counter({ENV: 6})
    assert core.num_steps == 3 and core.num_running == 0


def test_it_stops_where_the_request_says_and_vllm_is_told(core) -> None:
    finished: list = []
    own = engine(core, decode_text=lambda ids: "".join(chr(64 + each) for each in ids))
    run_to_end(
        own,
        [
            request([1], finished, max_tokens=20, stop_token_ids=[4]),
            request([1], finished, max_tokens=20, stop=["DE"]),
        ],
    )
    assert [each.token_ids for each in finished] == [[2, 3, 4], [2, 3, 4, 5]]
    assert {each.finish_reason for each in finished} == {"stop"}
    assert core.num_running == 0


def test_tokens_carry_the_version_of_their_step(core) -> None:
    finished: list = []
    own = engine(core)
    own.submit(request([1], finished, max_tokens=5))
    own.step()
    own.update_weights(3, Path("step_3"))
    own.step()
    own.step()
    own.update_weights(4, Path("step_4"))
    while not own.is_idle:
        own.step()
    (answer,) = finished
    assert answer.token_ids == [2, 3, 4, 5, 6]
    assert answer.policy_versions == [(0, 1), (3, 2), (4, 2)]
    assert answer.logprobs == [0, -1, -1, -2, -2]
    assert len(core.started) == 1, "it keeps its cache"


def test_prompts_are_shared_until_weights_are_loaded(core) -> None:
    """Those of a version that is published again are others."""
    own = engine(core)
    prompt = list(range(10))
    run_to_end(own, [request(prompt, [], max_tokens=1) for _ in range(2)])
    assert (own.counts.prefill_tokens, own.counts.shared_tokens) == (12, 8)
    own.update_weights(1, Path("step_1"))
    run_to_end(own, [request(prompt, [], max_tokens=1)])
    assert (own.counts.prefill_tokens, own.counts.shared_tokens) == (22, 8)
    own.update_weights(1, Path("step_1"))
    run_to_end(own, [request(prompt, [], max_tokens=1)])
    assert (own.counts.prefill_tokens, own.counts.shared_tokens) == (32, 8)
    assert [salt for _, _, salt in core.started] == ["0", "0", "1", "2"]


def test_one_without_tokens_starts_again_under_new_weights(core) -> None:
    finished: list = []
    own = engine(core)
    prompt = list(range(20))
    own.submit(request(prompt, finished, max_tokens=2))
    own.step()
    own.update_weights(5, Path("step_5"))
    while not own.is_idle:
        own.step()
    assert [(ids, salt) for ids, _, salt in core.started] == [(prompt, "0"), (prompt, "1")]
    assert finished[0].policy_versions == [(5, 2)] and finished[0].token_ids == [20, 21]


def test_the_first_adapter_makes_what_runs_start_again_and_the_next_does_not(core) -> None:
    finished: list = []
    own = engine(core)
    own.submit(request([1], finished, max_tokens=4, seed=7, temperature=0.5))
    own.step()
    own.update_weights(1, Path("adapter"))
    own.step()
    own.update_weights(2, Path("adapter"))
    while not own.is_idle:
        own.step()
    (_, first, _), (prompt, again, salt) = core.started
    assert (prompt, salt) == ([1, 2], "1")
    assert (first.max_tokens, again.max_tokens) == (4, 3)
    assert (again.seed, again.temperature) == (8, 0.5)
    assert finished[0].token_ids == [2, 3, 4, 5]
    assert finished[0].policy_versions == [(0, 1), (1, 1), (2, 2)]


def test_weights_that_do_not_fit_change_nothing(core) -> None:
    finished: list = []
    own = engine(core)
    own.submit(request([1], finished, max_tokens=2))
    with pytest.raises(TransportError, match="does not fit"):
        own.update_weights(9, Path("bad"))
    while not own.is_idle:
        own.step()
    assert finished[0].policy_versions == [(0, 2)]


def test_weights_that_fail_half_way_end_the_engine(core) -> None:
    own = engine(core)
    with pytest.raises(RuntimeError, match="half of it"):
        own.update_weights(9, Path("torn"))
    with pytest.raises(InferenceError, match="not known which are served"):
        own.step()


def test_abandoned_and_aborted_requests_are_stopped_and_counted(core) -> None:
    finished: list = []
    own = engine(core)
    gone = request([1], finished, max_tokens=9)
    cut = Request([2], SamplingParams(max_tokens=9), ENV, finished.append, "cut")
    own.submit(gone)
    own.submit(cut)
    own.step()
    own.step()
    own.abandon(gone)
    own.abort(["cut"])
    assert own.is_idle and core.num_running == 0
    assert (own.counts.cancelled[ENV], own.counts.delivered[ENV], own.counts.sampled[ENV]) == (2, 2, 4)
    assert [(each.token_ids, each.finish_reason) for each in finished] == [([3, 4], "abort")]


def test_scoring_takes_no_slot_and_starts_again_under_new_weights(core) -> None:
    own = engine(core, num_slots=1, max_queued=20)
    answers: list = []
    for length in range(20, 30):
        own.submit_scoring(Scoring([1] * length, 1.0, answers.append))
    own.submit(request([1], [], max_tokens=2))
    own.step()
    assert core.num_running == 1 + MAX_SCORINGS < 1 + 10
    own.update_weights(1, Path("step_1"))
    assert core.num_running == 1
    while not own.is_idle:
        own.step()
    assert sorted(len(each) for each in answers) == list(range(20, 30))
    assert own.counts.scored_tokens == sum(range(20, 30))


def test_an_abandoned_scoring_is_stopped(core) -> None:
    own = engine(core)
    scoring = Scoring([1] * 20, 1.0, lambda _: pytest.fail("nobody waits for it"))
    own.submit_scoring(scoring)
    own.step()
    own.abandon_scoring(scoring)
    assert own.is_idle and core.num_running == 0


@pytest.mark.parametrize(
    ("token_ids", "temperature", "reason"),
    [
        ([1, 2], 0.5, "temperature = 0.5; vLLM gives the logprobs of given tokens at temperature 1 only"),
        ([1] * 64, 1.0, "64 tokens leaves no room below inference.max_model_len = 64"),
        ([1] * 65, 1.0, "65 tokens exceeds inference.max_model_len = 64"),
    ],
)
def test_what_vllm_cannot_score_is_refused(core, token_ids, temperature, reason) -> None:
    with pytest.raises(InferenceError, match=reason):
        engine(core).submit_scoring(Scoring(token_ids, temperature, print))


def test_logprobs_that_are_not_finite_are_a_divergence(core) -> None:
    core.num_loaded = math.nan
    own = engine(core)
    own.submit(request([1], [], max_tokens=2))
    with pytest.raises(InferenceError, match="policy version 0 gives logits that are not finite"):
        own.step()


SHAPE = RouterShape(num_layers=2, top_k=3, num_experts=64)


def of_tokens(completion) -> list[list[int]]:
    """For each token of the record, its experts in both layers: of the fake, one number per layer."""
    experts = completion.routed_experts.array()
    assert experts.shape[1:] == (2, 3) and (experts == experts[:, :, :1]).all()
    return experts[:, :, 0].tolist()


def test_experts_come_with_the_tokens_whoever_ends_the_request() -> None:
    """A request that stops itself, one that vLLM ends, and one that is cut short; two share a prompt."""
    finished: list = []
    core = FakeCore(SHAPE)
    own = engine(core, experts=SHAPE, num_slots=3)
    own.submit(request([5, 6, 7], finished, max_tokens=9, stop_token_ids=[9]))
    own.submit(request([5, 6, 7], finished, max_tokens=3))
    own.submit(Request([30], SamplingParams(max_tokens=9), ENV, finished.append, "cut"))
    own.step()
    own.update_weights(1, Path("step_1"))
    own.step()
    own.abort(["cut"])
    while not own.is_idle:
        own.step()
    by_length = {(len(each.token_ids), each.finish_reason): each for each in finished}
    assert of_tokens(by_length[2, "stop"]) == [[5, 0], [6, 0], [7, 0], [8, 1]]
    assert of_tokens(by_length[2, "abort"]) == [[30, 0], [31, 1]]
    assert of_tokens(by_length[3, "length"]) == [[5, 0], [6, 0], [7, 0], [8, 1], [9, 1]]


def test_a_request_that_starts_again_has_the_experts_of_its_second_start() -> None:
    finished: list = []
    own = engine(FakeCore(SHAPE), experts=SHAPE)
    own.submit(request([5], finished, max_tokens=3))
    own.step()
    own.update_weights(1, Path("adapter"))
    while not own.is_idle:
        own.step()
    assert of_tokens(finished[0]) == [[5, 1], [6, 1], [7, 1]]


def test_experts_that_are_missing_are_refused() -> None:
    own = engine(FakeCore(), experts=SHAPE)
    own.submit(request([5, 6], [], max_tokens=3))
    with pytest.raises(InferenceError, match="gave 0 bytes of routed experts for 2 tokens of 6; .* 0.32.0"):
        own.step()


class Processor(NamedTuple):
    """What vLLM gathers of running requests."""

    external_req_ids: dict[str, list[str]]
    request_states: dict[str, Any]


def test_vllm_is_asked_for_the_layers_that_have_routers() -> None:
    """Its record has all three decoder layers; the middle one is dense. Numbers above 255 take two bytes."""
    shape = RouterShape(num_layers=2, top_k=1, num_experts=300)
    rows = np.array([[[1], [0], [299]], [[2], [0], [3]], [[4], [0], [5]]], np.uint16)
    running = SimpleNamespace(routed_experts_chunks=[rows[:1], rows[1:2]])
    core = VllmCore.__new__(VllmCore)
    core._recorded = RecordedLayers(shape, [0, 2])
    core._engine = SimpleNamespace(output_processor=Processor({"7": ["7-ab"]}, {"7-ab": running}))
    going_on = SimpleNamespace(request_id="7", finished=False, outputs=[])
    ended = SimpleNamespace(request_id="7", finished=True, outputs=[SimpleNamespace(routed_experts=rows[2:])])
    taken = [core._experts(going_on), core._experts(going_on), core._experts(ended)]
    assert [len(each) for each in taken] == [8, 0, 4]
    packed, weights = shape.pack(b"".join(taken))
    assert weights is None
    assert packed.array()[:, :, 0].tolist() == [[1, 299], [2, 3], [4, 5]]


def test_experts_are_asked_for_where_they_are_recorded() -> None:
    asked = config()
    recording = asked.model_copy(
        update={"inference": asked.inference.model_copy(update={"record_experts": True})}
    )
    assert engine_args(recording, dtype="bfloat16", on_cpu=False)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in engine_args(asked, dtype="bfloat16", on_cpu=False)


def test_a_vllm_that_returns_no_experts_is_refused_with_one_that_does() -> None:
    recent = type("Recent", (), {"enable_return_routed_experts": False, "routed_experts": None})
    require_experts("0.32.0", recent, recent, has_triton=True)
    with pytest.raises(ConfigError, match="vLLM 0.8.1 returns no routed experts; install vLLM 0.32.0"):
        require_experts("0.8.1", recent, object, has_triton=True)


def test_a_vllm_without_triton_is_refused_for_recording_experts() -> None:
    recent = type("Recent", (), {"enable_return_routed_experts": False, "routed_experts": None})
    with pytest.raises(ConfigError, match="record_experts = true, .* needs Triton; run it on a GPU"):
        require_experts("0.32.0", recent, recent, has_triton=False)


def test_kernels_of_experts_are_made_again_and_other_layers_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].quant_method = SimpleNamespace(moe_kernel=object(), backend="CPU")
    model[2].quant_method = SimpleNamespace(backend="CPU")
    forget_expert_kernels(model)
    assert vars(model[1].quant_method) == {"moe_kernel": None, "backend": "CPU"}
    assert vars(model[2].quant_method) == {"backend": "CPU"}


def test_digests_of_several_workers_are_those_on_which_all_agree() -> None:
    assert agreed([{"a": "F32-0", "b": "F32-1"}]) == {"a": "F32-0", "b": "F32-1"}
    assert agreed([{"a": "F32-0", "b": "F32-1"}, {"a": "F32-0"}]) == {"a": "F32-0"}
    assert agreed([{"a": "F32-0"}, {"a": "F32-0"}, {"a": "F32-9"}]) == {"a": "F32-9"}


def test_what_vllm_takes_is_digested_as_it_is_handed_over(tmp_path) -> None:
    model = torch.nn.Linear(3, 2)
    write_version(model, tmp_path)
    taken: dict[str, torch.Tensor] = {}

    class Worker(PublishedWeights):
        device = torch.device("cpu")
        model_config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False))
        model_runner = SimpleNamespace(get_model=lambda: model)

        def reload_weights(self, weights_iterator) -> None:
            taken.update(weights_iterator)

    assert Worker().load_published(str(tmp_path)) == read_digests(tmp_path).tensors
    assert torch.equal(taken["weight"], model.weight)


def config(model=None, **vllm) -> InferenceRunConfig:
    return InferenceRunConfig.model_validate(
        {
            "model": {"name": "some/model", **(model or {})},
            "seed": 3,
            "seq_len": 512,
            "inference": {"backend": "vllm", "max_concurrent": 24, "replica": 1, "vllm": vllm},
        }
    )


def test_training_can_trust_the_logprobs_and_the_versions() -> None:
    args = engine_args(config(), dtype="bfloat16", on_cpu=False)
    assert args["logprobs_mode"] == "processed_logprobs", "after the temperature"
    assert args["async_scheduling"] is False, "a swap lies between two steps"
    assert args["generation_config"] == "vllm", "no sampling defaults of the model's own"
    assert (args["model"], args["dtype"], args["max_model_len"]) == ("some/model", "bfloat16", 512)
    assert args["max_num_seqs"] == 24 + 8
    assert args["seed"] == 4, "servers of one run draw differently"
    assert "kv_cache_memory_bytes" not in args and "enable_lora" not in args
    assert (args["enforce_eager"], args["gpu_memory_utilization"]) == (False, 0.9)


def test_a_cpu_has_its_own_defaults() -> None:
    args = engine_args(config(), dtype="float32", on_cpu=True)
    assert (args["enforce_eager"], args["kv_cache_memory_bytes"]) == (True, 1 << 30)
    own = config(enforce_eager=False, kv_cache_bytes=4096, tensor_parallel_size=2)
    args = engine_args(own, dtype="float32", on_cpu=True)
    assert (args["enforce_eager"], args["kv_cache_memory_bytes"]) == (False, 4096)
    assert args["tensor_parallel_size"] == 2


def test_an_adapter_is_given_the_least_room_that_vllm_offers() -> None:
    args = engine_args(config({"lora": {"rank": 12}}), dtype="float32", on_cpu=True)
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 16)
    assert [max_lora_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(ConfigError, match="model.lora.rank = 513 exceeds 512"):
        max_lora_rank(513)


def test_further_arguments_are_passed_on_unless_they_follow_from_settings() -> None:
    args = engine_args(config(args={"block_size": 32}), dtype="float32", on_cpu=True)
    assert args["block_size"] == 32
    for name in ("logprobs_mode", "enable_lora", "kv_cache_memory_bytes"):
        with pytest.raises(ConfigError, match=rf"inference.vllm.args.{name} follows from other settings"):
            engine_args(config(args={name: True}), dtype="float32", on_cpu=False)


def test_vllm_prepares_for_transfers_where_they_are_possible() -> None:
    own = config()
    weights = own.weights.model_copy(update={"transport": "http", "transfer": "nccl"})
    sent = own.model_copy(update={"weights": weights})
    assert "weight_transfer_config" not in engine_args(sent, dtype="bfloat16", on_cpu=False)
    args = engine_args(sent, dtype="bfloat16", on_cpu=False, is_sent=True)
    assert args["weight_transfer_config"] == {"backend": "nccl"}


def test_the_slots_of_a_server_are_divided_among_its_ranks() -> None:
    args = engine_args(config(data_parallel_size=5), dtype="bfloat16", on_cpu=False)
    assert args["max_num_seqs"] == 5 + 8, "24 in all, and a rank may have one more than its share"


def test_without_vllm_it_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed here; `make vllm` makes an environment"):
        open_engine(config(), tokenizer=None)
