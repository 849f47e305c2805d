"""Run the code in README and on all pages.

Blocks of a page run in order, in one folder and one namespace. A comment before a block changes that:
`<!-- skip: why -->` is not run, `<!-- needs: package -->` runs by itself if the package is installed,
`<!-- shortened: OPTIONS -->` runs with these options added to its first command, and `<!-- file: NAME -->` is the
content of a file. Commands are always checked: sub-command, options, recipe and keys must exist.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.images import noise_image

from atas import attacks, cli, methods, recipes
from atas.cli.options import parse_assignments
from atas.errors import AtasError

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (skip|needs|shortened|file): (.*?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LANGUAGES = {"python", "sh", "toml", "text"}
RUNS = ("mine", "atas", "atta", "demo/standard", "demo/fgsm", "demo/atas-plus")  # names of finished runs on the pages


@dataclass(frozen=True)
class Block:
    """A block of code: its page and line, its language, and the mark before it."""

    page: Path
    line: int
    language: str
    code: str
    mark: str
    argument: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start(3)].count("\n") + 1, match[3], match[4], match[1] or "", match[2] or "")
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [
    page for page in PAGES if any(b.language in ("python", "sh") and b.mark in ("", "shortened") for b in blocks(page))
]
MARKED = [block for block in BLOCKS if block.mark in ("skip", "needs")]


@pytest.fixture(scope="module")
def page_files(tmp_path_factory):
    """Make a folder with the files that pages expect: finished runs and a few photos."""
    folder = tmp_path_factory.mktemp("page_files")
    values = {"training.epochs": 2, "training.batch_size": 256, "method.eps": 0.2, "method.max_step": 0.4}
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        command("atas", "train", "digits-small-cnn-atas", "--out", "runs/mine", *assigned(values))
        command("atas", "evaluate", "runs/mine", "--attacks", "pgd10", "--examples", "50")
    for name in RUNS[1:]:
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    for number, split in enumerate(("train/cat", "train/dog", "test/cat", "test/dog") * 3):
        path = folder / "photos" / split / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(48, 40 + number, seed=number).save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=[str(page.relative_to(ROOT)) for page in RUN])
def test_the_code_of_a_page_runs(page, page_files, tmp_path, monkeypatch):
    shutil.copytree(page_files, tmp_path, dirs_exist_ok=True)
    if page.name in ("own.md", "tutorial.md", "evaluation.md"):
        shutil.rmtree(tmp_path / "runs")  # these pages make their own
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in blocks(page):
        if block.mark == "file":
            Path(block.argument).write_text(block.code, encoding="utf-8")
        elif block.language == "python" and not block.mark:
            run_python(block, namespace)
        elif block.language == "sh" and block.mark != "skip":
            extra = shlex.split(block.argument) if block.mark == "shortened" else []
            for words in block.commands:
                command(*words, *extra)
                extra = []


@pytest.mark.parametrize("block", MARKED, ids=map(str, MARKED))
def test_a_block_that_is_not_run_everywhere(block, page_files, tmp_path, monkeypatch):
    if block.mark == "skip":
        pytest.skip(block.argument)
    pytest.importorskip(block.argument)
    monkeypatch.chdir(tmp_path)
    run_python(block, {"__name__": "page"})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_a_command_on_a_page_exists(block):
    for words in block.commands:
        resolve(words)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_the_keys_of_a_recipe_exist(block):
    document = tomllib.loads(block.code)
    recipe = recipes.load(document.pop("extends", "imagenet-resnet18-atas"))
    recipe.with_values({f"{section}.{key}": value for section in document for key, value in document[section].items()})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_language(page):
    text = page.read_text(encoding="utf-8")
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert text.count("\n```") + text.startswith("```") == 2 * len(blocks(page))
    outside = BLOCK.sub("", text)
    assert not re.findall(r"^    (?:atas|pip|make|python) .*", outside, re.MULTILINE), (
        "commands belong into ```sh blocks"
    )
    assert len(re.findall(r"^<!-- (?:skip|needs|shortened|file):", text, re.MULTILINE)) == sum(
        bool(b.mark) for b in blocks(page)
    )


@pytest.mark.parametrize("words", ["atas trian x", "atas train --sett a=b", "atas train nothing", "make nothing"])
def test_a_wrong_command_is_detected(words):
    with pytest.raises((AssertionError, AtasError)):
        resolve(words.split())


def test_a_wrong_block_is_detected():
    block = Block(PAGES[0], 7, "python", "x = 1\nassert x == 2\n", "", "")
    with pytest.raises(AssertionError) as failure:
        run_python(block, {})
    assert failure.traceback[-1].lineno + 1 == 9  # a line of the page


def run_python(block: Block, namespace: dict[str, object]) -> None:
    """Run a block; a traceback shows the lines of the page."""
    torch.manual_seed(0)
    code = "\n" * block.line + block.code
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, str(block.page), "exec", dont_inherit=True), namespace)


def command(name: str, *words: str) -> None:
    """Run `atas ...` in this process and require status 0."""
    assert name == "atas", f"{name} cannot be run here; mark the block with <!-- skip: why -->"
    status, printed = call(*words)
    assert status == 0, f"atas {shlex.join(words)}: {printed}"


def call(*words: str) -> tuple[int, str]:
    """Return the exit status and the output of `atas ...`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.setattr(sys, "argv", ["atas", *words])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), out.getvalue()


def assigned(values: dict[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def resolve(words: list[str]) -> None:
    """Check that the commands and files in a line of shell exist."""
    if words[0] == "torchrun":
        words = words[words.index("-m") :]
    if words[:2] in (["python", "-m"], ["-m", "atas"]):
        words = words[words.index("-m") + 1 :]
    name, *rest = words
    if name == "atas":
        resolve_atas(rest)
    elif name == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest), words
    elif name == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extras in re.findall(r"\[(.*?)\]", " ".join(rest)):
            assert set(extras.split(",")) <= set(known), words
    elif name == "python":
        assert (ROOT / rest[0]).exists(), words
    else:
        assert name in ("tensorboard",), f"unknown command {words}"


def resolve_atas(words: list[str]) -> None:
    """Check the options of a sub-command, and the names of recipes, keys, attacks and methods."""
    path = words[: 2 if words[0] == "data" else 1]
    status, printed = call(*path, "--help")
    assert status == 0, printed
    options = set(re.findall(r"--[a-z][a-z-]*", printed))
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= options, f"atas {' '.join(path)} has no {used - options}"
    given = dict(pairwise(words))
    if path[0] in ("train", "bench") and len(words) > 1 and not words[1].startswith("-") and words[1] != "mine.toml":
        recipe = recipes.load(words[1])
        keys = [value for option, value in pairwise(words) if option == "--set"]
        if not any(":" in key for key in keys):  # code that the page itself writes; it is run with the page
            recipe.with_values(parse_assignments(keys))
    for attack in given.get("--attacks", "clean").split(","):
        attacks.create(attack)
    for method in given.get("--methods", "atas").split(","):
        methods.get(method)
