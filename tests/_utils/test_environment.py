"""The commit that results carry."""

import shutil
import subprocess
from pathlib import Path

import pytest

import atas
from atas._utils import environment

GIT = ["git", "-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package in a checkout, and a folder there that is not part of it."""
    if shutil.which("git") is None:
        pytest.skip("needs git, which is not installed here")
    monkeypatch.delenv("ATAS_COMMIT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path / "src", tmp_path / "lib"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    for arguments in (["init", "-q"], ["add", "src"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    return tmp_path


def test_commit_of_a_checkout_says_whether_files_changed(checkout):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert environment.commit_of(checkout / "src") == head.stdout.strip()
    (checkout / "src" / "__init__.py").write_text("changed = True\n")
    assert environment.commit_of(checkout / "src") == head.stdout.strip() + "+"


def test_a_package_installed_in_someone_elses_checkout_has_no_commit(checkout):
    assert environment.commit_of(checkout / "lib") is None


def test_the_environment_variable_overrides_the_commit(monkeypatch):
    monkeypatch.setenv("ATAS_COMMIT", "0123abc")
    environment.commit.cache_clear()
    assert environment.commit() == "0123abc"
    environment.commit.cache_clear()


def test_commit_looks_at_the_package_itself(monkeypatch):
    monkeypatch.delenv("ATAS_COMMIT", raising=False)
    environment.commit.cache_clear()
    assert environment.commit() == environment.commit_of(Path(atas.__file__).parent)
    environment.commit.cache_clear()
