"""What cannot be loaded, or would be made up without a word, is refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ModelError
from pellucid.model import load_policy
from pellucid.model.load import vocab_size

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_weight_that_is_missing_is_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"do not fit its config.json: {NORM} is missing; use the files of"):
        load_policy(ModelConfig(name=str(folder)))


def test_weights_of_another_shape_are_not_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError) as refused:
        load_policy(ModelConfig(name=str(folder)))
    assert "model.layers.0.mlp.down_proj.weight has shape [32, 96] instead of [32, 64]" in str(refused.value)
    assert "and others; use the files of one and the same model" in str(refused.value)


def test_a_torn_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"could not be loaded \(.*not fully covered\); check that it holds"):
        load_policy(ModelConfig(name=str(folder)))


def test_a_config_that_contradicts_itself_is_explained(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"could not be loaded \(.*num_hidden_layers.* \(3\) must be equal"):
        load_policy(ModelConfig(name=str(folder)))


def test_a_folder_without_a_tokenizer_gets_no_empty_one(folder: Path) -> None:
    for path in list(folder.glob("tokenizer*")):
        path.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer in this folder \(none of .*tokenizer.json.*\); save"):
        load_tokenizer(str(folder))


def test_a_config_with_a_value_of_another_type_is_refused_without_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    with pytest.raises(ModelError, match=r"could not be loaded \(.*hidden_size.*\); check that it holds"):
        vocab_size(ModelConfig(name=str(folder)))
