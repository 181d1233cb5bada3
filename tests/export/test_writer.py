"""What is exported is what the loss did: golden records, order, and files that appear when they are whole."""

import json
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import pellucid.export
import warm
from exported_steps import WHOLE_STEPS, exported, observed, samples, write_steps
from pellucid.config import DppoLossConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.errors import ConfigError
from pellucid.export import FIELDS, TokenExporter
from pellucid.loss import LossInputs, LossRecord, dppo_loss
from pellucid.model import TokenOutput
from pellucid.trainer.observer import observed_values
from pellucid.transport import Batch, decode_batch, encode_batch
from tolerance import near


def table_of(case) -> TokenTable:
    """A micro batch of a golden case, over the wire as samples. Only the loss mask is put in afterwards: such
    cases mark first tokens and logprobs that are not finite as trainable, which no sample may."""
    values, lengths = case["inputs"]["micro_batch"], case["inputs"]["sequence_lengths"]
    samples = []
    for start, length in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True):
        span = slice(start, start + length)
        samples.append(
            TrainingSample.build(
                token_ids=values["input_ids"][0][span],
                loss_mask=[False] * length,
                sampled=[True] * length,
                inference_logprobs=values["inference_logprobs"][0][span],
                policy_versions=[0] * length,
                advantages=values["advantages"][0][span],
                env_name=values["env_names"][start],
                reward=values["rewards"][0][start + 1] if values.get("rewards") else None,
            )
        )
    payload = encode_batch(Batch("run", 0, TokenTable.from_samples(samples)))
    table = decode_batch(payload, sender="test").table
    return TokenTable(table.lengths, {**table.columns, "loss_mask": np.array(values["loss_mask"][0])})


def export(case, tmp_path):
    table = table_of(case)
    model = case["inputs"]["model_output"]
    output = TokenOutput(torch.tensor(model["logprobs"][0]), torch.tensor(model["entropy"][0]))
    inputs = LossInputs.of(to_tensors(table, torch.device("cpu")), output.logprobs)
    config = case["inputs"]["loss_config"]
    if isinstance(config, dict):
        record = dppo_loss(inputs, DppoLossConfig(**config))
    else:
        record = LossRecord(torch.zeros_like(output.logprobs), inputs.ratios)
    exporter = TokenExporter(tmp_path, rank=case["inputs"]["rank"])
    step, micro_step = case["inputs"]["step"], case["inputs"]["micro_step"]
    exporter.add(table, observed_values(output, record), step=step, micro_step=micro_step, denominator=1)
    exporter.finish(step)


def assert_same(found, expected, name) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right, name)
    elif isinstance(expected, float):
        # Ratios and KLs are differences of logprobs, which are a few nats.
        assert found == near(expected, terms=8, scale=max(abs(expected), 4.0)), name
    else:
        assert found == expected, name


@pytest.mark.golden("token_export")
def test_golden_records(case, tmp_path) -> None:
    export(case, tmp_path)
    (path,) = case["outputs"]["files"]
    records = [json.loads(line) for line in (tmp_path / path).read_text().splitlines()]
    assert len(records) == len(case["outputs"]["records"])
    for found, expected in zip(records, case["outputs"]["records"], strict=True):
        assert list(found) == [field.name for field in FIELDS]
        for name, value in expected.items():
            if name == "rewards" and case["name"] == "non-finite -> null":
                continue  # one reward per rollout here; the case has a single NaN among a sequence's tokens
            assert_same(found[name], value, name)


