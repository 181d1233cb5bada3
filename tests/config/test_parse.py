"""Files and flags become one config; every problem becomes one line."""

import tomllib
from pathlib import Path

import pytest

from pellucid.config import (
    CustomLossConfig,
    DppoLossConfig,
    EvalConfig,
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    SFTConfig,
    TokenExportConfig,
    TrainerRunConfig,
    VerifyConfig,
)
from pellucid.config.parse import Parsed, parse
from pellucid.config.tools import LedgerSettings, ViewSettings
from pellucid.errors import ConfigError

NAMED = ["--model.name", "m"]
ROOT = Path(__file__).parents[2]


def trainer(*argv: str) -> TrainerRunConfig:
    return parse(TrainerRunConfig, [*NAMED, *argv], prog="pellucid trainer").config


def problems(kind: type, *argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(kind, argv, prog="pellucid test")
    return str(caught.value).splitlines()


def trainer_problems(*argv: str) -> list[str]:
    return problems(TrainerRunConfig, *NAMED, *argv)


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


# Flags


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "two\nlines", "r" * 201])
@pytest.mark.parametrize("flag", ["--run-id", "--output-dir"])
def test_a_run_has_a_name_that_can_be_shown_and_be_a_folder(flag, name):
    if flag == "--output-dir" and ("/" in name or name == ".."):
        return  # the name of a folder that it leads to
    [problem] = trainer_problems(flag, name)
    assert (
        f"{name[:200]!r} cannot name the run: give run_id at most 200 printable characters, without `/`"
        in problem
    )
    assert trainer(flag, "r" * 200).run_name == "r" * 200


def test_a_flag_sets_a_nested_key():
    config = trainer("--trainer.optim.lr", "3e-4", "--trainer.optim.max-norm=2")
    assert (config.trainer.optim.lr, config.trainer.optim.max_norm) == (3e-4, 2.0)
    assert config.trainer.optim.weight_decay == 0.0


def test_booleans_are_bare_flags():
    assert trainer("--clean-output-dir").clean_output_dir is True
    assert trainer("--clean-output-dir", "--no-clean-output-dir").clean_output_dir is False


def test_a_bare_flag_enables_an_optional_section():
    assert trainer().trainer.experimental.token_export is None
    enabled = trainer("--trainer.experimental.token-export")
    assert enabled.trainer.experimental.token_export == TokenExportConfig()
    at_path = trainer("--trainer.experimental.token-export.path", "x.jsonl")
    assert at_path.trainer.experimental.token_export == TokenExportConfig(path=Path("x.jsonl"))


def test_export_is_short_for_a_parquet_export():
    own = "--trainer.experimental.token-export"
    assert trainer().trainer.experimental.token_export is None
    short = trainer("--export").trainer.experimental.token_export
    assert short == trainer(f"{own}.format", "parquet").trainer.experimental.token_export
    chosen = trainer("--export", f"{own}.format", "jsonl", f"{own}.max-bytes", "7")
    export = chosen.trainer.experimental.token_export
    assert (export.format, export.max_bytes) == ("jsonl", 7)
    assert trainer(f"{own}.max-bytes", "7").trainer.experimental.token_export.format == "jsonl"


@pytest.mark.parametrize("value", ["true", "1", '"yes"', '"on"'])
def test_export_is_on_for_every_value_that_is_true(value, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"export = {value}")
    config = trainer("@", str(path))
    assert config.export and config.trainer.experimental.token_export is not None


@pytest.mark.parametrize("key", ["trainer", "trainer.experimental"])
def test_export_leaves_a_section_that_is_no_table_to_validation(key, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"export = true\n{key} = 3")
    (problem,) = trainer_problems("@", str(path))
    assert problem.startswith(f"{key} = 3: should be a table")


def test_what_export_needs_is_installed_with_pellucid():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(dependency.startswith("pyarrow") for dependency in project["dependencies"])


