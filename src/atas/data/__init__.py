"""Data sets by name, of files and folders, of the Hugging Face hub, of torch, and arrays of the user."""

from __future__ import annotations

from atas.data.arrays import from_arrays
from atas.data.dataset import Dataset, Indexed, MapDataset, Split, indexed
from atas.data.download import downloadable, fetch
from atas.data.held_out import hold_out, stratified_rows
from atas.data.lazy_images import ImageFiles, LazyImages
from atas.data.lazy_images import LazyImages as Stored  # the name of earlier versions
from atas.data.packed import verify
from atas.data.packing import pack
from atas.data.registry import (
    DEFAULT_SIZE,
    FOLDERS,
    as_dataset,
    check_given,
    default_size,
    given_name,
    is_official,
    load,
    num_train_images,
    official_hashes,
)
from atas.data.sources import FORMS, display_name, find_source, is_function, names
from atas.data.torch_datasets import from_datasets

__all__ = [
    "DEFAULT_SIZE",
    "FOLDERS",
    "FORMS",
    "Dataset",
    "ImageFiles",
    "Indexed",
    "LazyImages",
    "MapDataset",
    "Split",
    "Stored",
    "as_dataset",
    "check_given",
    "default_size",
    "display_name",
    "downloadable",
    "fetch",
    "find_source",
    "from_arrays",
    "from_datasets",
    "given_name",
    "hold_out",
    "indexed",
    "is_function",
    "is_official",
    "load",
    "names",
    "num_train_images",
    "official_hashes",
    "pack",
    "stratified_rows",
    "verify",
]
