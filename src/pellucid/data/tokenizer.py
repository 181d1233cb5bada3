"""Loads tokenizers, with errors that say what to do. No torch, and no remote code unless it is trusted."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pellucid.errors import ModelError

_REPLY = "pellucid"  # stands for a reply in the rendered template


CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Makes a tokenizer with one token per byte, which restores any text; ChatML markers are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = CHATML
    return fast


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a hub name or folder; runs its Python code only with `trust_remote_code`."""
    from transformers import AutoTokenizer

    quiet_transformers()
    require_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name = {name!r}: no tokenizer could be loaded ({first_line(error)}); "
            "give a local folder with tokenizer files or a hub name that this machine can reach"
        ) from error
    _require_vocabulary(name, tokenizer.vocab_files_names.values())
    return tokenizer


def _require_vocabulary(name: str, files: Collection[str]) -> None:
    """Raises ModelError if a folder has none of `files`: transformers silently makes an empty tokenizer."""
    if Path(name).is_dir() and files and not any((Path(name) / file).exists() for file in files):
        raise ModelError(
            f"model.name = {name!r}: no tokenizer in this folder (none of {', '.join(sorted(files))}); "
            "save the model's tokenizer there, too"
        )


def require_folder(name: str) -> None:
    """Raises ModelError if a name can only mean a missing folder: asking a hub takes half a minute to fail.

    `outputs/modle` could be a hub name, but not if there is a folder `outputs`.
    """
    folder, parts = Path(name), name.count("/")
    is_path = name.startswith(("/", ".", "~")) or parts > 1 or (parts == 1 and folder.parent.is_dir())
    if is_path and not folder.is_dir():
        raise ModelError(f"model.name = {name!r}: no such folder; give a local model folder or a hub name")


def check_vocabulary(name: str, *, num_tokens: int, vocab_size: int) -> None:
    """Raises ModelError if token ids exceed the model's vocabulary: they fail deep in the forward pass."""
    if num_tokens > vocab_size:
        raise ModelError(
            f"model.name = {name!r}: the tokenizer has {num_tokens} tokens, the model only {vocab_size}; "
            "use the tokenizer the model was trained with"
        )


def no_chat_template(name: str) -> str:
    return (
        f"model.name = {name!r}: its tokenizer has no chat template; use a model that was made for chat, or "
        "add a chat_template.jinja to its folder"
    )


def quiet_transformers() -> None:
    """Turns off advice and progress bars of transformers, which do not belong in the log of a run."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Lists tokens that end a completion: the tokenizer's own, and the one that ends a reply in its template.

    A base model's tokenizer may end texts with `<|endoftext|>` but turns, by its template, with `<|im_end|>`.
    """
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return list(dict.fromkeys([*own, *_closes_a_reply(tokenizer)]))


def _closes_a_reply(tokenizer: Any) -> list[int]:
    """Finds the special token that the chat template puts right after a reply, if it does."""
    if tokenizer.chat_template is None:
        return []
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _REPLY}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except TemplateError:  # it wants a conversation of another form
        return []
    _, found, after = text.rpartition(_REPLY)
    first = tokenizer.encode(after, add_special_tokens=False)[:1] if found else []
    return [token for token in first if token in tokenizer.added_tokens_decoder]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, with the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


def fingerprint(tokenizer: Any) -> str:
    """Hashes a vocabulary, special tokens included: equal exactly if every id is the same token."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}:{len(token)}:{token}".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
