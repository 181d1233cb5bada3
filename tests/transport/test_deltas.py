"""Versions as differences: lossless, chosen where they are less, and never taken for something else."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from pellucid.errors import TransportError
from pellucid.transport import retract_folder
from pellucid.transport.deltas import DELTA, decode, encode
from pellucid.transport.digests import digest_of_bytes, read_digests, write_digests
from pellucid.transport.weights import publish_version, weights_folder, write_version
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller

KEY = "the key of these tests"
FILE = "model.safetensors"


def test_gaps_and_changes_are_those_of_the_docstring() -> None:
    old, new = (np.array(values, np.uint16) for values in ([5] * 6, [5, 6, 5, 5, 5, 4]))
    gaps, changes = encode(old, new)
    assert (gaps.tolist(), changes.tolist()) == ([1, 3], [2, 1, 0, 0])


def test_long_gaps_are_escaped() -> None:
    old = np.zeros(1024, np.uint16)
    new = old.copy()
    new[[254, 510, 1023]] = 65535  # gaps of 254, 255 and 512
    gaps, changes = encode(old, new)
    assert (gaps.tolist(), changes.tolist()) == ([254, 255, 0, 255, 255, 2], [1, 1, 1, 0, 0, 0])
    decode(old, gaps, changes)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@given(data=st.data())
def test_what_is_decoded_is_what_was_encoded(dtype, data) -> None:
    size = data.draw(st.integers(0, 700))
    old = data.draw(arrays.arrays(dtype, size))
    new = np.where(data.draw(arrays.arrays(np.bool_, size)), data.draw(arrays.arrays(dtype, size)), old)
    decoded = old.copy()
    decode(decoded, *encode(old, new))
    assert np.array_equal(decoded, new)


@pytest.mark.parametrize(("gaps", "changes"), [([0, 0], [2, 0]), ([6], [2, 0]), ([255], [2, 0])])
def test_a_difference_that_does_not_fit_changes_nothing(gaps, changes) -> None:
    words = np.zeros(6, np.uint16)
    with pytest.raises(ValueError, match="for 6 elements"):
        decode(words, np.array(gaps, np.uint8), np.array(changes, np.uint8))
    assert not words.any()


class Trainer:
    """Publishes a bfloat16 model of which a share changes in each version, and offers it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.ParameterDict({"a": torch.randn(400, 100), "frozen": torch.randn(50, 50)}).bfloat16()
        self.model["frozen"].requires_grad_(False)
        self.offer = WeightsOffer(folder, "127.0.0.1", 0, KEY)
        self.offer.start()

    def publish(self, version: int, share: float = 0.01) -> None:
        with torch.no_grad():
            weight = self.model["a"]
            weight += (torch.rand(weight.shape) < share) * 0.05
        publish_version(self.folder, version, partial(write_version, self.model), keep=8, deltas=True)

    def content(self, version: int) -> bytes:
        return (weights_folder(self.folder, version) / FILE).read_bytes()


@pytest.fixture
def trainer(tmp_path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "trainer")
    with closing(trainer.offer):
        yield trainer


@pytest.fixture
def puller(trainer, tmp_path) -> WeightsPuller:
    return WeightsPuller(OfferClient(f"http://127.0.0.1:{trainer.offer.port}", KEY), tmp_path / "cache")


def pulled(puller: WeightsPuller, trainer: Trainer, version: int) -> int:
    """Reads a version, which has to be what was published; returns the bytes that it took."""
    before = puller.num_bytes
    folder = puller.pull(version)
    assert (folder / FILE).read_bytes() == trainer.content(version)
    assert sorted(path.name for path in folder.iterdir()) == ["STABLE", "digests.json", FILE]
    return puller.num_bytes - before


def test_a_server_reads_the_difference_and_has_the_same_bytes(trainer, puller) -> None:
    for version in (1, 2):
        trainer.publish(version)
    whole = len(trainer.content(1))
    delta = read_digests(weights_folder(trainer.folder, 2)).delta
    assert delta.base_version == 1 and 0 < delta.num_bytes < whole / 20
    assert [pulled(puller, trainer, version) for version in (1, 2)] == [whole, delta.num_bytes]


