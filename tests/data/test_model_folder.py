"""A model folder with one thing wrong: refused with the file and the remedy, before anything is loaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pellucid.data.model_folder import check_lengths, check_model_folder, longrope_limits, model_fingerprint
from pellucid.errors import ModelError


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def delete(folder: Path, pattern: str) -> None:
    for path in list(folder.glob(pattern)):
        path.unlink()


def split(folder: Path) -> None:
    """As if one of two files were still to be downloaded."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (
            lambda folder: delete(folder, "config.json"),
            "model.name = '.*/model': no config.json .*; give one",
        ),
        (lambda folder: cut(folder / "config.json"), "config.json is damaged: not JSON .*; copy or download"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is damaged: not a JSON obj"),
        (
            lambda folder: delete(folder, "*.safetensors"),
            r"no weights in this folder \(\*.safetensors\); add",
        ),
        (
            lambda folder: cut(folder / "model.safetensors"),
            "model.safetensors is damaged or cut short .*copy",
        ),
        (
            split,
            "model-2.safetensors is missing, but model.safetensors.index.json lists it; copy or download",
        ),
        (lambda folder: delete(folder, "tokenizer*"), "no tokenizer in this folder .*; save the model's tok"),
        (lambda folder: cut(folder / "tokenizer.json"), "tokenizer.json is damaged .*; copy or download"),
        (
            lambda folder: edit(folder / "config.json", vocab_size=100),
            "the tokenizer has 101 tokens, the model only 100; use the tokenizer the model was trained with",
        ),
        (lambda folder: delete(folder, "chat_template.jinja"), "no chat template; use a model .* or add a"),
    ],
)
def test_one_thing_wrong(folder: Path, harm: Callable[[Path], object], complaint: str) -> None:
    check_model_folder(str(folder), chats=True)
    harm(folder)
    with pytest.raises(ModelError, match=complaint):
        check_model_folder(str(folder), chats=True)


def test_a_template_is_needed_for_chats_only_and_may_stand_in_the_config(folder: Path) -> None:
    delete(folder, "chat_template.jinja")
    check_model_folder(str(folder), chats=False)
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    check_model_folder(str(folder), chats=True)


def test_a_larger_vocabulary_is_padding(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=128)
    check_model_folder(str(folder), chats=True)


def test_a_name_beside_a_folder_that_is_there_means_a_folder(tmp_path, monkeypatch) -> None:
    """`outputs/modle` could be on a hub, but where there is a folder `outputs` it is a slip."""
    monkeypatch.chdir(tmp_path)
    check_model_folder("outputs/modle", chats=True)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(ModelError, match="model.name = 'outputs/modle': no such folder"):
        check_model_folder("outputs/modle", chats=True)


def test_a_hub_name_is_left_to_whoever_loads_it_and_a_path_is_not() -> None:
    check_model_folder("some/model", chats=True)
    with pytest.raises(
        ModelError, match="model.name = './some/model': no such folder; give a local model fol"
    ):
        check_model_folder("./some/model", chats=True)


def test_an_adapter_is_no_whole_model(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a LoRA adapter, not a whole model; merge it into its model"):
        check_model_folder(str(tmp_path), chats=False)


def test_it_does_without_torch() -> None:
    program = "import sys, pellucid.data.model_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_fingerprint_tells_weights_and_not_how_they_are_stored(folder: Path, tmp_path: Path) -> None:
    [path] = folder.glob("*.safetensors")
    first = model_fingerprint(str(folder))
    assert len(bytes.fromhex(first)) == 8
    tensors = load_file(path)
    names = sorted(tensors)
    path.unlink()
    save_file({name: tensors[name] for name in names[:3]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, folder / "b.safetensors", {"format": "pt"})
    assert model_fingerprint(str(folder)) == first
    changed = {name: tensors[name] for name in names[3:]}
    changed[names[-1]] = changed[names[-1]] * 1.001
    save_file(changed, folder / "b.safetensors")
    assert model_fingerprint(str(folder)) != first


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/folder", "nothing"])
def test_a_model_that_is_not_here_has_no_fingerprint(name: str) -> None:
    assert model_fingerprint(name) == ""


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 4096,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = {"head_dim": 8, "max_position_embeddings": 16384}
BY_LAYER_TYPE = {"full_attention": LONGROPE, "sliding_attention": PLAIN_ROPE}


def beyond(length: int | None) -> dict[str, Any]:
    return {**LONGROPE, "original_max_position_embeddings": length}


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"model_type": "llama", **TEXT, "rope_parameters": LONGROPE}, {4096}),
        ({"model_type": "gemma3_text", **TEXT, "rope_parameters": BY_LAYER_TYPE}, {4096}),
        (
            {
                "model_type": "gemma3_text",
                **TEXT,
                "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": beyond(2048)},
            },
            {2048, 4096},
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", **TEXT, "rope_parameters": BY_LAYER_TYPE},
            },
            {4096},
        ),
        # Beside the rotary settings, as in files of Phi-3.
        (
            {
                "model_type": "phi3",
                **TEXT,
                "original_max_position_embeddings": 1024,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                "hidden_size": 32,
                "num_attention_heads": 4,
                "pad_token_id": 0,
            },
            {1024},
        ),
        ({"model_type": "llama", **TEXT, "rope_parameters": PLAIN_ROPE}, set()),
        ({"model_type": "gpt2"}, set()),
        ({"model_type": "none of them"}, set()),
        ({"model_type": "llama", **TEXT, "rope_parameters": beyond(None)}, set()),
    ],
    ids=["flat", "by layer type", "two limits", "text config", "phi3", "plain", "none", "unknown", "null"],
)
def test_the_limits_of_longrope_are_found_wherever_they_stand(tmp_path, config, limits) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longrope_limits(str(tmp_path)) == limits


def test_trainer_and_server_choose_the_same_factors_of_longrope(tmp_path) -> None:
    config = {"model_type": "gemma3_text", **TEXT, "rope_parameters": BY_LAYER_TYPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_lengths(str(tmp_path), trained=4096, served=2048)
    check_lengths(str(tmp_path), trained=8192, served=5000)
    with pytest.raises(
        ModelError, match="seq_len = 8192 and inference.max_model_len = 4096 lie on both sides of 4096"
    ):
        check_lengths(str(tmp_path), trained=8192, served=4096)


def test_a_hub_name_has_the_factors_of_its_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--long"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    config = {"model_type": "llama", **TEXT, "rope_parameters": LONGROPE}
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="seq_len = 4096 .*model.name = 'somebody/long' has other rotary"):
        check_lengths("somebody/long", trained=4096, served=4097)
    check_lengths("somebody/else", trained=4096, served=4097)  # nobody can tell, nor load it
