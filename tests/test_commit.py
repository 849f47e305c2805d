"""Which commit a measurement was made with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atas import _commit

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]


@pytest.fixture
def commit_of(tmp_path):
    """What a copy of the module says that lies in a folder."""

    def ask(folder, **environment):
        code = "import sys; sys.path.insert(0, sys.argv[1]); import _commit; print(_commit.commit())"
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), **environment},
            check=True,
        )
        return done.stdout.strip()

    return ask


@pytest.fixture
def checkout(tmp_path):
    """A package in a checkout, and a folder there that is not part of it."""
    if shutil.which("git") is None:
        pytest.skip("needs git, which is not installed here")
    package, installed = tmp_path / "src", tmp_path / "lib"
    for folder in (package, installed):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        shutil.copy(Path(_commit.__file__), folder)
    for arguments in (["init", "-q"], ["add", "src"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    return tmp_path


def test_the_commit_of_a_checkout(checkout, commit_of):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert commit_of(checkout / "src") == head.stdout.strip()
    assert commit_of(checkout / "src", ATAS_COMMIT="another") == "another"
    (checkout / "src" / "__init__.py").write_text("changed = True\n")
    assert commit_of(checkout / "src") == head.stdout.strip() + "+"


def test_a_package_that_is_installed_in_someone_elses_checkout(checkout, commit_of):
    assert commit_of(checkout / "lib") == "None"
    assert commit_of(checkout / "lib", ATAS_COMMIT="0123abc") == "0123abc"
