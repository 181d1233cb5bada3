"""Data-parallel ranks behind one server, with fakes of vLLM's cores: a thread is a rank's process."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fake_vllm import FakeCore
from pellucid.config import InferenceRunConfig
from pellucid.errors import InferenceError, TransportError
from pellucid.inference.client import Account, RankHealth, RankWeightsReport, SamplingParams
from pellucid.inference.slots import Request, Scoring, run_to_end
from pellucid.inference.vllm_core import DataParallelRank, slots_per_rank
from pellucid.inference.vllm_engine import VllmEngine
from pellucid.inference.vllm_ranks import RankedCore, serve_rank
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import weight_shapes, write_version

ENV = Account("run", "env")


class RankCore(FakeCore):
    """`steps`: how many sequences it sampled for in each step. It can fail, or end, at a load."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.at_load: Callable[[], None] = lambda: None

    def step(self):
        sampled, scored = super().step()
        self.steps.append(len(sampled))
        return sampled, scored

    def load(self, folder: Path) -> bool:
        self.at_load()
        return super().load(folder)


class EndedError(BaseException):
    """A process that ends without a word."""


class Thread:
    """A rank in a thread, which knows its core."""

    def __init__(self, core: RankCore) -> None:
        self.core = core
        self.connection, theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def _run(self, theirs) -> None:
        try:
            serve_rank(theirs, lambda: self.core)
        except EndedError:
            pass
        finally:
            theirs.close()

    def why_ended(self) -> str:
        return "ended with exit code -9"

    def kill(self) -> None:
        self.connection.close()
        self._thread.join(10)


def config(num_ranks: int, max_concurrent: int = 8) -> InferenceRunConfig:
    vllm = {"data_parallel_size": num_ranks}
    return InferenceRunConfig.model_validate(
        {
            "model": {"name": "m"},
            "inference": {"backend": "vllm", "max_concurrent": max_concurrent, "vllm": vllm},
        }
    )


@contextmanager
def ranked(
    num_ranks: int = 2, *, is_coupled: bool = False, slots: int = 8, model: torch.nn.Module | None = None
) -> Iterator[tuple[VllmEngine, list[RankCore]]]:
    cores: list[RankCore] = []
    numbers: list[DataParallelRank] = []

    def spawn(config, shapes, recorded, rank: DataParallelRank) -> Thread:
        numbers.append(rank)
        cores.append(RankCore())
        return Thread(cores[-1])

    shapes = {} if model is None else weight_shapes(model)
    core = RankedCore(config(num_ranks, slots), shapes, is_coupled=is_coupled, spawn=spawn)
    assert [(each.rank, each.size, each.is_coupled) for each in numbers] == [
        (rank, num_ranks, is_coupled) for rank in range(num_ranks)
    ]
    engine = VllmEngine(core, num_slots=slots, max_length=64, max_queued=64, vocab_size=100)
    try:
        yield engine, cores
    finally:
        engine.close()


def request(prompt, finished, request_id="", **params) -> Request:
    return Request(prompt, SamplingParams(**params), ENV, finished.append, request_id)


def group(name: str, prompt: list[int], finished: list, size: int, **params) -> list[Request]:
    return [request(prompt, finished, f"demo/{name}/{name}-r{n}/0~x{n}", **params) for n in range(size)]


