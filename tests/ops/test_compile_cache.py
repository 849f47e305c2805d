"""Where compiled kernels are kept."""

import json
import os
from pathlib import Path

import pytest

from atas.ops.compile_cache import cache_dir, use_compile_cache

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


def test_a_folder_that_was_moved_is_put_right(monkeypatch, tmp_path):
    """As Triton writes it: a kernel's folder has a list of its files by their whole path."""

    def groups(place):
        return [json.loads(path.read_text())["child_paths"] for path in sorted(place.glob("triton/*/__grp__*"))]

    there, here = tmp_path / "there", tmp_path / "here"
    for key, files in (("KEY1", ["a.cubin", "a.json"]), ("KEY2", ["b.cubin"])):
        kernel = there / "triton" / key
        kernel.mkdir(parents=True)
        for file in files:
            (kernel / file).write_text(file)
        (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {file: str(kernel / file) for file in files}}))
    (there / "triton" / "KEY3").mkdir()
    (there / "triton" / "KEY3" / "__grp__k.json").write_text("{")
    monkeypatch.setenv("ATAS_CACHE", str(there))
    use_compile_cache()
    there.rename(here)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATAS_CACHE", str(here))
    (here / "triton" / "KEY3" / "__grp__k.json").unlink()
    assert not any(Path(path).exists() for group in groups(here) for path in group.values())
    use_compile_cache()
    assert [sorted(group) for group in groups(here)] == [["a.cubin", "a.json"], ["b.cubin"]]
    for group in groups(here):
        for name, path in group.items():
            assert Path(path).read_text() == name
            assert Path(path).is_relative_to(here)


def test_both_compilers_are_told_unless_the_user_has_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    use_compile_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".cache" / "atas" / "inductor")
