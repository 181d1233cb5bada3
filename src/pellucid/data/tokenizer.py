"""Loading a tokenizer, with errors that say what to do. No torch, and no remote code unless told so."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pellucid.errors import ModelError

_REPLY = "pellucid"  # stands for a reply in what the template renders


CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """One token per byte, so that any text comes back as it was; ChatML markers are special tokens."""
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
    """The tokenizer of a hub name or local folder. `trust_remote_code`: run Python code that it brings."""
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
    """In a folder that holds none of them, transformers makes up an empty tokenizer without a word."""
    if Path(name).is_dir() and files and not any((Path(name) / file).exists() for file in files):
        raise ModelError(
            f"model.name = {name!r}: no tokenizer in this folder (none of {', '.join(sorted(files))}); "
            "save the model's tokenizer there, too"
        )


def require_folder(name: str) -> None:
    """A name that must mean a folder has to exist; asking a hub for it would take half a minute to fail.

    `outputs/modle` is as good a hub name as any, but not beside a folder `outputs`.
    """
    folder, parts = Path(name), name.count("/")
    is_path = name.startswith(("/", ".", "~")) or parts > 1 or (parts == 1 and folder.parent.is_dir())
    if is_path and not folder.is_dir():
        raise ModelError(f"model.name = {name!r}: no such folder; give a local model folder or a hub name")


def check_vocabulary(name: str, *, num_tokens: int, vocab_size: int) -> None:
    """A token id outside the model's vocabulary would fail deep inside the forward pass."""
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
    """Its advice and progress bars are for notebooks, not for the log of a run."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Tokens after which a completion is over: the tokenizer's own, and what closes a reply in its template.

    A base model's tokenizer may end texts with `<|endoftext|>` but turns, by its template, with `<|im_end|>`.
    """
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return list(dict.fromkeys([*own, *_closes_a_reply(tokenizer)]))


def _closes_a_reply(tokenizer: Any) -> list[int]:
    """The special token that the chat template puts right after a reply, if it does."""
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
    """What a library says, in one line; two where the first only announces the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