def test_sequences_without_a_trainable_token_are_counted_not_exported(tmp_path) -> None:
    exporter = TokenExporter(tmp_path)
    table = samples()
    exporter.add(table, observed(table.num_tokens), step=0, micro_step=0, denominator=1)
    exporter.finish(0)
    (line,) = (tmp_path / "token_exports" / "step_0" / "rank_0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["env_name"], record["micro_sequence_idx"], record["export_sequence_idx"]) == ("b", 1, 0)
    assert record["role_spans"] == [["user", 0, 1]]
    assert record["policy_versions"] == [-1, 0]
    assert exporter.num_skipped == 1


def test_a_step_is_invisible_until_it_is_whole(tmp_path) -> None:
    exporter = TokenExporter(tmp_path)
    table = samples()
    folder = tmp_path / "token_exports" / "step_3"
    exporter.add(table, observed(table.num_tokens), step=3, micro_step=0, denominator=1)
    exporter.flush()
    assert list(folder.glob("*")) == [folder / ".rank_0.jsonl.partial"]
    exporter.finish(3)
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.jsonl", "summary.rank_0.json"]
    exporter.mark_stable(3)
    assert (folder / "STABLE").exists()


def test_an_explicit_path_gets_the_rank_and_all_steps(tmp_path) -> None:
    exporter = TokenExporter(tmp_path, rank=2, path=tmp_path / "mine.jsonl")
    table = samples()
    for step in range(2):
        exporter.add(table, observed(table.num_tokens), step=step, micro_step=0, denominator=1)
        exporter.finish(step)
        exporter.mark_stable(step)
    lines = (tmp_path / "mine.rank_2.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_a_writer_that_is_killed_leaves_only_whole_steps(tmp_path) -> None:
    """Killed in the middle of step 1: what it has of it, whole records too, is not to be seen."""
    exporter = TokenExporter(tmp_path, path=tmp_path / "mine.jsonl")
    write_steps(exporter, [0])
    table = samples()
    exporter.add(table, observed(table.num_tokens), step=1, micro_step=0, denominator=1)
    exporter.close()
    assert [record.key[0] for record in pellucid.export.open(tmp_path / "mine.rank_0.jsonl").records()] == [0]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("own_process", [False, True])
def test_a_full_disk_ends_the_export_with_one_warning_and_a_count(tmp_path, caplog, own_process) -> None:
    def fill() -> None:
        (tmp_path / "token_exports" / "step_2").mkdir()
        (tmp_path / "token_exports" / "step_2" / ".rank_0.jsonl.partial").symlink_to("/dev/full")

    exporter = TokenExporter(tmp_path, own_process=own_process)
    write_steps(exporter, range(5), fill)
    exporter.close()
    assert exported(tmp_path) == WHOLE_STEPS
    assert (exporter.num_lost, exporter.num_skipped) == (3, 5)
    (warning,) = caplog.records
    assert warning.getMessage() == (
        f"the token export ends with step 2: {tmp_path}/token_exports/step_2/rank_0.jsonl cannot be written "
        "(No space left on device); training goes on without it, and export/lost_sequences counts what is "
        "left out. Once that is mended, --resume exports again"
    )


@pytest.mark.parametrize("own_process", [False, True])
def test_an_export_ends_where_it_would_exceed_its_bytes(tmp_path, caplog, own_process) -> None:
    """Also one that a resumed run goes on with: what is there counts."""
    exporter = TokenExporter(tmp_path)
    write_steps(exporter, range(2))
    exporter.close()
    size = sum(path.stat().st_size for path in tmp_path.glob("token_exports/*/*"))
    exporter = TokenExporter(tmp_path, own_process=own_process, max_bytes=round(1.6 * size))
    write_steps(exporter, range(2, 5))
    exporter.close()
    steps = sorted(path.parent.name for path in tmp_path.glob("token_exports/*/STABLE"))
    assert steps == ["step_0", "step_1", "step_2"] and exporter.num_lost == 2
    (warning,) = caplog.records
    assert re.match(
        r"the token export ends with step 3: its files have [\d,]+ bytes, "
        rf"trainer\.experimental\.token_export\.max_bytes = {round(1.6 * size):,}; training goes on",
        warning.getMessage(),
    )


def test_a_folder_that_vanishes_ends_the_export(tmp_path, caplog) -> None:
    exporter = TokenExporter(tmp_path)
    table = samples()
    write_steps(exporter, range(2))
    exporter.add(table, observed(table.num_tokens), step=2, micro_step=0, denominator=1)
    exporter.flush()
    shutil.rmtree(tmp_path / "token_exports")
    exporter.add(table, observed(table.num_tokens), step=2, micro_step=1, denominator=1)
    exporter.finish(2)
    write_steps(exporter, [3])
    assert exporter.num_lost == 3 and exported(tmp_path) == []
    (warning,) = caplog.records
    assert re.match(
        rf"the token export ends with step 2: {tmp_path}/token_exports/\S+ cannot be written "
        r"\(No such file or directory\)",
        warning.getMessage(),
    )


def test_a_full_disk_leaves_no_half_of_a_parquet_file(tmp_path, caplog) -> None:
    def fill() -> None:
        (tmp_path / "token_exports" / "step_2").mkdir()
        (tmp_path / "token_exports" / "step_2" / ".rank_0.parquet.partial").symlink_to("/dev/full")

    exporter = TokenExporter(tmp_path, format="parquet")
    write_steps(exporter, range(4), fill)
    exporter.close()
    assert exported(tmp_path) == [name.replace("jsonl", "parquet") for name in WHOLE_STEPS]
    assert exporter.num_lost == 2 and len(caplog.records) == 1


def test_numbers_that_are_not_finite_are_null_in_both_formats(tmp_path) -> None:
    table = samples()
    values = observed(table.num_tokens)
    values["trainer_logprobs"] = torch.tensor([0.0] * 3 + [float("-inf"), float("nan")] + [0.0] * 3)
    for format in ("jsonl", "parquet"):
        exporter = TokenExporter(tmp_path / format, format=format)
        exporter.add(table, values, step=0, micro_step=0, denominator=1)
        exporter.finish(0)
        (record,) = pellucid.export.open(tmp_path / format / "token_exports" / "step_0").records()
        assert record.as_dict()["trainer_logprobs"] == [None, None]
        assert np.isnan(record["trainer_logprobs"]).all()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("columns", ["all", "essential"])
def test_a_reward_that_nobody_gave_is_null(tmp_path, format, columns) -> None:
    """One sample has a reward, the other has none; the mean of the step is that of the one."""
    table = TokenTable.from_samples(
        [
            TrainingSample.from_turn([1], [2], [-1.0], env_name="a", reward=0.5),
            TrainingSample.from_turn([3], [4], [-1.0], env_name="a"),
        ]
    )
    exporter = TokenExporter(tmp_path, format=format, columns=columns)
    exporter.add(table, observed(table.num_tokens), step=0, micro_step=0, denominator=2)
    exporter.finish(0)
    exporter.mark_stable(0)
    exporter.close()
    export = pellucid.export.open(tmp_path)
    scored, unscored = export.step(0)
    assert (scored["reward"], unscored["reward"]) == (0.5, None)
    assert scored["rewards"].tolist() == [0.5, 0.5] and unscored.as_dict()["rewards"] == [None, None]
    assert np.isnan(export.step(0).column("reward")).tolist() == [False, True]
    reward = export.summary(0).total().reward
    assert (reward.count, reward.mean) == (1, 0.5)


def test_an_export_holds_one_micro_batch_at_most(tmp_path) -> None:
    exporter = TokenExporter(tmp_path, format="parquet")
    alive: list[weakref.ref[TokenTable]] = []
    for micro_step in range(6):
        table = samples()
        exporter.add(table, observed(table.num_tokens), step=0, micro_step=micro_step, denominator=1)
        alive.append(weakref.ref(table))
        del table
        assert all(gone() is None for gone in alive[:-1])
    exporter.finish(0)
    exporter.close()


@pytest.mark.parametrize(
    "options", [{}, {"format": "parquet"}, {"path": "mine.jsonl"}, {"path": "mine.parquet"}]
)
def test_steps_that_are_written_again_replace_the_first_try(tmp_path, options) -> None:
    if path := options.get("path"):
        options = {"path": tmp_path / "files" / path, "format": Path(path).suffix[1:]}
    for rank in range(2):
        write_steps(TokenExporter(tmp_path, rank=rank, **options), range(4))
    again = TokenExporter(tmp_path, **options)
    again.forget_from(2)
    again.forget_ranks_from(1, 2)
    where = tmp_path / "files" if path else tmp_path
    kept = pellucid.export.open(where).records()
    assert [record.key[:2] for record in kept] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [path.parent.name for path in sorted(tmp_path.rglob("STABLE"))] == ["step_0", "step_1"]
    write_steps(again, [2])
    again.close()
    for place in (where, tmp_path):
        assert [record.key[:2] for record in pellucid.export.open(place).records({2, 3})] == [(2, 0)]


@pytest.mark.parametrize("path", [None, Path("../shared/tokens.jsonl")])
def test_two_runs_never_write_to_one_place(tmp_path, path) -> None:
    """With a path of both; without one, in one folder."""
    folders = [tmp_path / ("one" if path is None else name) for name in ("one", "two")]
    first, second = (TokenExporter(folder, path=path) for folder in folders)
    first.claim(resume=False)
    write_steps(first, [0])
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"another run \(\S*one\) is writing to .*of its own"):
            second.claim(resume=resume)
    first.close()
    if path is not None:
        with pytest.raises(
            ConfigError, match=r"tokens.rank_0.jsonl holds the export of another run \(\S*one\)"
        ):
            second.claim(resume=False)
    assert [record.key[0] for record in pellucid.export.open(folders[0]).records()] == [0]


@pytest.mark.parametrize("is_lock", [False, True])
def test_a_path_that_cannot_be_written_is_refused_by_its_key(tmp_path, is_lock) -> None:
    """A file lies where its folder should be, or a folder where its lock should be."""
    if is_lock:
        (tmp_path / "taken" / ".tokens.lock").mkdir(parents=True)
    else:
        (tmp_path / "taken").touch()
    exporter = TokenExporter(tmp_path / "run", path=tmp_path / "taken" / "tokens.jsonl")
    with pytest.raises(ConfigError) as refused:
        exporter.claim(resume=False)
    exporter.close()
    assert re.fullmatch(
        r"trainer.experimental.token_export.path = \S*/taken/tokens.jsonl: the token export cannot be "
        r"written there \(.+\); choose another path, or make its folder writable",
        str(refused.value),
    )


@pytest.mark.parametrize("path", [Path("tokens.jsonl"), Path("files/tokens.parquet")])
def test_a_run_that_was_moved_goes_on_with_its_export(tmp_path, path) -> None:
    options = {"path": path, "format": path.suffix[1:]}
    for folder, resume, step in (("before", False, 0), ("after", True, 1)):
        exporter = TokenExporter(tmp_path / folder, **options)
        exporter.claim(resume=resume)
        write_steps(exporter, [step])
        exporter.close()
        if not resume:
            (tmp_path / "before").rename(tmp_path / "after")
    assert [record.key[0] for record in pellucid.export.open(tmp_path / "after").records()] == [0, 1]
    stranger = TokenExporter(tmp_path / "stranger", path=tmp_path / "after" / path, format=path.suffix[1:])
    with pytest.raises(ConfigError, match=rf"the export of another run \({tmp_path}/after\)"):
        stranger.claim(resume=True)
    stranger.close()


@pytest.mark.parametrize("path", [None, Path("tokens.jsonl"), Path("tokens.parquet")])
def test_a_fresh_run_starts_an_export_and_a_resumed_one_goes_on_with_it(tmp_path, path, caplog) -> None:
    options = {"path": path, "format": path.suffix[1:]} if path else {}
    caplog.set_level("INFO")
    seen = []
    for resume, steps in ((False, range(3)), (True, range(3, 4)), (False, range(1))):
        exporter = TokenExporter(tmp_path, **options)
        exporter.claim(resume=resume)
        write_steps(exporter, steps)
        exporter.close()
        seen.append([record.key[0] for record in pellucid.export.open(tmp_path).records()])
    assert seen == [[0, 1, 2], [0, 1, 2, 3], [0]]
    where = {
        None: "token_exports",
        ".jsonl": "tokens.rank_R.jsonl",
        ".parquet": "tokens.step_N.rank_R.parquet",
    }
    expected = where[path.suffix if path else None]
    assert caplog.messages == [f"token exports go to {tmp_path / expected}"] * 3


FILLS_UP = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from exported_steps import TokenExporter, write_steps

folder = Path(sys.argv[1])
exporter = TokenExporter(folder, path=folder / "all.jsonl")

def fill():
    size = (folder / "all.rank_0.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))

write_steps(exporter, range(4), fill)
print(exporter.num_lost)
"""


def test_one_file_for_all_steps_keeps_those_that_are_whole(tmp_path) -> None:
    """A limit on its size stands for a disk that fills up in the middle of a record."""
    (tmp_path / "fills_up.py").write_text(FILLS_UP)
    arguments = [str(tmp_path), str(Path(__file__).parents[1])]
    done = warm.run(arguments, module="fills_up", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    lines = (tmp_path / "all.rank_0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
