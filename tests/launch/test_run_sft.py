"""`pellucid sft` as a user starts it: what it prints, what it leaves behind, and the page of it."""

import io
import json
import re

import datasets
import pytest
from rich.console import Console

import pellucid.export
from pellucid.cli import main
from pellucid.launch.console import sft_summary
from pellucid.metrics import read_metrics

WORDS = ["abc", "xyz", "hello", "world", "lamp", "spoon", "bicycle", "ant"]


def chat(word):
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


@pytest.fixture
def sft(tiny_model, tmp_path):
    """Runs the command on a few words; flags on top."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(chat(word)) + "\n" for word in WORDS))

    def run(*flags: str, path=data) -> int:
        return main(
            [
                *("sft", "--model.name", str(tiny_model), "--output-dir", str(tmp_path / "demo")),
                *("--data.path", str(path), "--data.batch-size", "4", "--seq-len", "64"),
                *("--max-steps", "3", "--trainer.threads", "1", "--trainer.optim.lr", "1e-2", *flags),
            ]
        )

    return run


def test_a_run_from_its_data_to_its_summary(sft, tmp_path, capsys) -> None:
    assert sft("--data.validation.num-examples", "2", "--data.validation.interval", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tokenised 8 examples in \d+\.\d s", lines[0])
    assert re.fullmatch(r"training: 6 examples, \d+ tokens, \d+ of them with loss", lines[1])
    assert re.fullmatch(r"validation: 2 examples, \d+ tokens, \d+ of them with loss", lines[2])
    assert lines[3] == "demo: 3 steps"
    records = list(read_metrics(tmp_path / "demo" / "metrics" / "trainer.jsonl"))
    shown = [line.split()[:3] for line in lines[5:8]]
    assert shown == [
        [str(step), f"{record['loss']:.4f}", f"{record['validation/loss']:.4f}" if step else "-"]
        for step, record in enumerate(records)
    ]
    text = "\n".join(lines)
    best = min(records[1:], key=lambda record: record["validation/loss"])
    assert (
        f"{records[0]['validation/initial_loss']:.4f} (before) → {records[2]['validation/loss']:.4f} (last), "
        f"best {best['validation/loss']:.4f} after step {best['step']}"
    ) in text
    assert f"{records[2]['total/tokens']:,} trained on, {records[2]['total/loss_tokens']:,} of them" in text
    assert str(tmp_path / "demo" / "model")[:60] in text.replace("\n", "")
    assert max(map(len, lines)) <= 100


def test_it_says_where_the_export_goes_and_never_into_that_of_another_run(sft, tmp_path, capsys) -> None:
    """The path is seen from the run's folder; what was refused has left that folder alone."""
    path = ("--trainer.experimental.token-export.path", "../tokens.jsonl")
    (tmp_path / "tokens.rank_0.jsonl").write_text("of somebody else")
    assert sft(*path) == 2
    assert "tokens.rank_0.jsonl holds the export of another run (an unknown one)" in capsys.readouterr().err
    (tmp_path / "tokens.rank_0.jsonl").unlink()
    assert sft(*path) == 0
    assert f"token exports go to {tmp_path / 'tokens.rank_R.jsonl'}" in capsys.readouterr().out
    assert pellucid.export.open(tmp_path / "demo").steps == (0, 1, 2)
    assert sft(*path, "--resume", "--max-steps", "4") == 0
    lines = (tmp_path / "tokens.rank_0.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["step"] for line in lines}) == [0, 1, 2, 3]


def test_without_validation_there_is_no_word_of_it(sft, capsys) -> None:
    assert sft() == 0
    assert "val" not in capsys.readouterr().out.replace("/", " ").split("demo: 3 steps")[1].split("model")[0]


def test_a_data_set_folder_trains_like_the_file(sft, tmp_path, capsys) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([chat(word) for word in WORDS]).save_to_disk(tmp_path / "saved")
    losses = []
    for path in (tmp_path / "saved", tmp_path / "data.jsonl"):
        assert sft("--clean-output-dir", path=path) == 0
        records = read_metrics(tmp_path / "demo" / "metrics" / "trainer.jsonl")
        losses.append([record["loss"] for record in records])
    assert losses[0] == losses[1]


def test_a_resumed_run_goes_on_with_the_examples_and_the_losses_it_would_have_had(
    sft, tmp_path, capsys
) -> None:
    def losses(*flags: str) -> list[tuple[float, float | None]]:
        validation = ("--data.validation.num-examples", "2", "--data.validation.interval", "3")
        assert sft(*validation, *flags) == 0
        records = list(read_metrics(tmp_path / "demo" / "metrics" / "trainer.jsonl"))
        assert [record["step"] for record in records if "validation/initial_loss" in record] == [0]
        return [(record["loss"], record.get("validation/loss")) for record in records]

    whole = losses("--max-steps", "6")
    assert [validation is not None for _, validation in whole] == [False, False, True, False, False, True]
    first = losses("--max-steps", "3", "--clean-output-dir")
    assert first == whole[:3]
    capsys.readouterr()
    assert losses("--max-steps", "6", "--resume") == whole
    out = capsys.readouterr().out
    assert "resuming at step 3" in out and "steps       6" in out


def test_the_page_of_a_run(sft, tmp_path, capsys) -> None:
    assert sft("--trainer.experimental.token-export") == 0
    exports = (tmp_path / "demo" / "token_exports").glob("step_*/rank_0.jsonl")
    records = [json.loads(line) for path in exports for line in path.read_text().splitlines()]
    assert len(records) == 12
    for record in records:
        for name in ("importance_ratio", "log_importance_ratio", "mismatch_kl", "prob_delta", "is_masked"):
            assert set(record[name]) == {None}
        assert set(record["is_masked_low"]) == set(record["is_masked_high"]) == {None}
        assert record["run_id"] == "demo"
        assert [role for role, _, _ in record["role_spans"]] == ["user", "assistant"]
        has_loss = [loss != 0 for loss in record["token_loss"]]
        assert has_loss == record["loss_mask"]
    page = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "demo"), "-o", str(page)]) == 0
    assert page.stat().st_size > 10_000


