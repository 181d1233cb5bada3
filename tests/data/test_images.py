"""Pictures on their way into prompts: what is decoded, written out and refused."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save
from transformers import AutoConfig, AutoImageProcessor

from pellucid.data import images
from pellucid.data.images import (
    ImagePrompt,
    ImageShape,
    data_url,
    load_image_processor,
    pack_images,
    read_image_shape,
    starts_with,
    unpack_images,
    urls_of,
)
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import DataError, RolloutError
from pellucid.model.tiny import make_tiny_vision_model
from pictures import part, picture_of, pixels, user

SHAPE = ImageShape(token_id=101, patch_size=8, scale_factor=2)
WRITTEN = "<fake_token_around_image><global-img>" + 4 * "<image>" + "<fake_token_around_image>"


@pytest.fixture(scope="module")
def processor(vision_model):
    return load_image_processor(load_tokenizer(str(vision_model)))


@pytest.mark.parametrize("splits", [False, True])
def test_pixels_are_those_of_the_models_own_processor(vision_model, processor, splits) -> None:
    """Three pictures of different sizes, processed together by transformers, normalised there."""
    own = AutoImageProcessor.from_pretrained(str(vision_model), backend="pil")
    parts = [part(pixels(seed, side)) for seed, side in enumerate((32, 50, 20))]
    own.do_image_splitting = processor._processor.do_image_splitting = splits
    own.size = processor._processor.size = {"longest_edge": 64}
    try:
        expected = own([[picture_of(each) for each in parts]], return_tensors="np")["pixel_values"][0]
        prompt = processor.prompt([1, 2], [{"role": "user", "content": parts}])
    finally:
        processor._processor.do_image_splitting = False
        processor._processor.size = {"longest_edge": 32}
        processor._image.cache_clear()
        processor._payload.cache_clear()
    arrays = unpack_images(prompt.mm_tensors)
    scale, shift = (arrays[name][:, None, None] for name in ("scale", "shift"))
    assert arrays["pixels"].shape == expected.shape and len(expected) == (15 if splits else 3)
    # Three roundings of numbers up to 2: a product, a sum, and those of transformers' own order.
    assert np.abs(arrays["pixels"] * scale + shift - expected).max() <= 4 * np.finfo(np.float32).eps
    assert SHAPE.num_tokens(prompt.mm_tensors) == 4 * len(expected)


@pytest.mark.parametrize("family", ["SmolVLM", "Idefics3"])
def test_the_tiles_of_a_wide_picture_are_written_out_as_transformers_does(tmp_path, family) -> None:
    """Two columns in one row, then two rows in one column: each tile is named by its row and its column."""
    from transformers import Idefics3Processor

    make_tiny_vision_model(tmp_path, hidden_size=32, family=family)
    prepared = load_image_processor(tokenizer := load_tokenizer(str(tmp_path)))
    prepared._processor.do_image_splitting, prepared._processor.size = True, {"longest_edge": 64}
    wide, high = pixels(0, 64)[:32], pixels(1, 64)[:, :32]
    messages = user("a", wide, "b", high)
    (given,) = prepared.for_template(messages)
    found = prepared.expand(given["content"], messages)
    own = Idefics3Processor(prepared._processor, tokenizer, image_seq_len=4)
    pictures = [picture_of(part(each)) for each in (wide, high)]
    expected = own(text=[given["content"]], images=[pictures], return_tensors=None)
    assert tokenizer.encode(found, add_special_tokens=False) == list(expected["input_ids"][0])
    assert found.count("<row_1_col_2>") == found.count("<row_2_col_1>") == 1
    tiles = unpack_images(prepared.prompt([1], messages).mm_tensors)["pixels"]
    parts = (wide[:, :32], wide[:, 32:], None, high[:32], high[32:], None)
    for tile, of_picture in zip(tiles, parts, strict=True):  # the last of each is all of it, made smaller
        assert of_picture is None or np.array_equal(tile, of_picture.transpose(2, 0, 1))


def test_each_image_is_written_out_in_its_place(processor) -> None:
    messages = user("a", pixels(0), "b", pixels(1))
    (given,) = processor.for_template(messages)
    assert given == {"role": "user", "content": "a<image>b<image>"}
    assert processor.expand("x" + given["content"], messages) == f"xa{WRITTEN}b{WRITTEN}"
    assert processor.prompt([1], [{"role": "user", "content": "text"}]) == [1]
    assert not isinstance(processor.prompt([1], user("text")), ImagePrompt)


def test_conversations_with_the_same_images_share_their_payload(processor) -> None:
    first, second = (processor.prompt([1], user(pixels(0), text, pixels(1))) for text in "ab")
    assert first.mm_tensors is second.mm_tensors
    assert processor.prompt([1], user(pixels(1), pixels(0))).mm_tensors != first.mm_tensors


def test_many_threads_prepare_images_at_once(processor, monkeypatch) -> None:
    """More images than are kept, each asked for by all threads: every one gets its own."""
    monkeypatch.setattr(processor, "_make", lambda url: (url, {}))
    kept = lru_cache(4)(processor._make)
    monkeypatch.setattr(processor, "_image", kept)

    def written(number: int) -> bool:
        urls = [f"data:{(number + place) % 9}" for place in range(200)]
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url} for url in urls]}]
        return processor.expand(200 * processor.marker, messages) == "".join(urls)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(written, range(64)))


def test_a_message_without_content_is_left_to_the_template(processor) -> None:
    """An assistant's, whose content is null beside its calls."""
    message = {"role": "assistant", "content": None, "tool_calls": []}
    assert processor.for_template([message]) == [message]


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded(processor, monkeypatch) -> None:
    """By Pillow itself, which raises an error of no other kind, or by us, where Pillow would only warn."""
    messages = user(pixels(0), "?")
    for bound, limit in ((1024 // 2 - 1, 1 << 26), (1023, 1023)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", bound)
        monkeypatch.setattr(images, "_MAX_PIXELS", limit)
        processor._image.cache_clear()
        processor._payload.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RolloutError, match="pixels; at most"):
                processor.prompt([1], messages)
    monkeypatch.undo()
    assert processor.prompt([1], messages)


def test_a_black_picture_that_is_not_normalised_is_refused(tmp_path) -> None:
    """transformers takes tiles of zeros for padding and leaves them out."""
    make_tiny_vision_model(tmp_path, hidden_size=32)
    prepared = load_image_processor(load_tokenizer(str(tmp_path)))
    prepared._processor.do_normalize = False
    black, almost = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32, 3), np.uint8)
    almost[-1, -1, -1] = 1
    assert prepared.prompt([1], user(almost)).mm_tensors
    for messages in (user(black), user(almost, black)):
        with pytest.raises(
            RolloutError, match="the image has values that are all exactly 0 in tile 0 .*norm"
        ):
            prepared.prompt([1], messages)
        with pytest.raises(RolloutError, match="the image has values that are all exactly 0"):
            prepared.expand("<image>" * len(urls_of(messages)), messages)


