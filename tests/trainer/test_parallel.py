"""Several real processes on gloo: together they train what one does, to the last digits of float32.

What the processes do is in tests/processes.py; here they are started, and what they found is judged.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

import pellucid.export
import processes
import warm
from pellucid.cli import main
from pellucid.config import TrainerConfig
from pellucid.errors import ConfigError
from pellucid.launch.run_folder import rewind_rl
from pellucid.ledger import Flow, Journal, Stage, read_journal, reconcile
from pellucid.metrics import read_metrics
from pellucid.model.tiny import character_tokenizer, make_tiny_model, make_tiny_moe_model
from pellucid.orchestrator.snapshot import Snapshot, write_snapshot
from pellucid.trainer import run_with
from pellucid.trainer.parallel import Ranks
from pellucid.transport import Batch, FilesystemSender, encode_batch, retract_folder, stable_steps
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import digest_of
from processes import LOSSES, MANY, joining, mixed_batch, packings, settings, training
from tolerance import adapter_bound, gradient_bound, logprob_bound, near, update_bound

pytestmark = pytest.mark.slow

NUM_STEPS = 6
STEPS_OF_LR = NUM_STEPS * training({})["optim"]["lr"]
"""How far all steps together move a weight, at most."""

WORKER = Path(processes.__file__)
GOLDEN = WORKER.parent / "golden"


def start(folder: Path, num_processes: int, jobs: dict) -> dict:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = warm.run([str(folder), str(num_processes)], module="processes", cwd=WORKER.parent)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    models = folder / "models"
    for name in ("tied", "untied"):
        shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
        make_tiny_model(models / name, **shape, tied=name == "tied")
    make_tiny_model(models / "few_kv_heads", hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=1)
    make_tiny_moe_model(models / "moe", hidden_size=32, num_layers=2)
    make_biased_router(models / "biased router")
    make_family(models / "windows and sinks", "granite_swa", sliding_window=4, logits_scaling=2.0)
    make_family(models / "convolutions", "lfm2", layer_types=["conv", "full_attention"])
    save_again(models / "untied", models / "bf16", dtype=torch.bfloat16)
    save_again(models / "moe", models / "many files", max_shard_size="40KB")
    assert len(list((models / "many files").glob("model-*.safetensors"))) > 3
    save_twice(models / "tied", models / "stored twice")
    return folder


HELD_BY_TWO = [
    ("dp2", "tied", {}),
    ("dp2", "untied", {"activation_checkpointing": True}),
    ("cp2", "untied", {"cp": 2}),
    ("dp2", "moe", {}),
    ("dp2", "stored twice", {}),
]
HELD_BY_FOUR = {"dp2cp2": {"cp": 2}, "hsdp 2×2": {"dp_replicate": 2}, "dp4": {}}
LOADED = ("tied", "untied", "moe", "bf16", "many files", "convolutions")


def save_again(source: Path, target: Path, dtype: torch.dtype = torch.float32, **options) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(target, **options)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def save_twice(source: Path, target: Path) -> None:
    """A weight that is tied is in the file under both of its names."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def make_biased_router(folder: Path) -> None:
    """A GLM-4.5 model. The bias of its router is a persistent buffer, which no gradient moves."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = character_tokenizer()
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Glm4MoeForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.5, -1.0, 0.25, 2.0]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_family(folder: Path, family: str, **options) -> None:
    """A family whose layers are not those of Llama; the second one goes in rows."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = character_tokenizer()
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def send_batches(folder: Path) -> Path:
    """Of all steps; with the books of an engine and an orchestrator that lost nothing."""
    for step in range(NUM_STEPS):
        table = mixed_batch(first=step)
        FilesystemSender(folder).send(step, encode_batch(Batch("run", step, table)))
    write_snapshot(folder, Snapshot(batches_sent=NUM_STEPS))
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """The run of one process."""
    run_folder = send_batches(folder / "runs" / "alone")
    run_with(settings(folder / "models" / "tied", run_folder, **training({})), Ranks())
    return run_folder