def test_a_server_that_missed_versions_reads_all_differences_since(trainer, puller) -> None:
    for version in (1, 2, 3, 4):
        trainer.publish(version)
        if version == 1:
            pulled(puller, trainer, 1)
    sizes = [read_digests(weights_folder(trainer.folder, version)).delta.num_bytes for version in (2, 3, 4)]
    assert pulled(puller, trainer, 4) == sum(sizes)


def test_one_that_missed_what_is_withdrawn_or_published_anew_reads_the_whole(trainer, puller) -> None:
    for version in (1, 2, 3):
        trainer.publish(version)
        if version == 1:
            pulled(puller, trainer, 1)
    retract_folder(weights_folder(trainer.folder, 2))
    whole = len(trainer.content(3))
    assert pulled(puller, trainer, 3) == whole
    trainer.publish(3, share=0.02)  # after a resume: 2 is gone, so there is no difference
    assert pulled(puller, trainer, 3) == whole
    trainer.publish(4)
    assert pulled(puller, trainer, 4) < whole / 20


def test_a_version_of_which_most_changed_has_no_difference(trainer, puller) -> None:
    trainer.publish(1)
    with torch.no_grad():
        trainer.model["a"].normal_()
    trainer.publish(2)
    folder = weights_folder(trainer.folder, 2)
    assert read_digests(folder).delta is None and not (folder / DELTA).exists()
    for version in (1, 2):
        assert pulled(puller, trainer, version) == len(trainer.content(version))


@pytest.mark.parametrize("damaged", [FILE, "digests.json"])
def test_a_base_that_is_damaged_is_none(trainer, damaged, caplog) -> None:
    trainer.publish(1)
    path = weights_folder(trainer.folder, 1) / damaged
    path.write_bytes(path.read_bytes()[:200])
    trainer.publish(2)
    assert read_digests(weights_folder(trainer.folder, 2)).delta is None
    assert "no difference from policy version 1: " in caplog.text


@pytest.mark.parametrize("fault", ["a byte", "another version's", "no frame"])
def test_a_wrong_difference_is_replaced_by_the_whole(trainer, puller, fault, caplog) -> None:
    for version in (1, 2, 3):
        trainer.publish(version)
    pulled(puller, trainer, 1)
    folder = weights_folder(trainer.folder, 2)
    path = folder / DELTA
    if fault == "a byte":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        other = (weights_folder(trainer.folder, 3) / DELTA).read_bytes() if "version" in fault else b"none"
        path.write_bytes(other)
        about = read_digests(folder)
        delta = msgspec.structs.replace(about.delta, num_bytes=len(other), digest=digest_of_bytes(other))
        write_digests(folder, msgspec.structs.replace(about, delta=delta))
    assert pulled(puller, trainer, 2) >= len(trainer.content(2))
    assert "policy version 2 is read whole: " in caplog.text


@pytest.mark.parametrize("name", ["../cache/step_1/STABLE", "/etc/passwd", ".hidden"])
@pytest.mark.parametrize("what", ["file", "difference"])
def test_a_name_that_leads_out_of_the_folder_is_refused(trainer, puller, name, what) -> None:
    for version in (1, 2):
        trainer.publish(version)
    pulled(puller, trainer, 1)
    folder = weights_folder(trainer.folder, 2)
    about = read_digests(folder)
    changes = {"files": {name: about.files[FILE]}}
    if what == "difference":
        changes = {"delta": msgspec.structs.replace(about.delta, name=name)}
    write_digests(folder, msgspec.structs.replace(about, **changes))
    before = puller.num_bytes
    with pytest.raises(TransportError, match="is no name of a file of weights"):
        puller.pull(2)
    assert puller.num_bytes == before


def test_a_transfer_of_a_difference_goes_on_where_it_broke(trainer, puller) -> None:
    for version in (1, 2):
        trainer.publish(version)
    pulled(puller, trainer, 1)
    folder = weights_folder(trainer.folder, 2)
    partial_folder = (
        puller._cache / f".step_2.partial-{digest_of_bytes((folder / 'digests.json').read_bytes())}"
    )
    partial_folder.mkdir()
    content = (folder / DELTA).read_bytes()
    (partial_folder / "delta_2").write_bytes(content[:100])
    assert pulled(puller, trainer, 2) == len(content) - 100
