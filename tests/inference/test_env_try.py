"""`pellucid env try --server`: the tokenizer has to be that of the server."""

import json

from engine_server import KEY
from pellucid.cli import main
from pellucid.data.tokenizer import byte_tokenizer


def test_a_server_replies(serving, tiny_model, tmp_path, capsys):
    argv = ["env", "try", "reverse-text", "-n", "1", "--max-tokens", "5", "--json"]
    with serving() as (url, _):
        assert main([*argv, "--server", url, "--model", str(tiny_model)]) == 0
        [rollout] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert rollout["turns"][0]["num_tokens"] == 5 and rollout["error"] is None

        (tmp_path / "key").write_text(KEY)
        keyed = [*argv, "--server", url, "--model", str(tiny_model), "--key-file"]
        assert main([*keyed, str(tmp_path / "key")]) == 0
        assert main([*keyed, str(tmp_path / "none")]) == 2
        assert "--key-file: " in capsys.readouterr().err

        byte_tokenizer().save_pretrained(tmp_path / "other")
        assert main([*argv, "--server", url, "--model", str(tmp_path / "other")]) == 2
        assert "has another vocabulary than 'models/tiny'" in capsys.readouterr().err

        assert main([*argv, "--server", url]) == 1  # a folder of the server's machine
        assert "name it with --model" in capsys.readouterr().err


def test_a_server_beyond_this_machine_needs_its_key(serving, tiny_model, capsys):
    with serving(host="0.0.0.0") as (url, _):
        assert main(["env", "try", "reverse-text", "--server", url, "--model", str(tiny_model)]) == 2
        assert f"{url} needs its key; name `key` of its run folder with --key-file" in capsys.readouterr().err
