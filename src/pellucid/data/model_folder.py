"""Checks the files of a model folder, in milliseconds and without torch.

A run is refused by these checks before anything is made, deleted or started. Of a hub name, only the rotary
positions are checked, where they matter; trainer and engine check the model again when they load it.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from pellucid.data.files import read_whole, require_file
from pellucid.data.tokenizer import (
    check_vocabulary,
    first_line,
    no_chat_template,
    quiet_transformers,
    require_folder,
)
from pellucid.errors import DataError, ModelError


def check_model_folder(name: str, *, chats: bool, routes: bool = False) -> None:
    """Raises ModelError if a model folder is incomplete or damaged.

    `chats` demands a chat template, with which conversations are rendered. `routes` demands experts, which
    router replay needs.
    """
    require_folder(name)
    folder = Path(name)
    if not folder.is_dir():
        return  # a hub name
    config = _read_config(name)
    if routes and not (config.get("num_experts") or config.get("num_local_experts")):
        raise ModelError(
            f"trainer.enable_router_replay = true, but model.name = {name!r} has no experts in its "
            "config.json; leave it out, or choose a model with experts"
        )
    _check_weights(name)
    _check_tokenizer(name, config.get("vocab_size"))
    if chats and not _has_chat_template(folder):
        raise ModelError(no_chat_template(name))


def check_lengths(name: str, *, trained: int, served: int) -> None:
    """Raises ModelError if the longest sequences of trainer and server, in tokens, choose different factors
    of `longrope`: logprobs of one and the same token would differ."""
    if trained != served and (limit := parting_limit(longrope_limits(name), trained, served)):
        raise ModelError(
            f"trainer.model.seq_len = {trained} and inference.max_model_len = {served} lie on both sides of "
            f"{limit} tokens, up to which model.name = {name!r} has other rotary positions (longrope); "
            "set both to one number, which seq_len does"
        )


def longrope_limits(name: str) -> frozenset[int]:
    """Returns the lengths, in tokens, above which layers of a model have the long factors of `longrope`.

    `name` is a folder or a hub name, whose config.json is fetched. Of a model whose config cannot be read
    there are none: whoever loads the model says why.
    """
    from transformers import AutoConfig  # takes a second

    quiet_transformers()
    try:
        require_folder(name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
        parameters = getattr(config, "rope_parameters", None) or {}
        by_layer_type = (each for each in parameters.values() if isinstance(each, dict))
        return frozenset(
            int(rope["original_max_position_embeddings"])
            for rope in (parameters, *by_layer_type)
            if rope.get("rope_type") == "longrope"
        )
    except Exception:  # of all kinds: OSError, ValueError, of strict dataclasses as well
        return frozenset()


def parting_limit(limits: Collection[int], one: int, other: int) -> int | None:
    """Returns the smallest of `limits` that one length exceeds and the other does not; None: there is none.

    `parting_limit({4096}, 4096, 4097) == 4096`
    """
    return min((each for each in limits if (one > each) != (other > each)), default=None)


def everywhere(name: str) -> str:
    """Makes the name of a folder absolute, so that it holds for a process in another folder."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


_BLOCK_BYTES = 64
_BLOCKS_PER_TENSOR = 4


def model_fingerprint(name: str) -> str:
    """Hashes the weights: equal for equal weights, however they are spread over files; "" if there are none.

    The hash covers name, dtype and shape of every tensor, and a few bytes at its start, in its middle and at
    its end. Training changes all of them, and a few bytes keep it quick. A hub name is looked up in the local
    cache alone.
    """
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    digests = sorted(digest for file in files for digest in _tensor_digests(file))
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16] if digests else ""


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # takes a second, so only for hub names

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:
        return None  # no hub name either
    return Path(config).parent if isinstance(config, str) else None


def _tensor_digests(path: Path) -> list[bytes]:
    check_safetensors(path)
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header = orjson.loads(file.read(num_header_bytes))
        header.pop("__metadata__", None)
        digests = []
        for tensor, about in header.items():
            start, stop = (8 + num_header_bytes + offset for offset in about["data_offsets"])
            digest = hashlib.sha256(orjson.dumps([tensor, about["dtype"], about["shape"]]))
            last = max(stop - _BLOCK_BYTES, start)
            for block in range(_BLOCKS_PER_TENSOR):
                position = start + (last - start) * block // (_BLOCKS_PER_TENSOR - 1)
                file.seek(position)
                digest.update(file.read(min(_BLOCK_BYTES, stop - position)))
            digests.append(digest.digest())
        return digests


def _read_config(name: str) -> dict[str, Any]:
    path = Path(name) / "config.json"
    if not path.exists() and path.with_name("adapter_config.json").exists():
        raise ModelError(
            f"model.name = {name!r}: this folder holds a LoRA adapter, not a whole model; merge it into its "
            "model first (`merge_and_unload` of PEFT; docs/adapters.md shows how)"
        )
    if not path.exists():
        raise ModelError(
            f"model.name = {name!r}: no config.json in this folder; give one that `save_pretrained` wrote, "
            "with config.json, weights and tokenizer"
        )
    return _read_json(path)


def _check_weights(name: str) -> None:
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("*.bin")):
        raise ModelError(f"model.name = {name!r}: no weights in this folder (*.safetensors); add them")
    index = folder / "model.safetensors.index.json"
    listed = _read_json(index).get("weight_map", {}).values() if index.exists() else ()
    if missing := sorted(set(listed) - {path.name for path in files}):
        raise ModelError(f"{folder / missing[0]} is missing, but {index.name} lists it; copy or download it")
    for path in files:
        try:
            check_safetensors(path)
        except ModelError as error:
            raise ModelError(f"{error}; copy or download it again") from error


def check_safetensors(path: Path) -> None:
    """Raises ModelError unless the file is a whole safetensors file; reads no values."""
    try:
        require_file(path)
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError, DataError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error})") from error


def _check_tokenizer(name: str, vocab_size: int | None) -> None:
    """Raises ModelError if the tokenizer is missing; checks its content only if it is a `tokenizer.json`."""
    folder = Path(name)
    path = folder / "tokenizer.json"
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        raise ModelError(
            f"model.name = {name!r}: no tokenizer in this folder (such as tokenizer.json); save the "
            "model's tokenizer there, too"
        )
    if path.exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no class of its own
            raise ModelError(f"{path} is damaged ({first_line(error)}); copy or download it again") from error
        if vocab_size is not None:
            check_vocabulary(name, num_tokens=tokenizer.get_vocab_size(), vocab_size=vocab_size)


def _has_chat_template(folder: Path) -> bool:
    if any(folder.glob("*chat_template*")):
        return True
    path = folder / "tokenizer_config.json"
    return path.exists() and _read_json(path).get("chat_template") is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = orjson.loads(read_whole(path))
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path} is damaged: not JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: not a JSON object; copy or download it again")
    return content