@pytest.fixture(scope="module")
def two(folder) -> dict:
    """What two processes found."""
    runs = {name: str(send_batches(folder / "runs" / name)) for name in ("dp2", "cp2", "hsdp2", "untied")}
    jobs = {
        "dp2": ["parity", {}, "tied", True],
        "cp2": ["parity", {"cp": 2}, "tied", True],
        "hsdp2": ["parity", {"dp_replicate": 2}, "tied", False],
        "dp2, checkpointing": ["parity", {"activation_checkpointing": True}, "tied", False],
        "cp2, checkpointing": ["parity", {"cp": 2, "activation_checkpointing": True}, "tied", False],
        "dp2, untied": ["parity", {}, "untied", False],
        "dp2, untied, checkpointing": ["parity", {"activation_checkpointing": True}, "untied", False],
        "cp2, untied head in chunks": ["parity", {"cp": 2}, "untied", False, 500],
        "tied, gathered": ["gathered", "tied"],
        "untied, gathered": ["gathered", "untied"],
        "dp2, head in chunks": ["parity", {}, "tied", False, 500],
        "cp2, one kv head": ["parity", {"cp": 2}, "few_kv_heads", False],
        "cp2, windows and sinks": ["parity", {"cp": 2}, "windows and sinks", False],
        "dp2, rows": ["parity", {}, "convolutions", False],
        "dp2, rows, checkpointing": ["parity", {"activation_checkpointing": True}, "convolutions", False],
        "dp2, rows, bf16": ["precision", {}, "convolutions"],
        "dp2, experts": ["replay", {}],
        "cp2, experts": ["replay", {"cp": 2, "activation_checkpointing": True}],
        "dp2, bf16": ["precision", {}],
        "cp2, bf16": ["precision", {"cp": 2}],
        "dp2, untied, bf16": ["precision", {}, "untied"],
        "dp2, reductions": ["reductions", {}],
        "cp2, reductions": ["reductions", {"cp": 2}],
        "hsdp2, reductions": ["reductions", {"dp_replicate": 2}],
        "dp2, untied, reductions": ["reductions", {}, "untied"],
        "dp2, norms": ["clipping", {}],
        "cp2, norms": ["clipping", {"cp": 2}],
        "hsdp2, norms": ["clipping", {"dp_replicate": 2}],
        "dp2, skipped": ["skipping", {}],
        "cp2, skipped": ["skipping", {"cp": 2}],
        "golden": ["golden", str(GOLDEN / "loss_normalisation.json")],
        "sharing": ["sharing"],
        "beside": ["beside", str(folder / "runs" / "beside")],
        "buffers": ["buffers", str(folder / "runs" / "buffers")],
        "dp2, adapter": ["adapter", {}],
        "cp2, adapter": ["adapter", {"cp": 2}],
        "dp2, untied, adapter": ["adapter", {}, "untied"],
        "dp2, head, adapter": ["adapter", {}, "untied", ["lm_head", "v_proj"]],
        "cp2, head, adapter": ["adapter", {"cp": 2}, "untied", ["lm_head", "v_proj"]],
        **{f"{mesh}, {model}, held": ["held", options, model] for mesh, model, options in HELD_BY_TWO},
        "many": ["many", str(send_for_many(folder / "runs" / "many")), {}],
        "many, resumed": ["resume_many", str(folder / "runs" / "many"), {}],
        "refused": ["refuse", str(send_for_many(folder / "runs" / "refused", "full")), {}],
        "train dp2": ["train", runs["dp2"], {}],
        "train cp2": ["train", runs["cp2"], {"cp": 2}],
        "train hsdp2": ["train", runs["hsdp2"], {"dp_replicate": 2}],
        "train untied": ["train", runs["untied"], {}, False, "untied"],
    }
    return start(folder, 2, jobs)