def published(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_version(model, folder)
    return folder


def test_a_group_stays_on_one_rank_and_its_prompt_is_computed_once() -> None:
    prompt, finished = list(range(10)), []
    with ranked() as (engine, cores):
        run_to_end(
            engine,
            [
                *group("g1", prompt, finished, 4, max_tokens=2),
                *group("g2", [*prompt, 50], finished, 4, max_tokens=3),
            ],
        )
        assert [len(core.started) for core in cores] == [4, 4]
        assert [{tuple(ids) for ids, _, _ in core.started} for core in cores] == [
            {tuple(prompt)},
            {(*prompt, 50)},
        ]
        assert (engine.counts.prefill_tokens, engine.counts.shared_tokens) == (36, 48)
        assert engine.rank_health() == [RankHealth(0, 0, 0, 8), RankHealth(1, 0, 0, 12)]
    assert sorted(len(each.token_ids) for each in finished) == [2] * 4 + [3] * 4
    assert engine.counts.sampled[ENV] == engine.counts.delivered[ENV] == 20


def test_a_later_turn_goes_where_its_group_was() -> None:
    with ranked() as (engine, cores):
        run_to_end(engine, [request([1], [], "demo/g1/g1-r0/0", max_tokens=1)])
        run_to_end(engine, [request([9], [], "demo/g2/g2-r0/0", max_tokens=1)])
        engine.submit(request([30], [], "demo/g3/g3-r0/0", max_tokens=9))
        engine.step()
        run_to_end(engine, [request([1, 2], [], "demo/g1/g1-r0/1", max_tokens=1)])
    assert [[ids for ids, _, _ in core.started] for core in cores] == [[[1], [9], [30], [1, 2]], []]


def test_a_rank_that_is_full_passes_the_rest_of_a_group_on() -> None:
    with ranked(slots=5) as (engine, cores):
        assert slots_per_rank(config(2, 5).inference) == 3
        run_to_end(engine, group("g1", [1], [], 5, max_tokens=2))
        assert [len(core.started) for core in cores] == [3, 2]


def test_requests_without_a_group_are_spread() -> None:
    with ranked(3) as (engine, cores):
        run_to_end(engine, [request([1], [], max_tokens=2) for _ in range(6)])
        assert [len(core.started) for core in cores] == [2, 2, 2]


@pytest.mark.parametrize(("is_coupled", "steps"), [(False, [[1, 1], []]), (True, [[1, 1], [0, 0]])])
def test_a_rank_without_work_steps_along_only_where_experts_are_shared(is_coupled, steps) -> None:
    with ranked(is_coupled=is_coupled) as (engine, cores):
        run_to_end(engine, [request([1], [], max_tokens=2)])
        assert [core.steps for core in cores] == steps


def test_each_rank_gets_the_update_between_two_steps_and_says_what_it_serves(tmp_path) -> None:
    finished: list = []
    model = torch.nn.Linear(3, 2)
    folder = published(model, tmp_path / "step_5")
    with ranked(model=model) as (engine, cores):
        for each in [
            *group("g1", [1], finished, 2, max_tokens=3),
            *group("g2", [7], finished, 2, max_tokens=3),
        ]:
            engine.submit(each)
        engine.step()
        engine.update_weights(5, folder)
        while not engine.is_idle:
            engine.step()
        digests = read_digests(folder).tensors
        assert engine.served_digests() == digests
        assert engine.rank_weights() == [RankWeightsReport(0, 5, digests), RankWeightsReport(1, 5, digests)]
        assert [each.policy_version for each in engine.rank_health()] == [5, 5]
        assert [core.num_loaded for core in cores] == [1, 1]
    assert [each.policy_versions for each in finished] == [[(0, 1), (5, 2)]] * 4
    assert [each.logprobs for each in finished] == [[0, -1, -1]] * 4


def test_weights_that_do_not_fit_reach_no_rank(tmp_path) -> None:
    folder = published(torch.nn.Linear(4, 2), tmp_path / "step_5")
    with ranked(model=torch.nn.Linear(3, 2)) as (engine, cores):
        with pytest.raises(TransportError, match=r"weight has shape \[2, 4\]; the model has \[2, 3\]"):
            engine.update_weights(5, folder)
        run_to_end(engine, [request([1], [], max_tokens=1)])
        assert [core.num_loaded for core in cores] == [0, 0]


def ends() -> None:
    raise EndedError


def runs_out_of_memory() -> None:
    raise MemoryError("none is left")


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (runs_out_of_memory, "rank 1 of 2 failed: MemoryError: none is left"),
        (ends, "rank 1 of 2 ended with exit code -9"),
    ],
)
def test_an_update_that_fails_on_one_rank_names_it_and_nothing_is_sampled_after_it(
    tmp_path, happens, reason
) -> None:
    """The other rank serves the new version by then, so that nobody could say which a token is of."""
    model = torch.nn.Linear(3, 2)
    folder = published(model, tmp_path / "step_5")
    with ranked(model=model) as (engine, cores):
        cores[1].at_load = happens
        with pytest.raises(InferenceError, match=reason):
            engine.update_weights(5, folder)
        engine.submit(request([1], [], max_tokens=1))
        with pytest.raises(InferenceError, match="not known which are served"):
            engine.step()
        assert engine.version == 0


def test_a_rank_with_other_weights_than_the_rest_is_noticed_before_its_tokens_count() -> None:
    with ranked() as (engine, _):
        engine._core._num_loads = 1  # as if the ranks had missed a load
        engine.submit(request([1], [], max_tokens=1))
        with pytest.raises(InferenceError, match=r"the ranks serve different weights \(loads .*rank 0: 0\)"):
            engine.step()
        assert not engine.counts.sampled


def test_a_version_that_is_published_again_is_loaded_by_every_rank(tmp_path) -> None:
    """As by a run that was resumed: other weights under one number, and no prompt is shared with them."""
    model = torch.nn.Linear(3, 2)
    first = published(model, tmp_path / "first" / "step_5")
    with torch.no_grad():
        model.weight += 1
    again = published(model, tmp_path / "again" / "step_5")
    with ranked(model=model) as (engine, cores):
        for folder in (first, again):
            engine.update_weights(5, folder)
            run_to_end(engine, group("g1", list(range(10)), [], 2, max_tokens=1))
        digests = read_digests(again).tensors
        assert engine.rank_weights() == [RankWeightsReport(0, 5, digests), RankWeightsReport(1, 5, digests)]
        assert [salt for _, _, salt in cores[0].started] == ["1", "1", "2", "2"]
        assert engine.counts.shared_tokens == 16


def test_scorings_are_spread_and_a_stopped_request_is_stopped_at_its_rank() -> None:
    answers: list = []
    with ranked() as (engine, cores):
        for length in (10, 11, 12, 13):
            engine.submit_scoring(Scoring([1] * length, 1.0, answers.append))
        gone = request([1], [], max_tokens=9)
        engine.submit(gone)
        engine.step()
        engine.abandon(gone)
        run_to_end(engine, [request([2], [], max_tokens=2)])
        assert [core.num_running for core in cores] == [0, 0]
    assert sorted(map(len, answers)) == [10, 11, 12, 13]
