"""Small sets in the official layouts, with the checksums that belong to them."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.images import noise_image
from PIL import Image

from atas.data.cifar import CIFAR10, CIFAR100, CifarSpec, Layout

PER_FILE = 4


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


@dataclass(frozen=True)
class Tiny:
    """A set with four images a file, which can be written in every form that the real ones have."""

    spec: CifarSpec
    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]

    def batches(self, layout: Layout) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The pixels (count, 3072) and labels of each file."""
        out = {}
        for half, names in (("train", layout.train), ("test", layout.test)):
            parts = zip(np.split(self.images[half], len(names)), np.split(self.labels[half], len(names)), strict=True)
            out |= {
                name: (images.reshape(len(images), -1), labels)
                for name, (images, labels) in zip(names, parts, strict=True)
            }
        return out

    def binary_files(self) -> dict[str, bytes]:
        coarse = np.zeros((PER_FILE * 10, self.spec.label_bytes - 1), np.uint8)
        return {
            name: np.concatenate([coarse[: len(labels)], labels[:, None], images], axis=1).tobytes()
            for name, (images, labels) in self.batches(self.spec.binary).items()
        }

    def python_files(self, protocol: int = 4) -> dict[str, bytes]:
        return {
            name: pickle.dumps({"data": images, self.spec.label_key: labels.tolist()}, protocol)
            for name, (images, labels) in self.batches(self.spec.python).items()
        }

    def write_binary(self, root: Path) -> Path:
        return write(root / self.spec.binary.folder, self.binary_files())

    def write_python(self, root: Path, protocol: int = 4) -> Path:
        return write(root / self.spec.python.folder, self.python_files(protocol))

    def archive(self, path: Path, extra: dict[str, bytes] | None = None) -> Tiny:
        """Write the official archive and point the description to it."""
        folder = self.spec.binary.folder
        write_tar(path, {f"{folder}/{name}": raw for name, raw in self.binary_files().items()} | (extra or {}))
        return replace(self, spec=replace(self.spec, url=path.absolute().as_uri(), archive_md5=md5(path.read_bytes())))

    def npm_archive(self, path: Path) -> Path:
        """Write what npm would download."""
        files = {}
        for name, (images, _) in self.batches(self.spec.binary).items():
            sheet = io.BytesIO()
            Image.fromarray(images.reshape(len(images), 3, -1).transpose(0, 2, 1).copy()).save(sheet, "PNG")
            files[f"package/{Path(name).stem}.png"] = sheet.getvalue()
        for half in ("train", "test"):
            files[f"package/{half}_lables.json"] = json.dumps(self.labels[half].tolist()).encode()
        write_tar(path, files)
        return path


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def make(real: CifarSpec) -> Tiny:
    random = np.random.default_rng(7)
    counts = {"train": PER_FILE * len(real.binary.train), "test": PER_FILE * len(real.binary.test)}
    images = {half: random.integers(0, 256, (count, 3, 32, 32), np.uint8) for half, count in counts.items()}
    labels = {
        half: random.integers(0, len(real.classes), count, np.int64).astype(np.uint8) for half, count in counts.items()
    }
    sha256 = {half: hashlib.sha256(images[half].tobytes() + labels[half].tobytes()).hexdigest() for half in counts}
    spec = replace(
        real,
        train_count=counts["train"],
        test_count=counts["test"],
        train_sha256=sha256["train"],
        test_sha256=sha256["test"],
        url="file:///nowhere/at/all.tar.gz",
        archive_md5="0" * 32,
        python=replace(real.python, md5={}),
    )
    tiny = Tiny(spec, images, labels)
    # As with the real sets, the MD5s of the binary files are known for the first and not for the second.
    sums = {name: md5(raw) for name, raw in tiny.binary_files().items()} if real.binary.md5 else {}
    return replace(tiny, spec=replace(spec, binary=replace(real.binary, md5=sums)))


@pytest.fixture
def tiny10() -> Tiny:
    return make(CIFAR10)


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=lambda spec: spec.name)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return make(request.param)


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder of photos: two classes, JPEG and PNG of many sizes, 21 for training and 6 for testing."""
    root = tmp_path / "photos"
    for half, count in (("train", 21), ("val", 6)):
        for number in range(count):
            folder = root / half / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            width, height = 20 + 3 * (number % 5), 17 + 5 * (number % 4)
            noise_image(width, height, seed=number).save(folder / f"{number:03}.{('png', 'jpg')[number % 3 > 0]}")
    return root
