"""`pellucid verify --only model`: families pass as docs/models.md says, and planted faults are named."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from pellucid.checks.verify import run_verify
from pellucid.checks.verify.model import check_model, load_both
from pellucid.checks.verify.shrink import model_to_verify
from pellucid.config import VerifyConfig
from pellucid.config.parse import parse
from pellucid.data.tokenizer import quiet_transformers
from pellucid.errors import ModelError
from pellucid.model import head, policy

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import families


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    quiet_transformers()


@pytest.mark.parametrize("name", families.LISTED)
def test_a_family_is_computed_right_and_does_what_its_row_says(name, tmp_path) -> None:
    outcome = families.examine(name, tmp_path)
    assert outcome.trains in ("packed", "rows"), outcome.reason
    assert outcome.samples == "samples", outcome.reason
    assert outcome.row in families.PAGE.read_text().splitlines()


def test_the_page_lists_these_families_and_no_others() -> None:
    found = re.findall(r"^\| (\w+) \| (?:packed|rows) \|", families.PAGE.read_text(), re.MULTILINE)
    assert found == list(families.LISTED)


def loaded(name, folder):
    families.make(name).save_pretrained(folder)
    return load_both(str(folder), families.CONTEXT)


def failed(trained, reference) -> list[str]:
    return [finding.what for finding in check_model(trained, reference) if not finding.passed]


def test_a_window_that_is_one_token_too_long(tmp_path) -> None:
    trained, reference = loaded("mistral", tmp_path)
    trained.windows = {layer: window + 1 for layer, window in trained.windows.items()}
    found = failed(trained, reference)
    assert [what.partition(",")[0] for what in found] == [
        "logprobs packed",
        "gradient packed",
        "logprobs packed",
        "gradient packed",
        "logprobs over 2 ranks of context parallelism",
        "gradient over 2 ranks of context parallelism",
    ]


def warmer(hidden, weight, bias, token_ids, temperatures, *others, **options):
    """Predicts as the trainer's head does, with temperatures that are off by a thousandth."""
    return head.predict(hidden, weight, bias, token_ids, 1.001 * temperatures, *others, **options)


def test_a_head_of_the_trainers_own(tmp_path, monkeypatch) -> None:
    trained, reference = loaded("lfm2", tmp_path)
    monkeypatch.setattr(policy, "predict", warmer)
    found = failed(trained, reference)
    assert "logprobs in rows, against transformers: largest difference" in found
    assert "logprobs of sampled tokens, engine against trainer: largest difference" in found


def test_a_model_in_which_a_leak_would_not_show(tmp_path) -> None:
    trained, reference = loaded("llama", tmp_path)
    with torch.no_grad():
        for layer in (*trained.hf.model.layers, *reference.model.layers):
            layer.self_attn.o_proj.weight.zero_()
    (found,) = (finding for finding in check_model(trained, reference) if not finding.passed)
    assert "would go unnoticed" in found.meaning


# A config as users have it: longrope by lists for heads of 96, a window, weights that are quantized.
PHI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [1.0 + index / 8 for index in range(48)],
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 2047,
    "vocab_size": 32064,
    "bos_token_id": 1,
    "eos_token_id": [32000, 32007],
    "quantization_config": {"quant_method": "fp8"},
}


def config_of(path, *flags) -> VerifyConfig:
    return parse(VerifyConfig, ["--model", str(path), *flags], prog="pellucid verify").config


def test_a_config_alone_is_enough(tmp_path, capsys, caplog) -> None:
    caplog.set_level("INFO", logger="pellucid")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PHI))
    config = config_of(path)
    assert (config.only, config.model.name) == ("model", str(path))
    assert run_verify(config) == 0
    assert "8 of 8 findings are within their limits" in capsys.readouterr().out
    said = caplog.messages[0]
    assert said.startswith(f"Phi3ForCausalLM like {path}, as it has no weights: 3 layers as configured, ")
    assert "hidden_size 3072 → 32" in said and "num_key_value_heads 32 → 4" in said
    assert "sliding_window 2047 → 20" in said


def test_a_finding_that_fails_is_exit_code_1(tmp_path, monkeypatch, capsys) -> None:
    families.make("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(policy, "predict", warmer)
    assert run_verify(config_of(tmp_path, "--json")) == 1
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["check"] == "model" and not first["passed"] and "another model than" in first["meaning"]


def test_weights_are_used_where_they_are_few(tmp_path, monkeypatch) -> None:
    families.make("llama").save_pretrained(tmp_path / "given")
    name, said = model_to_verify(str(tmp_path / "given"), tmp_path)
    assert name == str(tmp_path / "given") and "with its own weights" in said
    monkeypatch.setattr("pellucid.checks.verify.shrink.MAX_PARAMETERS", 1000)
    name, said = model_to_verify(str(tmp_path / "given"), tmp_path)
    assert name == str(tmp_path / "small") and "parameters: 4 layers" in said


def test_a_config_that_does_not_fit_itself(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PHI, "hidden_act": "none of them"}))
    with pytest.raises(ModelError, match="cannot make a small model like it .*none of them"):
        model_to_verify(str(tmp_path), tmp_path)