@pytest.fixture(scope="module")
def two_more(folder) -> dict:
    """What two processes found that load and compile models, or verify themselves."""
    jobs = {
        "dp2, compiled": ["compiled", {"activation_checkpointing": True}, "aot_eager"],
        "cp2, compiled": ["compiled", {"cp": 2}, "eager"],
        **{f"{model}, loading": ["loading", {}, model] for model in LOADED},
        "biased router, loading": ["loading", {}, "biased router"],
        "stored twice, loading": ["loading", {}, "stored twice"],
        "replicated, loading": ["loading", {"dp_replicate": 2}, "untied"],
        "adapter, loading": ["loading", {}, "moe", True],
        "no memory": ["no_memory"],
        "verify dp2": ["verify", {}],
        "verify cp2": ["verify", {"cp": 2}],
        "verify, a denominator per rank": ["verify", {}, "a denominator per rank"],
        "verify, an average over processes": ["verify", {}, "an average over processes"],
        "verify, an update of one process": ["verify", {}, "an update of one process"],
    }
    return start(folder, 2, jobs)


def send_for_many(folder: Path, *more: str) -> Path:
    for name in (*MANY, *more):
        for step in range(2):
            table = mixed_batch(first=step + len(name), run=name)
            FilesystemSender(folder / name).send(step, encode_batch(Batch(name, step, table)))
    return folder


def stopped_at_3(source: Path, target: Path, model: Path) -> Path:
    """A run as if it had been stopped after its checkpoint of step 3."""
    shutil.copytree(source, target)
    send_batches(target)
    retract_folder(target / "checkpoints" / "step_6")
    shutil.rmtree(target / "model")
    point = rewind_rl(settings(model, target, **training({})))
    assert (point.checkpoint, point.next_batch) == (3, 6)
    return target


@pytest.fixture(scope="module")
def four(folder, two) -> dict:
    """What four processes found."""
    fresh = send_batches(folder / "runs" / "dp2cp2")
    resumed = stopped_at_3(folder / "runs" / "dp2", folder / "runs" / "2 to 4", folder / "models" / "tied")
    jobs = {
        "dp2cp2": ["parity", {"cp": 2}, "tied", False],
        "hsdp 2×2": ["parity", {"dp_replicate": 2}, "tied", False],
        "hsdp 2×cp2": ["parity", {"dp_replicate": 2, "cp": 2}, "tied", False],
        "cp4, one kv head": ["parity", {"cp": 4}, "few_kv_heads", False],
        "hsdp 2×2, untied": ["parity", {"dp_replicate": 2}, "untied", False],
        "dp2cp2, norms": ["clipping", {"cp": 2}],
        **{f"{mesh}, untied, held": ["held", options, "untied"] for mesh, options in HELD_BY_FOUR.items()},
        **{f"{model}, loading": ["loading", {}, model] for model in LOADED},
        "replicated, loading": ["loading", {"dp_replicate": 2}, "untied"],
        "adapter, loading": ["loading", {"cp": 2}, "moe", True],
        "train dp2cp2": ["train", str(fresh), {"cp": 2}],
        "resume": ["train", str(resumed), {}, True],
    }
    return start(folder, 4, jobs)


TWO = ("dp2", "cp2", "hsdp2", "dp2, untied", "cp2, untied head in chunks", "dp2, head in chunks")
TWO += ("cp2, windows and sinks", "dp2, rows", "dp2, rows, checkpointing")
TWO += ("cp2, one kv head", "dp2, checkpointing", "cp2, checkpointing", "dp2, untied, checkpointing")
FOUR = ("dp2cp2", "hsdp 2×2", "hsdp 2×cp2", "cp4, one kv head", "hsdp 2×2, untied")


class Allowed(NamedTuple):
    """What rounding may do, as the tests and `processes.py` measure it."""

    gradient: float
    metric: float
    update: float
    adapter: float


@pytest.fixture(scope="module")
def allowed(folder) -> Allowed:
    names = ("tied", "untied", "few_kv_heads", "moe", "windows and sinks", "convolutions")
    table = mixed_batch()
    models = [folder / "models" / name for name in names]
    return Allowed(
        gradient=max(gradient_bound(model, table.num_tokens) for model in models),
        metric=max(logprob_bound(model, max(table.lengths)) for model in models),
        update=max(update_bound(model, table.num_tokens) for model in models),
        adapter=max(adapter_bound(model, table.num_tokens) for model in models),
    )


