"""A character-level tokenizer with a ChatML template, made on the spot."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<unk>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = SPECIALS.index("<|im_end|>")


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    letters = "\n " + string.digits + string.ascii_letters + string.punctuation
    vocab = {piece: index for index, piece in enumerate((*SPECIALS, *letters))}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