def test_lists_and_tables_are_json():
    config = parse(
        RLConfig,
        [
            *NAMED,
            "--trainer.optim.betas",
            "[0.8, 0.9]",
            "--orchestrator.env",
            r'[{"id": "a", "args": {"n": [1, "\"]\n"]}}, {"id": "b"}]',
        ],
        prog="pellucid rl",
    ).config
    assert config.trainer.optim.betas == (0.8, 0.9)
    assert [(env.id, env.args) for env in config.orchestrator.env] == [("a", {"n": [1, '"]\n']}), ("b", {})]


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_wins_over_its_section_in_any_order(order):
    flags = [["--trainer.optim.lr", "0.5"], ["--trainer.optim", '{"lr": 0.1, "max_norm": 2}']][::order]
    optim = trainer(*flags[0], *flags[1]).trainer.optim
    assert (optim.lr, optim.max_norm) == (0.5, 2.0)


def test_a_bare_section_flag_keeps_the_keys_before_it():
    flags = ["--trainer.experimental.token-export.path", "x", "--trainer.experimental.token-export"]
    assert trainer(*flags).trainer.experimental.token_export == TokenExportConfig(path=Path("x"))


def test_a_type_selects_the_variant():
    config = trainer(
        "--trainer.loss.type",
        "custom",
        "--trainer.loss.import-path",
        "a:b",
        "--trainer.loss.kwargs",
        '{"beta": 0.5}',
    )
    assert config.trainer.loss == CustomLossConfig(type="custom", import_path="a:b", kwargs={"beta": 0.5})


def test_without_a_type_a_union_is_its_default_variant():
    assert trainer("--trainer.loss.kl-tau", "0").trainer.loss == DppoLossConfig(kl_tau=0)


def test_null_unsets_a_value(toml):
    file = toml('run_id = "r"\n[trainer.experimental.token_export]\n')
    config = trainer("@", file, "--run-id", "null", "--trainer.experimental.token-export", "null")
    assert config.run_id is None
    assert config.trainer.experimental.token_export is None


def test_environment_variables_are_not_read(monkeypatch):
    monkeypatch.setenv("seed", "7")
    monkeypatch.setenv("trainer.optim.lr", "7")
    assert trainer() == trainer("--seed", "0")


def test_dry_run_is_not_a_config_key(toml):
    assert parse(TrainerRunConfig, [*NAMED, "--dry-run"], prog="p") == Parsed(trainer(), dry_run=True)
    assert parse(TrainerRunConfig, NAMED, prog="p").dry_run is False
    assert trainer_problems("@", toml("dry_run = true")) == [
        "dry_run = True: unknown key; see `pellucid test --help`"
    ]


# Files


def test_files_are_merged_in_order_and_flags_win(toml):
    first = toml('seed = 1\n[model]\nname = "a"\n[trainer.optim]\nlr = 0.1\nmax_norm = 3\n', "1.toml")
    second = toml("[trainer.optim]\nlr = 0.2\nweight_decay = 0.5\n", "2.toml")
    argv = ["@", first, "--trainer.optim.weight-decay", "0.25", f"@{second}"]
    config = parse(TrainerRunConfig, argv, prog="p").config
    optim = config.trainer.optim
    assert (config.model.name, config.seed) == ("a", 1)
    assert (optim.lr, optim.max_norm, optim.weight_decay) == (0.2, 3.0, 0.25)


def test_a_file_and_flags_say_the_same(toml):
    file = toml(
        """
        output_dir = "out"
        [model]
        name = "m"
        [trainer.optim]
        betas = [0.8, 0.9]
        [trainer.loss]
        type = "custom"
        import_path = "a:b"
        [trainer.experimental.token_export]
        """
    )
    flags = ["--output-dir", "out", "--trainer.optim.betas", "[0.8, 0.9]", "--trainer.loss.type", "custom"]
    flags += ["--trainer.loss.import-path", "a:b", "--trainer.experimental.token-export"]
    assert parse(TrainerRunConfig, ["@", file], prog="p").config == trainer(*flags)


def test_a_flag_keeps_the_variant_of_the_file(toml):
    file = toml('[trainer.loss]\ntype = "custom"\nimport_path = "a:b"\nkwargs = {x = 1}\n')
    config = trainer("@", file, "--trainer.loss.kwargs", '{"y": 2}')
    assert config.trainer.loss == CustomLossConfig(type="custom", import_path="a:b", kwargs={"x": 1, "y": 2})


def test_keys_of_the_variant_that_a_flag_replaced_are_refused(toml):
    file = toml("[trainer.loss]\nadv_tau = 0.5\n")
    assert trainer_problems(
        "@", file, "--trainer.loss.type", "custom", "--trainer.loss.import-path", "a:b"
    ) == [
        "trainer.loss.adv_tau = 0.5: belongs to trainer.loss.type = 'dppo', not 'custom'; "
        "remove it or change the type"
    ]


