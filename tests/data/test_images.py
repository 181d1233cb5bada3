"""Pictures on their way into prompts: what is decoded, written out and refused."""

import numpy as np
import pytest
from safetensors.numpy import save
from transformers import AutoConfig, AutoImageProcessor

from pellucid.data.images import (
    ImagePrompt,
    ImageShape,
    data_url,
    load_image_processor,
    pack_images,
    unpack_images,
    urls_of,
)
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import DataError, RolloutError
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
        processor._made.clear()
    arrays = unpack_images(prompt.mm_tensors)
    scale, shift = (arrays[name][:, None, None] for name in ("scale", "shift"))
    assert arrays["pixels"].shape == expected.shape and len(expected) == (15 if splits else 3)
    # Three roundings of numbers up to 2: a product, a sum, and those of transformers' own order.
    assert np.abs(arrays["pixels"] * scale + shift - expected).max() <= 4 * np.finfo(np.float32).eps
    assert SHAPE.num_tokens(prompt.mm_tensors) == 4 * len(expected)


def test_each_image_is_written_out_in_its_place(processor) -> None:
    messages = user("a", pixels(0), "b", pixels(1))
    (given,) = processor.for_template(messages)
    assert given == {"role": "user", "content": "a<image>b<image>"}
    assert processor.expand("x" + given["content"], messages) == f"xa{WRITTEN}b{WRITTEN}"
    assert processor.prompt([1], [{"role": "user", "content": "text"}]) == [1]
    assert not isinstance(processor.prompt([1], user("text")), ImagePrompt)


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
    return save(good | {"shift": np.zeros(3, np.float32)} | arrays)


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
