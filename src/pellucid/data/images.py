"""Images of a prompt: from parts of messages to the tokens and tensors that a model is given. No torch.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}              part of a message
    <fake_token_around_image><global-img><image>…<image><fake_token_around_image>       its text
    pixels [tiles, 3, height, width] uint8, scale [3], shift [3]                        its tensors

- Tensors travel as bytes in the safetensors format (`mm_tensors`). Pixels stay the integers that resizing
  gives, which is a quarter of the bytes; the model is given `pixels · scale + shift`.
- In a sample, `mm_token_type_ids` tells which tokens stand for images: a model may sample `<image>`. In a
  prompt their id does, so no turn can follow one in which the model sampled it.
- As many tokens stand for images as their tensors give; everything that takes a sample in checks it.
"""

import base64
import binascii
import hashlib
import io
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from pellucid.data.plain import brief
from pellucid.data.tokenizer import first_line
from pellucid.errors import DataError, ModelError, RolloutError

FAMILIES = ("idefics3", "smolvlm")
"""Values of `model_type` in config.json whose models are trained on images."""

IMAGE = 1
"""Modality, in `mm_token_type_ids`, of a token that stands for a part of an image; 0 is text."""

_DTYPES = {"pixels": np.uint8, "scale": np.float32, "shift": np.float32}
_DIGEST = "sha256"
_MAX_PIXELS = 1 << 26
_REMEMBERED = 32
"""Images whose pixels are kept, and payloads of prompts: those of an example, while its group runs. Turns
with the same images share one payload."""

ImageArrays = dict[str, NDArray[Any]]


class ImagePrompt(list[int]):
    """The token ids of a prompt with images; goes wherever a plain list of ids does."""

    def __init__(self, token_ids: Sequence[int], mm_tensors: bytes, token_id: int) -> None:
        super().__init__(token_ids)
        self.mm_tensors = mm_tensors
        self.token_id = token_id
        """Id of the token that stands for a part of an image."""