def test_files_that_cannot_be_read(toml, tmp_path):
    broken = toml("seed = 1\nseq_len =\n", "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b"run_id = '\xe9'")
    (tmp_path / "folder").mkdir()
    assert trainer_problems("@", broken, "@missing.toml", "@", "latin.toml", "@", "folder", "@") == [
        "broken.toml: is not valid TOML: Invalid value (at line 2, column 10)",
        "missing.toml: no such file; check the path after @",
        "latin.toml: is not UTF-8 text; TOML has to be",
        "folder: cannot be read (Is a directory); check the path after @",
        "@ has no file after it; write @ FILE.toml",
    ]


def test_an_at_sign_does_not_swallow_a_flag():
    assert trainer_problems("@", "--seed", "1") == ["@ has no file after it; write @ FILE.toml"]


# Problems


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--trainer.optim.lr", "abc"], "trainer.optim.lr = 'abc': should be a valid number"),
        (["--trainer.optim.lr", "0"], "trainer.optim.lr = '0': should be greater than 0"),
        (["--seed", "1.5"], "seed = '1.5': should be a valid integer"),
        (["--model.dtype", "fp8"], "model.dtype = 'fp8': should be 'auto', 'float32' or 'bfloat16'"),
        (
            ["--trainer.loss.type", "dpo"],
            "trainer.loss.type = 'dpo': should be 'custom' or 'ppo_clip' or 'cispo' or 'gspo' or 'icepop' or "
            "'tis' or 'dppo'",
        ),
        (
            ["--trainer.loss.type", "custom"],
            "trainer.loss.import_path is missing; set it in a file or with --trainer.loss.import-path",
        ),
        (
            ["--trainer.loss.type", "custom", "--trainer.loss.import-path", "ab"],
            "trainer.loss.import_path = 'ab': is not an import path; write it as `package.module:function`",
        ),
        (
            ["--trainer.loss.import-path", "a:b"],
            "trainer.loss.import_path = 'a:b': belongs to trainer.loss.type = 'custom', not 'dppo'; "
            "remove it or change the type",
        ),
        (["--trainer.optim.betas", "[0.9, 1.5]"], "trainer.optim.betas[1] = 1.5: should be less than 1"),
        (
            ["--trainer.optim.betas", "[0.9]"],
            "trainer.optim.betas[1] is missing; set it in a file or with --trainer.optim.betas",
        ),
        (
            ["--trainer.optim.betas", "[0, 0, 0]"],
            "trainer.optim.betas = [0, 0, 0]: tuple should have at most 2 items after validation, not 3",
        ),
        (
            ["--trainer.optim", "{broken"],
            "trainer.optim = '{broken': should be a table with the keys lr, weight_decay, betas, max_norm",
        ),
        (
            ["--trainer.optim.betas", "0.9,0.95"],
            "trainer.optim.betas = '0.9,0.95': should be a list; a flag takes it as JSON, such as '[1, 2]'",
        ),
        (
            ["--trainer.loss.type=custom", "--trainer.loss.import-path=a:b", "--trainer.loss.kwargs", "{x"],
            "trainer.loss.kwargs = '{x': should be a table; a flag takes it as JSON, such as '{\"key\": 1}'",
        ),
        (["--trainer.optim.lr"], "--trainer.optim.lr: expected one argument; see `pellucid test --help`"),
        (
            ["--clean-output-dir=yes"],
            "--clean-output-dir/--no-clean-output-dir: ignored explicit argument 'yes'; "
            "see `pellucid test --help`",
        ),
        (["run.toml"], "run.toml: unexpected argument; write @ run.toml to read a file"),
        (
            ["--trainer.micro-batch-max-tokens", "4096", "--trainer.model.seq-len", "2048"],
            "trainer.micro_batch_max_tokens = 4096 exceeds trainer.model.seq_len = 2048; "
            "lower it or raise seq_len",
        ),
        (
            ["--trainer.data.fake", "--trainer.micro-batch-max-tokens", "64"],
            "trainer.micro_batch_max_tokens = 64 has no effect on fake data, whose samples are micro batches "
            "of their own; leave it out, and set trainer.data.fake.batch_size",
        ),
        (
            ["--trainer.pad-to-multiple-of", "48", "--trainer.micro-batch-max-tokens", "64"],
            "trainer.pad_to_multiple_of = 48 does not divide trainer.micro_batch_max_tokens = 64, so that a "
            "full micro batch would be padded beyond it; change one of them",
        ),
        (
            ["--trainer.pad-to-multiple-of", "48", "--seq-len", "64"],
            "trainer.pad_to_multiple_of = 48 does not divide trainer.model.seq_len = 64, so that a full "
            "micro batch would be padded beyond it; change one of them",
        ),
        (
            ["--seq-len", "8", "--trainer.model.seq-len", "16"],
            "trainer.model.seq_len = 16 contradicts seq_len = 8; set one of them, or both to the same value",
        ),
    ],
)
def test_a_problem_is_one_line_with_key_value_rule_and_remedy(argv, line):
    assert trainer_problems(*argv) == [line]


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--trainer.lss.kl-tau", "did you mean --trainer.loss.kl-tau?"),
        ("--trainer.loss.kl-tua", "did you mean --trainer.loss.kl-tau?"),
        ("--trainer.loss.kl_tau", "did you mean --trainer.loss.kl-tau?"),
        ("--lr", "did you mean --trainer.optim.lr?"),
        ("--dry-rum", "did you mean --dry-run?"),
        ("--zzz", "see `pellucid test --help`"),
    ],
)
def test_an_unknown_flag_suggests_the_nearest(flag, remedy):
    assert trainer_problems(flag, "1") == [f"{flag}: unknown flag; {remedy}"]
    assert trainer_problems(f"{flag}=1") == [f"{flag}: unknown flag; {remedy}"]