def check_parity(found: dict[str, list[float]], allowed: Allowed, *, thorough: bool) -> None:
    assert found.keys() == {name for name, _, _ in packings(thorough=thorough)}
    assert all(any(name.startswith(loss) for name in found) for loss in LOSSES)
    for name, (gradient, metrics) in found.items():
        assert gradient <= allowed.gradient, name
        assert metrics <= allowed.metric, name


@pytest.mark.parametrize("mesh", TWO)
def test_two_processes_have_the_gradient_and_the_metrics_of_one(two, allowed, mesh) -> None:
    check_parity(two[mesh], allowed, thorough=mesh in ("dp2", "cp2"))


@pytest.mark.parametrize("mesh", ["dp2", "cp2"])
def test_compiled_layers_of_two_processes_have_the_gradient_and_the_metrics_of_one(
    two_more, allowed, mesh
) -> None:
    """By 4 graphs, one of which `aot_eager` gets twice, and as many for single tokens: slices, dummies."""
    found, num_graphs = two_more[f"{mesh}, compiled"]
    check_parity(found, allowed, thorough=False)
    assert num_graphs == ([5, 10] if mesh == "dp2" else [8, 8])


@pytest.mark.parametrize("mesh", ["dp2, experts", "cp2, experts"])
def test_two_processes_replay_the_experts_of_one(two, allowed, mesh) -> None:
    assert len(two[mesh]) == 5
    for name, (gradient, metrics) in two[mesh].items():
        assert gradient <= allowed.gradient, name
        assert metrics <= allowed.metric, name


@pytest.mark.parametrize("mesh", FOUR)
def test_four_processes_have_the_gradient_and_the_metrics_of_one(four, allowed, mesh) -> None:
    check_parity(four[mesh], allowed, thorough=False)


def test_a_rank_with_fewer_tokens_does_not_weigh_more(two) -> None:
    cases = json.loads((GOLDEN / "loss_normalisation.json").read_text())["cases"]
    for found, case in zip(two["golden"], cases, strict=True):
        expected = case["outputs"]["single_process_reference"]
        assert found == near(expected, terms=100), case["name"]  # tokens of a case, at most


def test_the_norm_of_a_sharded_gradient_is_that_of_the_whole(two, four, allowed) -> None:
    for norms in (two["dp2, norms"], two["cp2, norms"], two["hsdp2, norms"], four["dp2cp2, norms"]):
        (alone,), together = norms
        assert together == [together[0]] * len(together)
        assert together[0] == near(alone, within=allowed.gradient * alone)


@pytest.mark.parametrize("mesh", ["dp2", "cp2"])
def test_all_processes_skip_a_step_that_is_not_finite_for_one_of_them(two, mesh) -> None:
    assert two[f"{mesh}, skipped"].keys() == {"broken_loss", "steep_loss"}
    for name, ranks in two[f"{mesh}, skipped"].items():
        assert ranks == [[True, 0.0, 0]] * (2 if mesh == "dp2" else 1), name


@pytest.mark.parametrize("mesh", ["dp2", "cp2", "dp2, untied", "dp2, rows"])
def test_bfloat16_with_a_float32_reduction_comes_close(two, mesh) -> None:
    """As it is meant for GPUs; on a CPU only to see that it does what it says."""
    assert all(1e-4 < difference < 3e-2 for difference in two[f"{mesh}, bf16"]), two[f"{mesh}, bf16"]


def test_a_head_of_its_own_is_gathered_from_its_forward_to_its_backward_pass(two) -> None:
    """(as the first layer computes, as the loss is computed, as the first layer has its gradients)"""
    assert two["untied, gathered"] == [[False, True, False]] * 2
    assert two["tied, gathered"] == [[True, True, True]] * 2  # beside the embedding, which is the same weight


