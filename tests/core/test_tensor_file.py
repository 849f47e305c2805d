"""Tensors in a file: what was written is read, and any changed byte is noticed."""

import os

import pytest
import torch
from safetensors.torch import save_file

from atas._utils.documents import MalformedError
from atas.core.tensor_file import is_of_other_kind, read_tensors, take_tensor, write_tensors
from atas.core.thumbnails import perturbation_thumbnails, thumbnails

TENSORS = {"b": torch.arange(6, dtype=torch.int16).view(2, 3), "a": torch.rand(4), "none": torch.zeros(0, 2)}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, "kind-1", TENSORS, {"names": ["x", "\u2028"]})
    return path


def test_it_is_read_as_it_was_written(written):
    metadata, tensors = read_tensors(written, "kind-1")
    assert metadata == {"names": ["x", "\u2028"]}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    before = written.read_bytes()
    write_tensors(written, "kind-1", dict(reversed(TENSORS.items())), metadata)
    assert written.read_bytes() == before, "the same content gives the same bytes"


def test_another_kind_is_told_from_damage(written, tmp_path):
    assert read_tensors(written, "kind-2") is None
    assert is_of_other_kind(written, "kind-2")
    assert not is_of_other_kind(written, "kind-1")
    assert not is_of_other_kind(tmp_path / "missing", "kind-1")
    plain = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(1)}, plain)
    assert is_of_other_kind(plain, "kind-1")
    plain.write_bytes(b"nothing")
    assert not is_of_other_kind(plain, "kind-1"), "nothing is lost if it is replaced"


@pytest.mark.slow
def test_every_changed_byte_is_noticed(written):
    content = written.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        written.write_bytes(changed)
        try:
            found = read_tensors(written, "kind-1")
        except MalformedError:
            continue
        assert found is None or _same(found[1]), place  # a name of the header, or white space in it
    written.write_bytes(content[:-1])
    with pytest.raises(MalformedError):
        read_tensors(written, "kind-1")


def _same(tensors):
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "missing", "kind-1")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_tensors(tmp_path / "pipe", "kind-1")


@pytest.mark.parametrize(
    ("name", "kinds", "shape"),
    [
        ("c", (torch.float32,), (4,)),
        ("a", (torch.int16,), (4,)),
        ("a", (torch.float32,), (5,)),
        ("b", (torch.int16,), (None,)),
    ],
)
def test_other_tensors_are_refused(name, kinds, shape):
    with pytest.raises(MalformedError, match=f"^{name} is"):
        take_tensor(dict(TENSORS), name, kinds, *shape)
    assert take_tensor(dict(TENSORS), "b", (torch.int16, torch.int32), None, 3) is TENSORS["b"]


def test_thumbnails_are_means_of_pixels():
    x = torch.rand(2, 3, 128, 64)
    assert thumbnails(x).shape == (2, 3, 64, 32)
    means = x.view(2, 3, 64, 2, 32, 2).mean((3, 5)) * 255
    assert (thumbnails(x).float() - means).abs().max() <= 0.501
    small = torch.randint(256, (2, 1, 7, 9), dtype=torch.uint8)
    assert torch.equal(thumbnails(small.float() / 255), small)
    assert thumbnails(torch.rand(1, 1, 1, 1000)).shape == (1, 1, 1, 64)


def test_perturbations_are_scaled_one_by_one():
    delta = torch.zeros(3, 1, 2, 2)
    delta[1, 0, 0, 0], delta[2, 0, 1, 1] = 0.001, -0.5
    found = perturbation_thumbnails(delta)
    assert (found[0] == 128).all()
    assert (int(found[1, 0, 0, 0]), int(found[2, 0, 1, 1]), int(found[2, 0, 0, 0])) == (255, 0, 128)