WHY_NOT = (
    "tokens are drawn from the model's own distribution, so that their logprobs are those training needs; "
    "leave it out"
)


def test_a_setting_that_would_reshape_the_distribution_is_refused_with_the_reason(toml):
    table = '[orchestrator.sampling]\ntop_p = 0.9\n[[orchestrator.env]]\nid = "arithmetic"'
    line = f"orchestrator.sampling.top_p = 0.9: unknown key; {WHY_NOT}"
    assert problems(OrchestratorRunConfig, *NAMED, "@", toml(table)) == [line]
    for flag in ("--orchestrator.sampling.top-k", "--min-p", "--repetition_penalty"):
        assert trainer_problems(flag, "1") == [f"{flag}: unknown flag; {WHY_NOT}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[trainer.optim]\nlrr = 0.1",
            "trainer.optim.lrr = 0.1: unknown key; did you mean trainer.optim.lr?",
        ),
        ("lr = 0.1", "lr = 0.1: unknown key; did you mean trainer.optim.lr?"),
        ("trainer.optm.lr = 1", "trainer.optm = {'lr': 1}: unknown key; did you mean trainer.optim?"),
        ("zzz = 1", "zzz = 1: unknown key; see `pellucid test --help`"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(toml, text, line):
    assert trainer_problems("@", toml(text)) == [line]


def test_a_key_inside_a_list_has_its_index(toml):
    file = toml('[[orchestrator.env]]\nid = "a"\n[[orchestrator.env]]\nid = "b"\nwieght = 2\n')
    assert problems(RLConfig, *NAMED, "@", file) == [
        "orchestrator.env[1].wieght = 2: unknown key; did you mean orchestrator.env[1].weight?"
    ]


def test_missing_keys_are_named_even_when_their_section_is_missing():
    assert problems(SFTConfig) == [
        "model.name is missing; set it in a file or with --model.name",
        "data.path is missing; set it to a file or folder, or data.name to a hub name",
    ]


def test_a_shared_key_is_reported_once():
    assert problems(RLConfig, *NAMED, "--seq-len", "abc") == ["seq_len = 'abc': should be a valid integer"]


def test_fake_data_is_for_the_trainer_alone():
    """`pellucid trainer` takes it; the commands that have data of their own refuse it."""
    assert (
        parse(TrainerRunConfig, [*NAMED, "--trainer.data.fake"], prog="p").config.trainer.data.fake.batch_size
        == 8
    )
    env = ["--orchestrator.env", '[{"id": "reverse-text"}]']
    remedy = "leave it out, or use `pellucid trainer`"
    assert problems(RLConfig, *NAMED, *env, "--trainer.data.fake") == [
        f"trainer.data.fake is set, but rl trains on what its orchestrator sends; {remedy}"
    ]
    assert problems(SFTConfig, *NAMED, "--data.path", "x.jsonl", "--trainer.data.fake") == [
        f"trainer.data.fake is set, but sft trains on its data set; {remedy}"
    ]


def test_runs_that_share_a_trainer_need_adapters():
    lora, joins = ["--model.lora"], ["--trainer.join", "outputs/shared"]
    remedy = "runs that share a model have an adapter each"
    assert problems(TrainerRunConfig, *NAMED, *joins) == [f"trainer.join needs [model.lora]: {remedy}"]
    assert problems(TrainerRunConfig, *NAMED, "--trainer.many-runs") == [
        f"trainer.many_runs needs [model.lora]: {remedy}"
    ]
    config = parse(TrainerRunConfig, [*NAMED, *lora, "--trainer.many-runs"], prog="p").config
    assert (config.trainer.many_runs.max_runs, config.model.lora.rank) == (4, 16)
    assert problems(TrainerRunConfig, *NAMED, *lora, *joins, "--trainer.many-runs")[0].startswith(
        "trainer.join = outputs/shared and trainer.many_runs are both set"
    )
    assert problems(TrainerRunConfig, *NAMED, *lora, *joins, "--trainer.num-processes", "2")[0].startswith(
        "trainer.num_processes = 2 with trainer.join = outputs/shared"
    )
    env = ["--orchestrator.env", '[{"id": "reverse-text"}]']
    assert "is for `pellucid trainer`" in problems(RLConfig, *NAMED, *lora, *env, "--trainer.many-runs")[0]
    assert problems(SFTConfig, *NAMED, *lora, "--data.path", "x.jsonl", *joins) == [
        "trainer.join is for rl; sft has the model to itself: leave it out"
    ]


def test_weights_over_http_are_for_a_trainer_of_one_run() -> None:
    over_http = ["--weights.transport", "http"]
    shared = [*NAMED, "--model.lora", "--trainer.many-runs"]
    assert problems(TrainerRunConfig, *shared, *over_http) == [
        'trainer.many_runs with weights.transport = "http": a trainer of many runs publishes to their '
        "folders only; leave one out"
    ]
    for given in (("--weights.port", "5558"), ("--weights.cache-dir", "/tmp/cache"), ("--weights.deltas",)):
        (problem,) = problems(TrainerRunConfig, *NAMED, *given)
        assert problem.endswith('"filesystem"; leave them out or set the transport')
    assert parse(TrainerRunConfig, [*NAMED, *over_http], prog="p").config.weights.url == "http://127.0.0.1:0"


def test_a_store_of_weights_goes_with_its_transport() -> None:
    by_store = ["--weights.transport", "object-store"]
    located = [*NAMED, *by_store, "--weights.store", "s3://bucket/run/"]
    assert parse(TrainerRunConfig, located, prog="p").config.weights.url == "s3://bucket/run"
    for given in (by_store, ["--weights.store", "s3://bucket/run"]):
        (problem,) = problems(TrainerRunConfig, *NAMED, *given)
        assert problem.endswith('a store goes with "object-store"; set both or neither')
    (problem,) = problems(TrainerRunConfig, *located, "--weights.port", "5558")
    assert "not for a store" in problem
    assert problems(TrainerRunConfig, *located, "--model.lora", "--trainer.many-runs")


@pytest.mark.parametrize(
    "flags", [["--trainer.micro-batch-max-tokens", "64"], ["--trainer.experimental.token-export"]]
)
def test_a_trainer_of_many_runs_has_no_cap_and_no_export_of_its_own(flags):
    (problem,) = problems(TrainerRunConfig, *NAMED, "--model.lora", "--trainer.many-runs", *flags)
    key = flags[0].removeprefix("--").replace("-", "_")
    assert problem.startswith(f"{key} has no effect with trainer.many_runs")


@pytest.mark.parametrize(("path", "format"), [("tokens.jsonl", "parquet"), ("tokens.v2", "jsonl")])
def test_the_path_of_an_export_ends_as_its_format_says(path, format):
    export = "--trainer.experimental.token-export"
    (problem,) = problems(TrainerRunConfig, *NAMED, f"{export}.path", path, f"{export}.format", format)
    assert f"token_export.path = {path} does not end in .{format}" in problem
    config = parse(TrainerRunConfig, [*NAMED, f"{export}.path", "tokens"], prog="p").config
    assert config.trainer.experimental.token_export.path == Path("tokens")


def test_long_values_are_shortened(toml):
    (line,) = trainer_problems("@", toml(f"zzz = '{'x' * 200}'"))
    assert line == f"zzz = '{'x' * 76}...: unknown key; see `pellucid test --help`"


def test_all_problems_at_once(toml):
    file = toml("sed = 1\n[trainer.loss]\nkl_tau = -1\n")
    assert problems(TrainerRunConfig, "@", file, "--lr", "1", "stray", "--trainer.optim.lr", "x") == [
        "--lr: unknown flag; did you mean --trainer.optim.lr?",
        "stray: unexpected argument; write @ stray to read a file",
        "model.name is missing; set it in a file or with --model.name",
        "trainer.optim.lr = 'x': should be a valid number",
        "trainer.loss.kl_tau = -1: should be greater than or equal to 0",
        "sed = 1: unknown key; did you mean seed?",
    ]


# Help and tools


def test_help_describes_keys_with_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(InferenceRunConfig, ["@", "missing.toml", "--help"], prog="pellucid inference")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert text.startswith(
        "usage: pellucid inference [@ FILE.toml ...] [--section.key value ...] "
        "`pellucid inference`: serve the model, follow its weights."
    )
    assert "--inference.max-concurrent int Sequences decoded together" in text
    assert "further requests wait in line. (default: 64)" in text


def test_help_shows_the_default_of_a_tagged_union(capsys):
    with pytest.raises(SystemExit):
        parse(TrainerRunConfig, ["--help"], prog="pellucid trainer")
    text = " ".join(capsys.readouterr().out.split())
    assert "--trainer.loss.type {cispo,custom,dppo,gspo,icepop,ppo_clip,tis} `dppo`: DPPO + KL" in text
    assert "a function of your own. (default: dppo)" in text


def test_tools_take_positional_arguments():
    view = parse(ViewSettings, ["outputs/run", "-o", "page.html", "--tokenizer", "t"], prog="p").config
    assert view == ViewSettings(path=Path("outputs/run"), output=Path("page.html"), tokenizer="t")
    assert parse(LedgerSettings, ["outputs/run", "--json"], prog="p").config.as_json is True


def test_verify_keeps_the_environment_of_the_demo_beside_other_keys():
    flags = ["--orchestrator.sampling.temperature", "0.7"]
    own = parse(VerifyConfig, flags, prog="p").config.orchestrator
    assert ([env.id for env in own.env], own.sampling.temperature) == (["reverse-text"], 0.7)


def test_a_missing_positional_argument_is_named():
    assert problems(LedgerSettings) == [
        "the following arguments are required: RUN; see `pellucid test --help`"
    ]


# One file for all parts of a run


def test_a_part_reads_its_own_sections_of_the_runs_file(toml):
    path = toml(
        'max_async_level = 2\n[model]\nname = "m"\n[trainer.optim]\nlr = 0.5\n[inference]\nport = 9\n'
        '[[orchestrator.env]]\nid = "reverse-text"\n'
    )
    assert parse(TrainerRunConfig, ["@", path], prog="pellucid trainer").config.trainer.optim.lr == 0.5
    assert parse(InferenceRunConfig, ["@", path], prog="pellucid inference").config.inference.port == 9
    keys = [line.split(":")[0].split(" ")[0] for line in problems(SFTConfig, "@", path, "--data.path", "d")]
    assert sorted(keys) == ["inference", "max_async_level", "orchestrator"]


def test_a_part_still_refuses_what_no_part_knows(toml):
    path = toml('[model]\nname = "m"\n[inferense]\nport = 9\n')
    (line,) = problems(TrainerRunConfig, "@", path)
    assert line.startswith("inferense")


# Settings that do not work together


def rl_problems(*flags: str) -> list[str]:
    return problems(RLConfig, *NAMED, "--orchestrator.env", '[{"id": "a"}]', *flags)


def test_what_is_sampled_ahead_has_to_be_fresh_enough():
    (line,) = rl_problems("--max-async-level", "3", "--orchestrator.max-off-policy-steps", "2")
    assert line == (
        "orchestrator.max_off_policy_steps = 2 is below max_async_level = 3: what is sampled that far ahead "
        "would be dropped as stale; raise the former or lower the latter"
    )


def test_weights_are_kept_while_they_may_be_loaded():
    (line,) = rl_problems("--max-async-level", "4")
    assert line == (
        "trainer.keep_weights = 4 has to exceed max_async_level = 4: weights could be deleted while the "
        "server loads them; raise the former or lower the latter"
    )


def test_a_group_of_one_has_no_advantage_to_train_on():
    (line,) = rl_problems("--orchestrator.rollouts-per-example", "1")
    assert "orchestrator.rollouts_per_example = 1 with orchestrator.advantage.type = 'default'" in line
    assert "orchestrator.filter_zero_advantages = true" in line
    assert line.endswith("raise rollouts_per_example, or use an advantage of your own")
    one = [*NAMED, "--orchestrator.env", '[{"id": "a"}]', "--orchestrator.rollouts-per-example", "1"]
    kept = parse(RLConfig, [*one, "--no-orchestrator.filter-zero-advantages"], prog="p").config
    assert kept.orchestrator.rollouts_per_example == 1


# Evaluations


def test_the_defaults_of_an_evaluation(toml):
    path = toml('[model]\nname = "m"\n[[orchestrator.env]]\nid = "a"\n[[orchestrator.eval]]\nid = "a"\n')
    config = parse(RLConfig, ["@", path], prog="p").config.orchestrator
    assert config.eval == (
        EvalConfig(
            id="a",
            interval=50,
            at_start=True,
            num_examples=64,
            temperature=0.0,
            rollouts_per_example=1,
            max_tokens=None,
            pass_reward=1.0,
        ),
    )
    assert config.eval[0].label == config.env[0].label == "a", "an environment may train and be measured"


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        (
            '[{"id": "a"}, {"id": "b", "rollouts_per_example": 8}]',
            "orchestrator.eval[1].rollouts_per_example = 8: with temperature = 0 all attempts are the same; "
            "set a temperature, or 1 attempt",
        ),
        (
            '[{"id": "a"}, {"id": "b", "name": "a"}]',
            "orchestrator.eval has two entries named 'a'; give each its own `name`",
        ),
        (
            '[{"id": "a", "name": "all"}]',
            "orchestrator.eval[0].name = 'all': is reserved for metrics over all environments; choose "
            "another name",
        ),
        (
            '[{"id": "a", "interval": 0}]',
            "orchestrator.eval[0].interval = 0: should be greater than or equal to 1",
        ),
        (
            '[{"id": "a", "weight": 2}]',
            "orchestrator.eval[0].weight = 2: unknown key; did you mean orchestrator.env[0].weight?",
        ),
    ],
)
def test_what_an_evaluation_cannot_be(entries, line):
    assert rl_problems("--orchestrator.eval", entries) == [line]


