"""SftRows of files, folders and the hub, and what is said when they cannot be read."""

import json
import sys

import datasets
import pytest

from pellucid.config import DataConfig
from pellucid.errors import ConfigError, DataError
from pellucid.trainer.sft import open_rows

WORDS = ["abc", "hello", "xyz"]
TEST_WORDS = ["no", "on"]


@pytest.fixture(autouse=True)
def quiet_datasets(monkeypatch, tmp_path):
    """Its cache below the test's own folder, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def examples(words):
    return [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in words
    ]


def rows(**settings):
    return list(open_rows(DataConfig(**settings)))


def words(found):
    return [row.record["messages"][0]["content"] for row in found]


def jsonl(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_has_its_line_numbers_and_no_nulls(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "messages": null}\n\n{"prompt": "b"}')
    found = rows(path=path)
    assert [(row.where, row.example_id, row.record) for row in found] == [
        (f"{path}:1", "1", {"prompt": "a"}),
        (f"{path}:3", "3", {"prompt": "b"}),
    ]
    assert len(open_rows(DataConfig(path=path))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [("{oops", r"data.jsonl:2: not JSON: "), ("[1]", r"data.jsonl:2: expected an object, got list")],
)
def test_bad_lines_are_named(tmp_path, line, message) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{}\n" + line)
    with pytest.raises(DataError, match=message):
        rows(path=path)


def test_missing_and_empty_files(tmp_path) -> None:
    with pytest.raises(DataError, match="data.path = .*none.jsonl' cannot be read: No such file"):
        rows(path=tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="data.path = .* holds no examples"):
        rows(path=jsonl(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize("key", ["split", "subset"])
def test_a_file_has_no_splits(tmp_path, key) -> None:
    path = jsonl(tmp_path / "data.jsonl", examples(WORDS))
    with pytest.raises(ConfigError, match=f"data.{key} = 'test' has no meaning for a file"):
        rows(path=path, **{key: "test"})


def saved_splits(folder):
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(examples(WORDS)),
        test=datasets.Dataset.from_list(examples(TEST_WORDS)),
    ).save_to_disk(folder)


def parquet(folder):
    folder.mkdir()
    datasets.Dataset.from_list(examples(WORDS)).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(examples(TEST_WORDS)).to_parquet(folder / "test.parquet")


def jsonl_folder(folder):
    jsonl(folder / "train.jsonl", examples(WORDS))
    jsonl(folder / "test.jsonl", examples(TEST_WORDS))


@pytest.mark.parametrize("write", [saved_splits, parquet, jsonl_folder])
def test_a_folder_has_splits(tmp_path, write) -> None:
    folder = tmp_path / "chats"
    write(folder)
    found = rows(path=folder)
    assert words(found) == WORDS
    assert [(row.where, row.example_id) for row in found] == [
        (f"{folder}[train] row {index}", str(index)) for index in range(3)
    ]
    assert words(rows(path=folder, split="test")) == TEST_WORDS
    with pytest.raises((ConfigError, DataError), match="data.split|data.path.*validation.*check data.subset"):
        rows(path=folder, split="validation")


def test_one_data_set_that_was_saved_alone_needs_no_split(tmp_path) -> None:
    datasets.Dataset.from_list(examples(WORDS)).save_to_disk(tmp_path / "plain")
    datasets.Dataset.from_list(examples(WORDS), split="validation").save_to_disk(tmp_path / "named")
    assert words(rows(path=tmp_path / "plain")) == WORDS
    found = rows(path=tmp_path / "named")
    assert (words(found), found[0].where) == (WORDS, f"{tmp_path / 'named'}[validation] row 0")
    with pytest.raises(ConfigError, match="data.split = 'train' is not in .*named; it has 'validation'"):
        rows(path=tmp_path / "named", split="train")
    with pytest.raises(ConfigError, match="data.subset = 'de': .* has no subsets; leave it out"):
        rows(path=tmp_path / "plain", subset="de")


def test_a_subset_is_chosen_by_name(tmp_path) -> None:
    folder = tmp_path / "chats"
    for language, chosen in (("de", WORDS), ("en", TEST_WORDS)):
        folder.mkdir(exist_ok=True)
        jsonl(folder / language / "train.jsonl", examples(chosen))
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: de\n  data_files: de/train.jsonl\n"
        "- config_name: en\n  data_files: en/train.jsonl\n---\n"
    )
    assert words(rows(path=folder, subset="en")) == TEST_WORDS
    with pytest.raises(DataError, match=r"could not be loaded \(.*'fr'.*\); check data.subset, data.split"):
        rows(path=folder, subset="fr")


def test_a_folder_that_is_no_data_set(tmp_path) -> None:
    with pytest.raises(DataError, match=r"data.path = .* could not be loaded \(.*any data files"):
        rows(path=tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"messages": [}\n')
    with pytest.raises(DataError, match=r"broken' could not be loaded \((?!An error occurred)"):
        rows(path=tmp_path / "broken")


def test_without_the_hub_the_error_says_what_to_do() -> None:
    with pytest.raises(DataError) as caught:
        rows(name="user/chats")
    message = str(caught.value)
    assert message.startswith("data.name = 'user/chats' could not be loaded (")
    assert message.endswith(
        "without the hub, download it elsewhere, write it with save_to_disk, and set data.path to that folder"
    )


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"data.name = 'n' needs the package datasets.*'pellucid\[datasets\]'"
    ):
        rows(name="n")
    assert words(rows(path=jsonl(tmp_path / "data.jsonl", examples(WORDS)))) == WORDS