@pytest.mark.parametrize(
    ("mesh", "num_adapted"), [("dp2", 7), ("cp2", 7), ("dp2, untied", 7), ("dp2, head", 2), ("cp2, head", 2)]
)
def test_an_adapter_has_the_gradient_of_one_process(two, allowed, mesh, num_adapted) -> None:
    difference, num_parameters = two[f"{mesh}, adapter"]
    assert difference <= allowed.gradient and num_parameters == 2 * num_adapted


def test_frozen_weights_in_bfloat16_change_no_bit_in_half_the_memory(two, four) -> None:
    found = [two[f"{mesh}, {model}, held"] for mesh, model, _ in HELD_BY_TWO]
    found += [four[f"{mesh}, untied, held"] for mesh in HELD_BY_FOUR]
    for ranks in found:
        for is_same, num_numbers, held, in_float32 in ranks:
            assert is_same and num_numbers > 100 and 2 * held == in_float32


def test_persistent_buffers_are_published_and_saved(folder, two) -> None:
    from transformers import AutoModelForCausalLM

    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    initial = AutoModelForCausalLM.from_pretrained(folder / "models" / "biased router").state_dict()
    published = load_file(folder / "runs" / "buffers" / "published" / "model.safetensors")
    digests = read_digests(folder / "runs" / "buffers" / "published").tensors
    assert digests == {name: digest_of(tensor) for name, tensor in published.items()}
    assert published[bias].tolist() == initial[bias].tolist() == [0.5, -1.0, 0.25, 2.0]
    assert largest_difference(published, {name: initial[name] for name in published}) == 0
    saved = AutoModelForCausalLM.from_pretrained(folder / "runs" / "buffers" / "saved").state_dict()
    assert largest_difference(saved, initial) == 0
    taken = load_file(folder / "runs" / "buffers" / "taken" / "model.safetensors")
    assert taken.keys() == published.keys()
    for name, weight in taken.items():
        assert torch.equal(weight, initial[name] if name == bias else initial[name].bfloat16())


@pytest.mark.parametrize("model", [*LOADED, "replicated", "adapter"])
def test_each_process_reads_its_part_and_together_they_have_all(folder, two_more, four, model) -> None:
    source = {"replicated": "untied", "adapter": "moe"}.get(model, model)
    files = [load_file(path) for path in (folder / "models" / source).glob("*.safetensors")]
    stored = sum(tensor.nbytes for file in files for tensor in file.values())
    for found in (two_more, four):
        num_whole, num_bytes, worst = zip(*found[f"{model}, loading"], strict=True)
        assert set(num_whole) == set(worst) == {0.0}
        num_copies = 2 if model == "replicated" else 1
        assert sum(num_bytes) == num_copies * stored
        assert max(num_bytes) < 1.05 * num_copies * stored / len(num_bytes)


def test_buffers_are_read_by_each_process(two_more) -> None:
    assert [[num_whole, worst] for num_whole, _, worst in two_more["biased router, loading"]] == [
        [0, 0.0]
    ] * 2


def test_one_process_reads_what_cannot_be_read_in_parts_and_all_have_it(two_more) -> None:
    assert two_more["stored twice, loading"] == [[1, 0, 0.0], [0, 0, 0.0]]


def test_all_processes_raise_where_the_first_has_no_memory_to_publish_and_go_on(two_more) -> None:
    (message, is_published), other = two_more["no memory"]
    assert [message, is_published] == other
    assert is_published
    assert message.startswith("no host memory for a copy of the weights, 0.0 GB (DefaultCPUAllocator")
    assert 'trainer.publish_dtype = "bfloat16"' in message


@pytest.mark.parametrize("mesh", ["dp2", "cp2", "hsdp2", "dp2, untied"])
def test_gradients_that_are_reduced_once_per_step_are_those_of_every_micro_batch(two, allowed, mesh) -> None:
    from_one, from_each, counts = two[f"{mesh}, reductions"]
    assert from_one <= allowed.gradient
    assert from_each <= allowed.gradient
    (once, num_micro_batches), (often, num_again) = counts
    assert num_micro_batches == num_again > 1
    assert often == once * num_micro_batches