def test_a_sampled_evaluation_may_attempt_an_example_several_times():
    entry = {"id": "a", "rollouts_per_example": 8, "temperature": 0.6}
    assert EvalConfig.model_validate(entry).rollouts_per_example == 8


def test_a_part_takes_the_keys_of_its_own_section_without_their_prefix() -> None:
    model = ["--model.name", "m"]
    short = parse(InferenceRunConfig, [*model, "--backend", "vllm", "--port=8001"], prog="pellucid inference")
    long = parse(
        InferenceRunConfig,
        [*model, "--inference.backend", "vllm", "--inference.port=8001"],
        prog="pellucid inference",
    )
    assert short.config == long.config
    assert (short.config.inference.backend, short.config.inference.port) == ("vllm", 8001)
    trainer = parse(
        TrainerRunConfig, [*model, "--optim.lr=0.5", "--no-share-prompts"], prog="pellucid trainer"
    )
    assert (trainer.config.trainer.optim.lr, trainer.config.trainer.share_prompts) == (0.5, False)


def test_a_key_of_the_run_is_not_taken_for_one_of_the_part() -> None:
    """`model` is a section of the run and of the trainer; a whole run has no part of its own."""
    parsed = parse(TrainerRunConfig, ["--model.name", "m"], prog="pellucid trainer")
    assert parsed.config.model.name == "m"
    with pytest.raises(ConfigError, match="--backend: unknown flag; did you mean --inference.backend"):
        parse(RLConfig, ["--backend", "vllm"], prog="pellucid rl")
