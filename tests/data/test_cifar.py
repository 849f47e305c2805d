from __future__ import annotations

import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from atas.data.cifar import CIFAR10, CIFAR100, read_cifar
from atas.errors import DataError


def assert_content(dataset, tiny):
    for half, split in (("train", dataset.train), ("test", dataset.test)):
        assert torch.equal(split.images, torch.from_numpy(tiny.images[half]))
        assert split.labels.tolist() == tiny.labels[half].tolist()
        assert split.classes == tiny.spec.classes
    assert dataset.name == tiny.spec.name


def python2_pickle(images: np.ndarray, key: str, labels: np.ndarray) -> bytes:
    """A batch as Python 2 wrote it: names, type codes and pixels all as byte strings, flags as integers."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    dtype = b"cnumpy\ndtype\n" + short("u1") + b"K\x00K\x01\x87R(K\x03" + short("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87R(K\x01"
        b"K" + bytes([len(images)]) + b"M\x00\x0c\x86" + dtype + b"K\x00tb\x89"
        b"T" + struct.pack("<i", images.nbytes) + images.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short("data") + array + short(key) + numbers + b"u."


def test_binary_layout(tiny, tmp_path):
    folder = tiny.write_binary(tmp_path)
    assert_content(read_cifar(tiny.spec, tmp_path), tiny)
    assert_content(read_cifar(tiny.spec, folder), tiny)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_python_layout_in_every_protocol(tiny, tmp_path, protocol):
    folder = tiny.write_python(tmp_path, protocol)
    assert_content(read_cifar(tiny.spec, tmp_path), tiny)
    assert_content(read_cifar(tiny.spec, folder), tiny)


def test_python_layout_as_python_2_wrote_it(tiny, tmp_path):
    folder = tiny.write_python(tmp_path)
    for name, (images, labels) in tiny.batches(tiny.spec.python).items():
        (folder / name).write_bytes(python2_pickle(images, tiny.spec.label_key, labels))
    assert_content(read_cifar(tiny.spec, tmp_path), tiny)


def test_python_layout_with_byte_keys_and_other_orders(tiny, tmp_path):
    folder = tiny.write_python(tmp_path)
    for name, (images, labels) in tiny.batches(tiny.spec.python).items():
        for protocol in (4, 5):
            batch = {b"data": np.asfortranarray(images), tiny.spec.label_key.encode(): labels.astype(">i4")}
            (folder / name).write_bytes(pickle.dumps(batch, protocol))
    assert_content(read_cifar(tiny.spec, tmp_path), tiny)


def test_official_md5_is_enough(tiny10, tmp_path):
    tiny10.write_binary(tmp_path)
    spec = replace(tiny10.spec, train_sha256="unknown", test_sha256="unknown")
    assert_content(read_cifar(spec, tmp_path), tiny10)


def test_right_content_is_enough(tiny10, tmp_path):
    tiny10.write_binary(tmp_path)
    spec = replace(tiny10.spec, binary=replace(tiny10.spec.binary, md5={}))
    assert_content(read_cifar(spec, tmp_path), tiny10)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_changed_pixel(tiny, tmp_path, layout):
    if layout == "binary":
        path = tiny.write_binary(tmp_path) / tiny.spec.binary.train[0]
    else:
        path = tiny.write_python(tmp_path) / tiny.spec.python.train[0]
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        read_cifar(tiny.spec, tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert tiny.spec.train_sha256 in message
    assert tiny.spec.binary.md5.get(path.name, "") in message
    assert f"atas data get {tiny.spec.name}" in message


def test_only_the_damaged_file_is_named(tiny10, tmp_path):
    folder = tiny10.write_binary(tmp_path)
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match="data_batch_3") as caught:
        read_cifar(tiny10.spec, tmp_path)
    assert "data_batch_2" not in str(caught.value)


def test_missing_cifar_folder_is_refused(tiny, tmp_path):
    with pytest.raises(DataError) as caught:
        read_cifar(tiny.spec, tmp_path / "none")
    for part in (str(tmp_path / "none"), tiny.spec.binary.folder, tiny.spec.python.folder, "atas data get"):
        assert part in str(caught.value)


def test_missing_file(tiny10, tmp_path):
    (tiny10.write_binary(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin lacks data_batch_4\.bin; .*atas data get cifar10"):
        read_cifar(tiny10.spec, tmp_path)
    tiny10.write_python(tmp_path)
    assert_content(read_cifar(tiny10.spec, tmp_path), tiny10)


@pytest.mark.parametrize(("cut", "fault"), [(-1, "truncated"), (1, "too long")])
def test_binary_file_of_wrong_size(tiny, tmp_path, cut, fault):
    path = tiny.write_binary(tmp_path) / tiny.spec.binary.test[0]
    raw = path.read_bytes()
    path.write_bytes(raw[:cut] if cut < 0 else raw + b"x")
    with pytest.raises(DataError, match=f"{fault}: expected {len(raw)} bytes, got {len(raw) + cut}"):
        read_cifar(tiny.spec, tmp_path)


@pytest.mark.parametrize(
    ("keep", "message"), [(100, "expected at least 12288 bytes, got 100"), (-3, r"\(124\d\d bytes\): .* truncated")]
)
def test_truncated_pickle_is_refused(tiny, tmp_path, keep, message):
    path = tiny.write_python(tmp_path) / tiny.spec.python.test[0]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=message) as caught:
        read_cifar(tiny.spec, tmp_path)
    assert f"atas data get {tiny.spec.name}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((4, 3071), np.uint8)}, r"shape \(4, 3071\) under 'data'"),
        ({"data": np.zeros((4, 3072), np.int16)}, "holds int16 images"),
        ({"data": [[1], [1, 2]]}, "under 'data'"),
        ({"data": None}, "under 'data'"),
        ({"labels": [0, 1, 2]}, "4 class numbers under 'labels'"),
        ({"labels": [0, 1, 2, 300]}, "4 class numbers"),
        ({"labels": [0, 1, 2, "cat"]}, "4 class numbers"),
        ({"labels": [0, 1, 2, [3]]}, "4 class numbers"),
    ],
)
def test_pickle_of_other_content(tiny10, tmp_path, change, message):
    path = tiny10.write_python(tmp_path) / "test_batch"
    images, labels = tiny10.batches(tiny10.spec.python)["test_batch"]
    batch = {"data": images, "labels": labels.tolist(), "padding": b" " * 20_000} | change
    path.write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=message):
        read_cifar(tiny10.spec, tmp_path)


def test_malicious_pickle_is_refused_and_named(tiny, tmp_path):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return open, (str(marker), "w")

    path = tiny.write_python(tmp_path) / tiny.spec.python.train[0]
    path.write_bytes(pickle.dumps({"data": Evil(), "padding": b" " * 100_000}))
    with pytest.raises(DataError, match=r"tries to load _?io\.open") as caught:
        read_cifar(tiny.spec, tmp_path)
    assert str(path) in str(caught.value)
    assert not marker.exists()


def test_unreadable_file(tiny10, tmp_path, monkeypatch):
    tiny10.write_binary(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*data_batch_1\.bin \(Permission denied\)"):
        read_cifar(tiny10.spec, tmp_path)


@pytest.mark.parametrize(("spec", "count"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_descriptions_of_the_real_sets(spec, count):
    assert len(set(spec.classes)) == count
    assert list(spec.classes) == sorted(spec.classes)
    assert (spec.train_count, spec.test_count) == (50_000, 10_000)
    for layout in (spec.binary, spec.python):
        assert set(layout.md5) in (set(), set(layout.files))


@pytest.mark.parametrize("key", ["data", "label_key"])
def test_lists_that_hold_each_other_do_not_fill_the_memory(tiny10, tmp_path, key):
    folder = tiny10.write_python(tmp_path)
    path = folder / tiny10.spec.python.train[0]
    nested = [0] * 10
    for _ in range(11):  # 10^12 numbers in a few hundred bytes
        nested = [nested] * 10
    batch = pickle.loads(path.read_bytes())
    batch["data" if key == "data" else tiny10.spec.label_key] = nested
    batch["padding"] = b" " * 20_000
    path.write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=f"{path.name} (holds|does not hold)"):
        read_cifar(tiny10.spec, tmp_path)


@pytest.mark.parametrize(
    "labels", [[10**30] * 4, [1.0, 2.0, 3.0, 4.0], [True] * 4, "0123", {0: 1}, [[0], [1], [2], [3]]]
)
def test_labels_are_a_list_of_integers(tiny10, tmp_path, labels):
    folder = tiny10.write_python(tmp_path)
    path = folder / tiny10.spec.python.train[0]
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) | {tiny10.spec.label_key: labels}))
    with pytest.raises(DataError, match="does not hold 4 class numbers"):
        read_cifar(tiny10.spec, tmp_path)