def test_runs_that_share_processes_end_with_the_adapters_they_would_have_alone(
    folder, two, allowed, tmp_path
) -> None:
    """Resumed after the first step, by both processes."""
    for name in MANY:
        config = joining(folder / "models" / "tied", folder / "runs" / "many", name)
        alone = config.model_copy(
            update={
                "output_dir": tmp_path / name,
                "trainer": config.trainer.model_copy(update={"join": None}),
            }
        )
        send_for_many(tmp_path)
        run_with(alone, Ranks())
        files = [
            where / "model" / "adapter_model.safetensors" for where in (config.output_dir, tmp_path / name)
        ]
        found, expected = map(load_file, files)
        largest = max(float(weight.abs().max()) for weight in expected.values())
        assert largest_difference(found, expected) <= largest * allowed.adapter
        assert {path.name for path in (config.output_dir / "token_exports" / "step_1").iterdir()} >= {
            "STABLE",
            "rank_0.jsonl",
            "rank_1.jsonl",
        }


def test_a_run_that_the_main_process_refuses_is_refused_by_all(two) -> None:
    """The processes stay in step: the next run gets the place, and is trained to its end."""
    outcomes = two["refused"]
    assert outcomes["one"] == ["done", ""]
    assert outcomes["busy"][0] == outcomes["full"][0] == outcomes["renamed"][0] == "evicted"
    assert "weights" in outcomes["full"][1]
    assert "monitors.prometheus.trainer_port" in outcomes["busy"][1]
    assert "resume with run_id = 'former'" in outcomes["renamed"][1]


def test_what_the_main_process_raises_is_raised_in_all(two) -> None:
    assert two["sharing"] == ["of the main process"] * 2


def test_processes_of_another_trainer_have_one_denominator(folder, two, capsys) -> None:
    """The mean over three sequences with A = 2, 3, 4 is 3, the mean of what the two processes logged."""
    records = pellucid.export.open(folder / "runs" / "beside").step(0)
    assert [record["denominator"] for record in records] == [6, 6, 6]
    assert [record["token_loss"][-1] for record in records] == pytest.approx([-2 * 2, -3 * 1, -4 * 2 / 3])
    assert main(["replay", str(folder / "runs" / "beside")]) == 0
    assert "findings agree" in capsys.readouterr().out