def test_a_bad_row_is_named_and_the_folder_can_be_used_once_it_is_put_right(sft, tmp_path, capsys) -> None:
    good = (tmp_path / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(good + '{"messages": [{"role": "user", "content": "x"}]}\n')
    assert sft() == 1
    assert "data.jsonl:9: `messages` has no assistant turn" in capsys.readouterr().err
    (tmp_path / "data.jsonl").write_text(good)
    assert sft() == 0


def test_examples_that_lose_all_their_loss_are_counted_and_train_nothing(sft, tmp_path, capsys) -> None:
    """A user turn of 60 letters fills 32 tokens alone; the others fit."""
    long = chat("a" * 60)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(c) + "\n" for c in [long, long, chat("b")]))
    flags = (
        "--seq-len",
        "32",
        "--data.batch-size",
        "1",
        "--max-steps",
        "3",
        "--trainer.experimental.token-export",
    )
    assert sft(*flags) == 0
    out = capsys.readouterr().out
    assert "training: 3 examples, 87 tokens, 2 of them with loss; 2 cut at seq_len, 2 of these with no" in out
    records = list(read_metrics(tmp_path / "demo" / "metrics" / "trainer.jsonl"))
    assert sorted(record["loss_tokens"] for record in records) == [0, 0, 2]
    assert [record["loss"] for record in records if not record["loss_tokens"]] == [0.0, 0.0]
    assert records[-1]["export/skipped_sequences"] == 2


def test_the_summary_of_many_steps_fits(tmp_path) -> None:
    records = [
        {
            "step": step,
            "loss": 4.0 - step / 50,
            "tokens": 10**9,
            "padding_tokens": 0,
            "loss_tokens": 10**8,
            "truncated_tokens": 10**7,
            "time/step_s": 2.5,
            "time/validate_s": 0.5,
            **(
                {"validation/loss": 3.0 + abs(step - 49), "validation/tokens": 10**9}
                if step % 10 == 9
                else {}
            ),
        }
        for step in range(100)
    ]
    records[0]["validation/initial_loss"] = 12345.6789
    records[40] |= {"loss": None, "skipped_steps": 1}
    out = io.StringIO()
    Console(file=out, width=140).print(sft_summary("demo", 165.0, records, tmp_path, 140))
    text = out.getvalue()
    assert "duration    2 min 45 s" in text
    assert "steps       100" in text
    assert "skipped     1 of these steps: loss or gradient was not finite" in text
    assert "loss        3.9100 (first 10) → 2.1100 (last 10)" in text
    assert "validation  12345.6789 (before) → 53.0000 (last), best 3.0000 after step 49, over" in text
    assert (
        "tokens      100,000,000,000 trained on, 10,000,000,000 of them with loss; 1,000,000,000 cut" in text
    )
    assert "tokens/s    500,000,000 while training" in text
    assert max(map(len, text.splitlines())) == 100
