"""The wheel, the version, the changelog and the citation."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import atas

ROOT = Path(__file__).parents[2]
SEMANTIC = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, so that the checkout stays as it is."""
    for name in ("setuptools", "pip"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name} to build the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run([sys.executable, "-m", *build, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(contents):
    kinds = (".py", ".typed", ".toml", ".json", ".html")
    files = [path for path in (ROOT / "src" / "atas").rglob("*") if path.suffix in kinds]
    missing = {path.relative_to(ROOT / "src").as_posix() for path in files} - contents
    assert not missing
    assert "atas/py.typed" in contents


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(contents):
    assert {name.partition("/")[0] for name in contents} == {"atas", f"atas-{atas.__version__}.dist-info"}
    assert not [name for name in contents if name.endswith((".pyc", ".png", ".safetensors"))]


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    script = (
        "import json, sys, atas\n"
        "from atas.paper import published; from atas.paper.studies import names\n"
        "from atas import recipes\n"
        "row = published.lookup('cifar10', 'preact-resnet18', 8 / 255, 'atas')\n"
        "print(json.dumps([atas.__file__, atas.__version__, recipes.names(), names(), row.accuracy('pgd10')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    path, version, recipes, studies, accuracy = json.loads(done.stdout)
    assert path == str(tmp_path / "site" / "atas" / "__init__.py")
    assert version == atas.__version__
    assert recipes == atas.recipes.names()
    assert "table-cifar10" in studies
    assert accuracy == 50.03


@pytest.mark.slow
def test_the_wheel_brings_the_command_and_the_extras(wheel):
    with zipfile.ZipFile(wheel) as file:
        folder = f"atas-{atas.__version__}.dist-info"
        points = file.read(f"{folder}/entry_points.txt").decode()
        metadata = file.read(f"{folder}/METADATA").decode()
    assert "atas = atas.cli:main" in points
    for extra in ("plots", "tensorboard", "wandb", "onnx"):
        assert f"Provides-Extra: {extra}\n" in metadata


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    """PEP 639 allows either a licence expression or classifiers for the licence."""
    with zipfile.ZipFile(wheel) as file:
        folder = f"atas-{atas.__version__}.dist-info"
        metadata = email.message_from_bytes(file.read(f"{folder}/METADATA"))
        assert f"{folder}/licenses/LICENSE" in file.namelist()
    assert metadata["License-Expression"] == "MIT"
    classifiers = metadata.get_all("Classifier")
    assert not [classifier for classifier in classifiers if classifier.startswith("License")]
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert metadata.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2206.02417"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_source_distribution_lists_what_exists():
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    named = [name for command, *names in lines if command in ("include", "graft") for name in names]
    assert len(named) > 10
    assert all((ROOT / name).exists() for name in named)
    assert not {"weights", "runs", "site"} & set(named)


def test_the_version_is_semantic_and_in_one_place():
    assert re.fullmatch(SEMANTIC, atas.__version__)
    for name in ("pyproject.toml", "CITATION.cff", "README.md"):
        assert f'"{atas.__version__}"' not in (ROOT / name).read_text(encoding="utf-8"), name
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_changelog_does_not_fall_behind():
    """Check that its newest release is this version, and the form of its headings."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(rf"\[{SEMANTIC}\] - \d{{4}}-\d{{2}}-\d{{2}}", heading), heading
    released = [heading.partition("]")[0].removeprefix("[") for heading in headings[1:]]
    assert not released or released[0] == atas.__version__
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_names_the_software_and_the_paper():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert text.startswith("cff-version: 1.2.0\n")
    assert "type: software" in text
    assert "Fast Adversarial Training with Adaptive Step Size" in text
    authors = re.findall(r"family-names: (.*)", text)
    assert authors == ["Huang", "Fan", "Liu", "Zhang", "Zhang", "Salzmann", "Süsstrunk", "Wang"]