def verified(two: dict, job: str) -> tuple[list[int], list[dict]]:
    """Exit codes, and what the main process printed."""
    codes, (printed, *others) = zip(*two[job], strict=True)
    assert not any(others)
    return list(codes), [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize(("mesh", "num_ranks"), [("dp2", 2), ("cp2", 1)])
def test_verify_compares_the_processes_with_one(two_more, mesh, num_ranks) -> None:
    codes, findings = verified(two_more, f"verify {mesh}")
    assert codes == [0] * num_ranks
    of_processes = [finding for finding in findings if finding["check"] == "processes"]
    assert [finding["what"].split(",")[0] for finding in of_processes] == [
        *3 * ["denominators", "loss", "gradient"],
        "norm",
        "published weights",
    ]
    assert all("2 processes" in finding["what"] for finding in of_processes)
    assert "record" in {finding["check"] for finding in findings}


def failed(findings: list[dict]) -> dict[str, str]:
    """The meaning of what failed with the trainer as configured, by what was measured."""
    ours = [finding for finding in findings if "2 processes as configured" in finding["what"]]
    return {finding["what"].split(",")[0]: finding["meaning"] for finding in ours if not finding["passed"]}


def test_verify_names_a_denominator_per_rank(two_more) -> None:
    codes, findings = verified(two_more, "verify, a denominator per rank")
    assert codes == [1, 1]
    meanings = failed(findings)
    assert meanings.keys() == {"denominators", "loss", "gradient"}
    assert "a per-rank denominator" in meanings["denominators"]


def test_verify_names_an_average_over_processes(two_more) -> None:
    codes, findings = verified(two_more, "verify, an average over processes")
    assert codes == [1, 1]
    meanings = failed(findings)
    assert meanings.keys() == {"gradient"}
    assert meanings["gradient"].startswith("the gradient is 0.5 times that of one process: it is averaged")


def test_verify_names_an_update_of_one_process(two_more) -> None:
    """The second process keeps its shard as it is; the norm is halved, as if averaged over both."""
    codes, findings = verified(two_more, "verify, an update of one process")
    assert codes == [1, 1]
    wrong = {each["what"].split(",")[0]: each["meaning"] for each in findings if not each["passed"]}
    assert wrong.keys() == {"norm", "published weights"}
    assert "it is that of a process's own shard" in wrong["norm"]
    assert "look at clipping, at what each process updates of its shard" in wrong["published weights"]


def result_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


RUNS = ("dp2", "cp2", "hsdp2", "dp2cp2", "2 to 4")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_several_processes_ends_with_the_weights_of_one(
    folder, alone, two, four, allowed, name
) -> None:
    run = folder / "runs" / name
    initial = load_file(folder / "models" / "tied" / "model.safetensors")
    assert largest_difference(result_of(alone), initial) > 3e-3
    rounding = STEPS_OF_LR * allowed.update
    assert largest_difference(result_of(run), result_of(alone)) <= rounding
    for version in stable_steps(alone / "weights"):
        files = [where / "weights" / f"step_{version}" / "model.safetensors" for where in (run, alone)]
        assert largest_difference(*map(load_file, files)) <= rounding
    assert stable_steps(run / "weights") == stable_steps(alone / "weights") == [3, 4, 5, 6]
    assert stable_steps(run / "checkpoints") == [3, 6]


@pytest.mark.parametrize("name", RUNS)
def test_its_metrics_are_those_of_one(folder, alone, two, four, allowed, name) -> None:
    found, expected = (
        list(read_metrics(where / "metrics" / "trainer.jsonl")) for where in (folder / "runs" / name, alone)
    )
    packing = {"tokens", "computed_tokens", "padding_tokens", "micro_batches", "oversized_samples"}
    packing |= {"max_micro_batch_tokens", "micro_batch_max_tokens"}
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for own, other in zip(found, expected, strict=True):
        for key, value in other.items():
            name = key.removeprefix("total/")
            if name in packing or name.startswith(("local/", "time", "throughput", "memory")):
                continue
            assert own[key] == near(value, within=allowed.metric + allowed.update * abs(value)), key


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_exports_what_it_trained(folder, alone, two, four, allowed, name) -> None:
    run, num_ranks = folder / "runs" / name, {"cp2": 1, "2 to 4": 4}.get(name, 2)
    for step in range(NUM_STEPS):
        where = run / "token_exports" / f"step_{step}"
        ranks = num_ranks if step >= 3 or name != "2 to 4" else 2
        files = [f"rank_{rank}.jsonl" for rank in range(ranks)]
        summaries = [f"summary.rank_{rank}.json" for rank in range(ranks)]
        assert sorted(path.name for path in where.iterdir()) == ["STABLE", *files, *summaries]
        found = {key: record for file in files for key, record in records(where / file).items()}
        assert sum(len(records(where / file)) for file in files) == len(found)
        expected = records(alone / "token_exports" / f"step_{step}" / "rank_0.jsonl")
        assert found.keys() == expected.keys()
        for key, record in found.items():
            assert record["token_ids"] == expected[key]["token_ids"]
            assert record["denominator"] == expected[key]["denominator"]
            for column in ("trainer_logprobs", "entropy", "token_loss"):
                values = np.array(expected[key][column], dtype=float)
                within = allowed.metric + allowed.update * np.nan_to_num(np.abs(values))
                assert np.array(record[column], dtype=float) == near(values, within=within)


def records(path: Path) -> dict[str, dict]:
    return {record["rollout_id"]: record for record in map(orjson.loads, path.read_bytes().splitlines())}


@pytest.mark.parametrize("name", RUNS)
def test_its_ledger_balances(folder, alone, two, four, name, tmp_path) -> None:
    ledger = shutil.copytree(folder / "runs" / name / "ledger", tmp_path / "ledger")
    num_journals = {"cp2": 1, "2 to 4": 4}.get(name, 2)
    assert len(list(ledger.glob("trainer*.jsonl"))) == num_journals
    engine = Journal(ledger / "inference.jsonl", Stage.INFERENCE, resume=True)
    orchestrator = Journal(ledger / "orchestrator.jsonl", Stage.ORCHESTRATOR, resume=True)
    for entry in read_journal(alone / "ledger" / "trainer.jsonl"):
        for journal, flows in ((engine, ("sampled", "delivered")), (orchestrator, ("received", "sent"))):
            for flow in flows:
                journal.count(entry.run, entry.env, Flow(flow), entry.counts.get("received", 0))
            journal.flush(entry.step)
    engine.close(NUM_STEPS)
    orchestrator.close(NUM_STEPS)
    report = reconcile(ledger)
    assert report.balanced and not report.running, report.verdict()


def test_a_sharded_head_has_the_names_that_it_has_alone(folder, two, allowed, tmp_path) -> None:
    """In checkpoints, from which one process goes on, in published weights, and in the result."""
    model = folder / "models" / "untied"
    run_with(settings(model, send_batches(tmp_path / "alone"), **training({})), Ranks())
    expected = result_of(tmp_path / "alone")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= expected.keys()
    rounding = STEPS_OF_LR * allowed.update
    assert largest_difference(result_of(folder / "runs" / "untied"), expected) <= rounding
    version = load_file(folder / "runs" / "untied" / "weights" / "step_6" / "model.safetensors")
    assert largest_difference(version, expected) <= rounding
    run = stopped_at_3(folder / "runs" / "untied", tmp_path / "run", model)
    run_with(settings(model, run, **training({})).model_copy(update={"resume": True}), Ranks())
    assert largest_difference(result_of(run), expected) <= rounding


def test_a_checkpoint_of_two_processes_is_one_for_one(folder, alone, two, allowed, tmp_path) -> None:
    model = folder / "models" / "tied"
    run = stopped_at_3(folder / "runs" / "dp2", tmp_path / "run", model)
    config = settings(model, run, **training({})).model_copy(update={"resume": True})
    run_with(config, Ranks())
    assert largest_difference(result_of(run), result_of(alone)) <= STEPS_OF_LR * allowed.update
    assert [path.name for path in (run / "ledger").glob("trainer*")] == ["trainer.jsonl"]
    for step in range(NUM_STEPS):
        files = sorted(path.name for path in (run / "token_exports" / f"step_{step}").glob("*.jsonl"))
        assert files == (["rank_0.jsonl", "rank_1.jsonl"] if step < 3 else ["rank_0.jsonl"])


@pytest.mark.parametrize("num_processes", [2, 8])
def test_a_checkpoint_of_four_processes_is_one_for_fewer_and_for_more(
    folder, alone, four, allowed, num_processes
) -> None:
    name = f"4 to {num_processes}"
    run = stopped_at_3(folder / "runs" / "dp2cp2", folder / "runs" / name, folder / "models" / "tied")
    start(folder, num_processes, {name: ["train", str(run), {}, True]})
    rounding = STEPS_OF_LR * allowed.update
    assert largest_difference(result_of(run), result_of(alone)) <= rounding
    exported = run / "token_exports" / f"step_{NUM_STEPS - 1}"
    assert len(list(exported.glob("rank_*.jsonl"))) == num_processes
    assert [record["step"] for record in read_metrics(run / "metrics" / "trainer.jsonl")] == [
        *range(NUM_STEPS)
    ]


@pytest.mark.parametrize(
    ("trainer", "num_processes", "message"),
    [
        (
            {"model": {"cp": 2}},
            1,
            "trainer.model.dp_replicate = 1 × trainer.model.cp = 2 does not divide the 1 ",
        ),
        ({"model": {"cp": 2, "dp_replicate": 2}}, 6, "start a multiple of 4"),
        ({"num_processes": 4}, 2, "trainer.num_processes = 4, but the trainer runs in 2"),
    ],
)
def test_processes_that_cannot_share_the_work_are_refused(trainer, num_processes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig.model_validate(trainer).check_num_processes(num_processes)
