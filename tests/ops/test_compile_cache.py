"""Where compiled kernels are kept."""

import os
from pathlib import Path

import pytest

from atas._utils.system import cache_dir
from atas.ops import use_compile_cache

NAMES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    for name in (*NAMES, "ATAS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_folder_is_the_users_or_the_one_named(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / ".cache" / "atas"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/atas")
    monkeypatch.setenv("ATAS_CACHE", "/moved")
    assert cache_dir() == Path("/moved")


def test_both_compilers_are_told_unless_the_user_has_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    use_compile_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".cache" / "atas" / "inductor")