def tensors_of(prompt_ids: Sequence[int]) -> bytes:
    """Returns the tensors of a prompt's images; empty without images."""
    return prompt_ids.mm_tensors if isinstance(prompt_ids, ImagePrompt) else b""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """How a model turns images into tokens.

    A tile of 512 × 512 pixels is 32 × 32 patches of 16 × 16, and with `scale_factor` 4 becomes 8 × 8 tokens.
    """

    token_id: int
    patch_size: int
    scale_factor: int

    @classmethod
    def of(cls, config: Any) -> "ImageShape | None":
        """Reads transformers' config; None if the model is of no family that is trained on images."""
        if config.model_type not in FAMILIES:
            return None
        return cls(int(config.image_token_id), int(config.vision_config.patch_size), int(config.scale_factor))

    def num_tokens(self, mm_tensors: bytes) -> int:
        """Counts the tokens that images become; raises DataError for tensors that are no images."""
        arrays = unpack_images(mm_tensors)
        num_tiles, _, height, width = arrays["pixels"].shape
        side = self.patch_size * self.scale_factor
        if height != width or height % side:
            raise DataError(
                f"has tiles of {height} × {width} pixels; the model takes squares whose side is a multiple "
                f"of {side} (patch_size × scale_factor in its config.json)"
            )
        if (tile := _empty_tile(arrays)) is not None:
            raise DataError(
                f"has values that are all exactly 0 in tile {tile} (pixels · scale + shift), which "
                "transformers leaves out as padding; use an image processor that normalises (do_normalize in "
                "preprocessor_config.json)"
            )
        return self.num_embeddings(num_tiles, height)

    def num_embeddings(self, num_tiles: int, side: int) -> int:
        """Counts the tokens that square tiles of `side` pixels become."""
        return num_tiles * (side // (self.patch_size * self.scale_factor)) ** 2

    def why_not(self, num_places: int, mm_tensors: bytes) -> str:
        """Returns why the tensors do not fit a sequence with so many tokens in their place, or ""."""
        try:
            num_tokens = self.num_tokens(mm_tensors)
        except DataError as error:
            return str(error)
        if num_tokens == num_places:
            return ""
        return (
            f"holds images of {num_tokens} tokens, and {num_places} tokens of the sequence stand for images; "
            "make both from the same messages, with the processor of the model's folder"
        )


def pack_images(images: Sequence[ImageArrays]) -> bytes:
    """Joins the tiles of images, in order, to one payload; raises DataError if they differ in size."""
    from safetensors.numpy import save

    sizes = {image["pixels"].shape[1:] for image in images}
    if len(sizes) > 1:
        raise DataError(f"the images of a prompt have tiles of {sorted(sizes)}; they need one size")
    first = images[0]
    pixels = np.ascontiguousarray(np.concatenate([image["pixels"] for image in images]))
    payload: bytes = save({"pixels": pixels, "scale": first["scale"], "shift": first["shift"]})
    return payload


def unpack_images(mm_tensors: bytes) -> ImageArrays:
    """Reads a payload of `pack_images`; raises DataError, as the rest of a sentence, for anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(mm_tensors)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"is no safetensors payload: {first_line(error)}") from error
    if {name: array.dtype for name, array in arrays.items()} != _DTYPES:
        found = ", ".join(f"{name} of {array.dtype}" for name, array in sorted(arrays.items()))
        raise DataError(f"holds {found or 'nothing'}; expected pixels of uint8, scale and shift of float32")
    pixels, scale, shift = (arrays[name] for name in _DTYPES)
    if (
        pixels.ndim != 4
        or pixels.shape[1] != 3
        or 0 in pixels.shape
        or not scale.shape == shift.shape == (3,)
    ):
        raise DataError(
            f"has pixels of {pixels.shape}, scale of {scale.shape} and shift of {shift.shape}; expected "
            "[tiles, 3, height, width], [3] and [3]"
        )
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        raise DataError("has a scale or a shift that is not finite")
    return dict(arrays)


def starts_with(mm_tensors: bytes, first: bytes) -> bool:
    """Returns whether the images of a payload begin with all of those of another, pixel by pixel."""
    if mm_tensors == first:
        return True
    whole, begun = unpack_images(mm_tensors), unpack_images(first)
    whole["pixels"] = whole["pixels"][: len(begun["pixels"])]
    return all(np.array_equal(whole[name], begun[name]) for name in _DTYPES)


def _empty_tile(arrays: ImageArrays) -> int | None:
    """Returns the number of the first tile whose values are all exactly 0; None: there is none."""
    pixels, scale, shift = (arrays[name] for name in _DTYPES)
    starts_empty = (pixels[:, :, 0, 0] * scale + shift == 0).all(1)  # few do: the others are not looked at
    for tile in np.flatnonzero(starts_empty):
        if not (pixels[tile] * scale[:, None, None] + shift[:, None, None]).any():
            return int(tile)
    return None


class ImageProcessor:
    """Prepares images with the image processor of the model's folder, and writes out their places."""

    def __init__(self, tokenizer: Any, shape: ImageShape) -> None:
        from transformers import AutoImageProcessor

        name = tokenizer.name_or_path
        try:
            self._processor = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
        except (ImportError, OSError, ValueError) as error:
            raise ModelError(
                f"model.name = {name!r}: its image processor could not be loaded ({first_line(error)}); the "
                "folder needs a preprocessor_config.json, and images need `pip install 'pellucid[images]'`"
            ) from error
        self.shape = shape
        self.marker: str = tokenizer.convert_ids_to_tokens(shape.token_id)
        """Text of the token that stands for a part of an image."""

        self._around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._whole = getattr(tokenizer, "global_image_token", "<global-img>")
        vocabulary = tokenizer.get_vocab()
        if missing := [each for each in (self._around, self._whole) if each not in vocabulary]:
            raise ModelError(
                f"model.name = {name!r}: its tokenizer has no token {' or '.join(missing)}, which stand "
                "around images; use the tokenizer that the model was trained with"
            )
        self._reads_parts = _reads_parts(tokenizer)
        # Threads of a server share them.
        self._image = lru_cache(_REMEMBERED)(self._make)
        self._payload = lru_cache(_REMEMBERED)(self._pack)

    def for_template(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Gives the contents of messages the form that the model's chat template reads: text with a marker
        for each image, or parts of both types."""
        return [
            {**message, "content": self._content(message["content"])}
            if message.get("content") is not None
            else {**message}
            for message in messages
        ]

    def _content(self, content: Any) -> Any:
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if self._reads_parts:
            return [{"type": "image"} if image_url(part) is not None else part for part in parts]
        return "".join(self.marker if image_url(part) is not None else part["text"] for part in parts)

    def expand(self, text: str, messages: Iterable[Mapping[str, Any]]) -> str:
        """Writes the tokens of each image in the place of its marker; RolloutError for other markers."""
        urls = urls_of(messages)
        first, *rest = text.split(self.marker)
        if len(rest) != len(urls):
            raise RolloutError(
                f"the prompt has {len(rest)} times {self.marker} and {len(urls)} images; leave the "
                "marker out of texts, and use a chat template that writes it once for each image"
            )
        return first + "".join(self._image(url)[0] + part for url, part in zip(urls, rest, strict=True))

    def prompt(self, token_ids: list[int], messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Adds the tensors of the messages' images to their token ids; without images, nothing."""
        urls = tuple(urls_of(messages))
        return ImagePrompt(token_ids, self._payload(urls), self.shape.token_id) if urls else token_ids

    def _pack(self, urls: tuple[str, ...]) -> bytes:
        try:
            return pack_images([self._image(url)[1] for url in urls])
        except DataError as error:
            raise RolloutError(str(error)) from error

    def _make(self, url: str) -> tuple[str, ImageArrays]:
        """Returns the tokens of an image, as text, and its arrays."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        made = self._processor(
            [[_decode(url)]],
            return_row_col_info=True,
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        )
        pixels = made["pixel_values"][0]
        if not np.array_equal(pixels, pixels.astype(np.uint8)):
            raise RolloutError("the image processor gives values that are no whole numbers from 0 to 255")
        own = self._processor
        factor = own.rescale_factor if own.do_rescale else 1.0
        mean, std = (own.image_mean, own.image_std) if own.do_normalize else ([0.0] * 3, [1.0] * 3)
        arrays: ImageArrays = {
            "pixels": pixels.astype(np.uint8),
            "scale": (factor / np.array(std)).astype(np.float32),
            "shift": (-np.array(mean) / np.array(std)).astype(np.float32),
        }
        try:
            per_tile = self.shape.num_tokens(pack_images([arrays])) // len(pixels)
        except DataError as error:
            raise RolloutError(f"the image {error}") from error
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        written = get_image_prompt_string(rows, columns, per_tile, self._around, self.marker, self._whole)
        return written, arrays


def _reads_parts(tokenizer: Any) -> bool:
    """Returns whether the chat template reads contents as lists of parts: it leaves out a plain text."""
    text = "pellucid"
    try:
        written = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return True
    return text not in written


def read_image_shape(name: str) -> ImageShape | None:
    """Reads how a model turns images into tokens; None if it takes text alone, or cannot be read: whoever
    loads it says what is wrong with it."""
    from transformers import AutoConfig

    try:
        return ImageShape.of(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except Exception:  # of all kinds: OSError, ValueError, of strict dataclasses as well
        return None


def load_image_processor(tokenizer: Any) -> ImageProcessor | None:
    """Loads the image processor beside a tokenizer; None if the model there takes text alone."""
    name = getattr(tokenizer, "name_or_path", "")
    shape = read_image_shape(name) if name else None
    return None if shape is None else ImageProcessor(tokenizer, shape)


def copy_image_processor(name: str, folder: Path) -> None:
    """Copies the settings of a model's image processor, so that `folder` is whole."""
    from transformers.utils import cached_file

    for file in ("preprocessor_config.json", "processor_config.json"):
        if found := cached_file(name, file, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(found, folder / file)


def urls_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lists the URLs of the images of messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [url for part in parts if (url := image_url(part)) is not None]


def image_url(part: Any) -> str | None:
    """Returns the URL of a part of a content that is an image, in OpenAI's form; None for other parts."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return url
    return None


def without_pixels(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies messages for files: of an image, only a digest of its URL is left."""
    return [
        {**message, "content": [_digested(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else {**message}
        for message in messages
    ]


def _digested(part: Any) -> Any:
    url = image_url(part)
    if url is None or not url.startswith("data:"):
        return part
    digest = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:12]
    return {**part, "image_url": {"url": f"data:image/png;{_DIGEST},{digest}"}}


def has_pixels(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether all images are there, none of them `without_pixels`."""
    return not any(url.partition(",")[0].endswith(f";{_DIGEST}") for url in urls_of(messages))


def _decode(url: str) -> Any:
    """Decodes a data: URL to an image of PIL; raises RolloutError for any other, and for what is no image."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise RolloutError(
            f"the image has the URL {brief(url)}; nothing is fetched: give data:image/png;base64,… instead"
        )
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise RolloutError("images need Pillow: pip install 'pellucid[images]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the bound below is smaller
            image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        if image.width * image.height > _MAX_PIXELS:
            raise RolloutError(
                f"the image has {image.width} × {image.height} pixels; at most {_MAX_PIXELS} fit"
            )
        return image.convert("RGB")
    except Image.DecompressionBombError as error:
        raise RolloutError(f"the image has too many pixels; at most {_MAX_PIXELS} fit") from error
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise RolloutError(f"the image cannot be read: {first_line(error)}") from error


def data_url(png: bytes) -> Mapping[str, Any]:
    """Returns the part of a message's content that is this PNG image."""
    encoded = base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