@pytest.mark.parametrize(
    ("mm_tensors", "begins"),
    [
        (lambda a, b: pack_images([a]), True),
        (lambda a, b: pack_images([a, b]), True),
        (lambda a, b: pack_images([b, a]), False),
        (lambda a, b: pack_images([b]), False),
        (lambda a, b: pack_images([a | {"scale": 2 * a["scale"]}, b]), False),
        (lambda a, b: pack_images([a | {"shift": 2 * a["shift"]}, b]), False),
    ],
)
def test_a_payload_starts_with_the_images_before(processor, mm_tensors, begins) -> None:
    one, other = (unpack_images(processor.prompt([1], user(pixels(seed))).mm_tensors) for seed in range(2))
    assert starts_with(mm_tensors(one, other), pack_images([one])) is begins
    assert not starts_with(pack_images([one]), pack_images([one, one]))


def test_markers_in_texts_are_refused(processor) -> None:
    messages = user("what does <image> mean?", pixels(0))
    (given,) = processor.for_template(messages)
    with pytest.raises(RolloutError, match="has 2 times <image> and 1 images; leave the marker out of texts"):
        processor.expand(given["content"], messages)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/dots.png", "nothing is fetched: give data:image/png;base64"),
        ("data:text/plain;base64,aGk=", "nothing is fetched"),
        ("data:image/png;base64,%%%", "cannot be read"),
        (data_url(b"no picture")["image_url"]["url"], "cannot be read: cannot identify image file"),
    ],
)
def test_what_is_no_picture_is_refused(processor, url, message) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    assert urls_of(messages) == [url]
    with pytest.raises(RolloutError, match=message):
        processor.prompt([1], messages)


def payload(**arrays):
    good = {"pixels": np.zeros((1, 3, 32, 32), np.uint8), "scale": np.ones(3, np.float32)}
    return save(good | {"shift": np.ones(3, np.float32)} | arrays)


def with_an_empty_tile():
    """Pixels · scale + shift is 0 in all of the second tile, and in most of the first."""
    pixels = np.full((2, 3, 32, 32), 2, np.uint8)
    pixels[0, 0, 31, 31] = 3
    return payload(pixels=pixels, shift=np.full(3, -2, np.float32))


@pytest.mark.parametrize(
    ("tensors", "num_places", "message"),
    [
        (b"pixels", 4, "is no safetensors payload"),
        (payload(more=np.zeros(1)), 4, "holds more of float64, pixels of uint8"),
        (payload(pixels=np.zeros((1, 32, 32), np.uint8)), 4, r"has pixels of \(1, 32, 32\)"),
        (payload(scale=np.full(3, np.nan, np.float32)), 4, "not finite"),
        (payload(pixels=np.zeros((1, 3, 32, 16), np.uint8)), 4, "tiles of 32 × 16 pixels"),
        (payload(pixels=np.zeros((1, 3, 40, 40), np.uint8)), 4, "whose side is a multiple of 16"),
        (payload(), 3, "holds images of 4 tokens, and 3 tokens of the sequence stand for images"),
        (payload(pixels=np.zeros((2, 3, 32, 32), np.uint8)), 4, "images of 8 tokens, and 4 tokens"),
        (with_an_empty_tile(), 8, "all exactly 0 in tile 1 .*use an image processor that normalises"),
        (payload(), 4, "^$"),
    ],
)
def test_tensors_are_compared_with_the_tokens_in_their_place(tensors, num_places, message) -> None:
    import re

    assert re.search(message, SHAPE.why_not(num_places, tensors))


def test_images_of_one_prompt_have_tiles_of_one_size() -> None:
    images = [unpack_images(payload(pixels=np.zeros((1, 3, side, side), np.uint8))) for side in (32, 16)]
    with pytest.raises(DataError, match="they need one size"):
        pack_images(images)


def test_the_shape_is_read_from_the_config(vision_model, tiny_model) -> None:
    assert ImageShape.of(AutoConfig.from_pretrained(vision_model)) == SHAPE
    assert ImageShape.of(AutoConfig.from_pretrained(tiny_model)) is None
    assert load_image_processor(load_tokenizer(str(tiny_model))) is None


def test_of_a_config_that_cannot_be_read_there_is_no_shape(tmp_path) -> None:
    """Whoever loads the model says what is wrong; see tests/model/test_load.py."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "64"}))
    assert read_image_shape(str(tmp_path)) is None
