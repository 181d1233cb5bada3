"""Compiled layers: values of the others, and no new graphs for another micro batch.

Graphs are captured as for inductor, and computed by torch's own operations: a C++ compiler takes minutes.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pellucid.checks.verify.gradients import difference
from pellucid.config import TrainerConfig
from pellucid.errors import ConfigError
from pellucid.model import PackedAttention
from pellucid.model.kernels import check_compiler
from pellucid.trainer.build import build_run
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run
from processes import SEQ_LEN, adapter_settings, compiled_by, gradients, mixed_batch, routed_batch, settings
from tolerance import gradient_bound, logprob_bound

CHECKPOINTED = {"activation_checkpointing": True}


pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture
def build(tmp_path):
    """`build(weights, make, model, **trainer)`: a run in a folder of its own; all are closed at the end."""
    with ExitStack() as opened:

        def made(weights: Path, make=settings, model: dict | None = None, **trainer) -> Run:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            config = make(weights, folder, model={"seq_len": SEQ_LEN, **(model or {})}, **trainer)
            run = build_run(config, None, None, [], Ranks.alone(config.trainer))
            opened.callback(run.close)
            return run

        yield made


def test_fifty_micro_batches_are_computed_by_the_graphs_of_the_first(build, tiny_model) -> None:
    """Four graphs: the first norm; queries, keys and values; the projection after attention; the rest.

    They hold for both layers, and for any number of tokens and sequences, packed or with shared prompts.
    """
    plain, shapes = build(tiny_model), []
    with compiled_by("eager") as graphs:
        run = build(tiny_model, model={"compile": True})
        for step in range(13):
            changes = {"micro_batch_max_tokens": 12 + 3 * step, "share_prompts": step % 2 == 0}
            table = mixed_batch(first=step)
            for each in (plain, run):
                each.config = each.config.model_copy(update=changes)
            for part in run.pack(step, table).micro_batches:
                shapes.append((len(part.layout.computed), part.table.num_sequences, changes["share_prompts"]))
            (expected, metrics), (found, others) = gradients(plain, table), gradients(run, table)
            assert difference(expected, found) <= gradient_bound(tiny_model, table.num_tokens)
            assert abs(others["loss"] - metrics["loss"]) <= logprob_bound(tiny_model, max(table.lengths))
            assert len(graphs) == 4
    assert len(shapes) >= 50 and len(set(shapes)) >= 20


def test_a_single_token_gets_graphs_of_its_own_once(build, tiny_model) -> None:
    """Torch takes sizes of 1 for constants; without gradients there are other graphs, too."""
    counts = []
    with compiled_by("eager") as graphs:
        policy = build(tiny_model, model={"compile": True}).policy
        for num_tokens in (1, 5, 1, 7, 2):
            ids = torch.arange(num_tokens)[None]
            policy.hidden(ids, ids, PackedAttention([num_tokens]))
            counts.append(len(graphs))
        with torch.no_grad():
            for _ in range(2):
                policy.hidden(ids, ids, PackedAttention([num_tokens]))
                counts.append(len(graphs))
    assert counts == [4, 8, 8, 8, 8, 12, 12]


VARIANTS = {
    # Queries need no gradient in the first layer, whose input depends on no adapter: three graphs more.
    "lora": (7, adapter_settings, {}, {}),
    # A layer with experts ends where they begin, and a graph adds their result: two graphs more.
    "experts": (6, settings, CHECKPOINTED, {"enable_router_replay": True}),
    "bfloat16": (4, settings, {"precision": "bfloat16"}, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_layers_have_the_gradients_of_others(build, name, tiny_model, tiny_moe) -> None:
    num_graphs, make, model, trainer = VARIANTS[name]
    weights = tiny_moe if name == "experts" else tiny_model
    table = routed_batch() if name == "experts" else mixed_batch()
    allowed = gradient_bound(weights, table.num_tokens)
    plain = build(weights, make, model, **trainer)
    with compiled_by("eager") as graphs:
        run = build(weights, make, {**model, "compile": True}, **trainer)
        for cap in (SEQ_LEN, SEQ_LEN // 2, SEQ_LEN // 4):
            for each in (plain, run):
                each.config = each.config.model_copy(update={"micro_batch_max_tokens": cap})
            (expected, metrics), (found, others) = gradients(plain, table), gradients(run, table)
            trained = [key for key, gradient in expected.items() if gradient is not None]
            first, second = ({key: each[key] for key in trained} for each in (expected, found))
            assert difference(first, second) <= allowed, cap
            assert len(graphs) == num_graphs
            if name == "experts":
                assert others["router_replace_rate/all"] == metrics["router_replace_rate/all"] > 0.5


def test_a_missing_compiler_is_named_with_the_key(monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    torch._dynamo.reset()
    with pytest.raises(
        ConfigError, match="trainer.model.compile = true, but torch cannot compile for cpu .*g"
    ):
        check_compiler(torch.device("cpu"))
    torch._dynamo.reset()


def test_runs_that_share_a_model_are_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"trainer\.model\.compile = true with trainer\.many_runs"):
        TrainerConfig.model_validate({"model": {"compile": True}, "many_runs": {}})
