"""Images in a forward: the embeddings of their tokens come from the vision tower, all others from the table.

    token ids     5    9    9    9    9    7        is_image   .  x  x  x  x  .
    embeddings    e5   v0   v1   v2   v3   e7       v: what the tower and its connector make of the pixels

What follows is the language model as it is, so plans, caches and the proof of packed sequences hold. A row of
tokens that is cut off behind its images, or in the middle of one, has the first of their embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.images import ImageShape, unpack_images
from pellucid.data.tensors import to_device
from pellucid.errors import ModelError


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of one row of tokens."""

    places: Sequence[Tensor]
    """Indices of the tokens that stand for images, for each sequence that has some."""

    pixel_values: Sequence[Tensor]
    """[tiles, 3, height, width] of each of these sequences."""

    @classmethod
    def of(
        cls, sequences: Sequence[tuple[NDArray[np.integer[Any]], bytes]], device: torch.device
    ) -> "ImageInputs":
        """Takes places and `mm_tensors` of each sequence with images."""
        loaded = [unpack_images(mm_tensors) for _, mm_tensors in sequences]
        arrays = [np.asarray(places, np.int64) for places, _ in sequences]
        for each in loaded:
            arrays += [each["pixels"], each["scale"], each["shift"]]
        tensors = to_device(arrays, device)
        places, rest = tensors[: len(sequences)], tensors[len(sequences) :]
        scaled = [
            pixels * scale[:, None, None] + shift[:, None, None]
            for pixels, scale, shift in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ]
        return cls(places, scaled)


def embed(hf: Any, shape: ImageShape, token_ids: Tensor, images: ImageInputs) -> Tensor:
    """Embeds one row of tokens: [tokens, width]."""
    embeddings: Tensor = hf.get_input_embeddings()(token_ids)
    for places, pixel_values in zip(images.places, images.pixel_values, strict=True):
        (features,) = hf.get_image_features(pixel_values[None]).pooler_output
        expected = shape.num_embeddings(len(pixel_values), pixel_values.shape[-1])
        if not len(places) <= expected == len(features):  # HF leaves out a tile whose values are all 0
            raise ModelError(
                f"{type(hf).__name__} makes {len(features)} embeddings of images of {expected} tokens, in "
                f"the place of {len(places)}; transformers leaves out a tile whose values are all exactly 0"
            )
        of_places = features[: len(places)].to(embeddings.dtype)
        embeddings = embeddings.index_copy(0, places, of_places)
    return embeddings
