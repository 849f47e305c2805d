"""A release: the check of tag, version, changelog and built files, and the workflows that use it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import atas

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def checkout(tmp_path):
    """A checkout of a version that is ready for its release."""
    files = {
        "src/atas/__init__.py": '"""Text: __version__ = "9.9.9"."""\n\n__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2031-05-06\n\n- A change.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.py", tmp_path / "scripts")
    return tmp_path


@pytest.fixture
def check(checkout):
    """Run the check in the checkout; its status and its sentences."""

    def run(*arguments):
        command = [sys.executable, "-S", "scripts/release.py", *arguments]  # without any installed package
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()

    return run


def build(checkout, *names):
    (checkout / "dist").mkdir()
    for name in names:
        (checkout / "dist" / name).touch()
    return [f"dist/{name}" for name in names]


def test_a_tag_that_fits(check, checkout):
    assert check("v1.2.3") == (0, [])
    built = build(checkout, "atas-1.2.3.tar.gz", "atas-1.2.3-py3-none-any.whl")
    assert check("v1.2.3", *built) == (0, [])


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3", "v1.2.3rc1", "V1.2.3", ""])
def test_a_tag_of_another_version(check, tag):
    status, (sentence,) = check(tag)
    assert status == 1
    assert sentence == f"the tag {tag} does not belong to version 1.2.3: correct src/atas/__init__.py, or tag v1.2.3"


@pytest.mark.parametrize("heading", ["## [1.2.2] - 2031-05-06", "## [1.2.3]", "## [1a2b3] - 2031-05-06"])
def test_a_changelog_without_the_version(check, checkout, heading):
    text = (checkout / "CHANGELOG.md").read_text(encoding="utf-8").replace("## [1.2.3] - 2031-05-06", heading)
    (checkout / "CHANGELOG.md").write_text(text, encoding="utf-8")
    status, (sentence,) = check("v1.2.3")
    assert status == 1
    assert sentence.startswith("CHANGELOG.md has no entry for version 1.2.3")


@pytest.mark.parametrize(
    "names",
    [
        ("atas-1.2.3.tar.gz",),
        ("atas-1.2.2.tar.gz", "atas-1.2.3-py3-none-any.whl"),
        ("atas-1.2.3.tar.gz", "atas-1.2.3-py3-none-any.whl", "atas-1.2.2-py3-none-any.whl"),
    ],
)
def test_wrong_files_are_named(check, checkout, names):
    status, (sentence,) = check("v1.2.3", *build(checkout, *names))
    assert status == 1
    assert all(name in sentence for name in (*names, "atas-1.2.3.tar.gz"))


def test_files_that_do_not_exist(check):
    status, (sentence,) = check("v1.2.3", "dist/*")  # as a shell leaves it in an empty folder
    assert status == 1
    assert sentence.startswith("the built files are none")


def test_without_a_tag(check):
    status, lines = check()
    assert status == 1
    assert lines[0].startswith("usage: python scripts/release.py TAG")


def test_the_script_reads_the_version_of_this_package():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "release.py"), "v0.0.0"], capture_output=True, text=True, check=False
    )
    assert f"does not belong to version {atas.__version__}" in done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid(path):
    """The keys are those of GitHub Actions, every job has a limit of time, and no step can write to the repository."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(workflow) - {True} <= {"name", "permissions", "concurrency", "jobs"}  # YAML 1.1 reads `on` as True
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 90
        assert job.get("needs", next(iter(jobs))) in jobs
        assert job.get("permissions", {}).keys() <= {"id-token"}
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_has_no_secret(path):
    text = path.read_text(encoding="utf-8")
    actions = re.findall(r"uses: (\S+)", text)
    assert actions
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@(?:v\d+|release/v\d+)", action) for action in actions)
    assert not re.search(r"secrets\.|^ *(?:user|password|api-token):", text, re.MULTILINE)


def test_the_workflows_cover_the_supported_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert project["requires-python"] == f">={supported[0]}"
    for path in WORKFLOWS:
        (versions,) = re.findall(r"^ +python: \[(.*)\]$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert re.findall(r'"(.*?)"', versions) == supported


def test_the_steps_of_a_release_are_in_order():
    text = next(path for path in WORKFLOWS if path.stem == "release").read_text(encoding="utf-8")
    steps = [
        'release.py "$GITHUB_REF_NAME"\n',
        "python -m build",
        "twine check --strict",
        "dist/*\n",
        "[dev]",
        "pytest",
    ]
    places = [text.index(step) for step in [*steps, "gh-action-pypi-publish"]]
    assert places == sorted(places)
    ci = next(path for path in WORKFLOWS if path.stem == "ci").read_text(encoding="utf-8")
    assert re.search(r"run: \.ci/run$", ci, re.MULTILINE)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
