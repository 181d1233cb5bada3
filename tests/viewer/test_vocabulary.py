"""Token texts: no character lost, no id unknown."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pellucid.data.tokenizer import load_tokenizer
from pellucid.viewer.vocabulary import Vocabulary


def test_special_tokens_and_white_space_are_kept(tokenizer_folder: Path) -> None:
    vocabulary = Vocabulary(load_tokenizer(str(tokenizer_folder)))
    assert [vocabulary.text(token_id) for token_id in (2, 5, 6)] == ["<|im_end|>", "\n", " two"]
    assert vocabulary.seen() == {"ids": [2, 5, 6], "texts": ["<|im_end|>", "\n", " two"], "special": [2]}


def test_an_id_without_text_is_shown_as_the_id(tokenizer_folder: Path) -> None:
    assert Vocabulary(load_tokenizer(str(tokenizer_folder))).text(123_456) == "#123456"
    assert Vocabulary().text(7) == "#7"


def test_part_of_a_character_falls_back_to_the_piece() -> None:
    tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1, "Ġa": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [vocabulary.text(token_id) for token_id in (0, 1, 2)] == ["Ã", "©", " a"]


def test_a_leading_space_survives_a_decoder_that_strips_it() -> None:
    tokenizer = Tokenizer(models.BPE({"▁two": 0, "two": 1, "▁": 2}, []))
    tokenizer.decoder = decoders.Metaspace()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [vocabulary.text(token_id) for token_id in (0, 1, 2)] == [" two", "two", " "]
