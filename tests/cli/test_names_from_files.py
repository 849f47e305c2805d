"""Names from files of someone else reach terminals, pages and cards as text and nothing else."""

import json
import os
import re
from pathlib import Path

import pytest
from helpers.run_files import recipe_text
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import atas
from atas._utils import console
from atas._utils.files import write_text

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m"
NAME = f"a{ESCAPE}\n[red]b\u202ec\x9bd"
SAFE = r"a\x1b]0;owned\x07\x1b[2J\x1b[31m\n[red]b\u202ec\x9bd"
ACTS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HTML = '<img src=x onerror="alert(1)"> `code` [link](http://evil) ![image](http://evil)'


@pytest.fixture
def hostile(copy_of):
    """A run whose folder, recipe, weights and results hold such names."""
    folder = copy_of(NAME.replace("/", ""))
    recipe = folder / "recipe.toml"
    name = "".join(f"\\U{ord(char):08x}" for char in f"{NAME}{HTML}")
    recipe.write_text(re.sub(r'(?m)^name = "tiny"$', lambda _: f'name = "{name}"', recipe_text(folder), count=1))
    assert atas.Run.load(folder).recipe.name == f"{NAME}{HTML}"
    return folder


def assert_plain(done):
    assert not ACTS.search(done.out + done.err), done
    assert "owned" in done.out + done.err


def test_tables(command, hostile):
    done = command("compare", hostile)
    assert done.status == 0, done
    assert_plain(done)
    assert SAFE in done.out


def test_lines_and_errors(command, hostile, tmp_path):
    assert_plain(command("report", tmp_path / f"{NAME} gone"))
    missing = command("evaluate", tmp_path / f"{NAME} gone")
    assert_plain(missing)
    missing.sentence("there is no such folder", status=1)
    assert_plain(
        command("evaluate", hostile, "--examples", "2", "--attacks", "fgsm", "--out", tmp_path / f"{NAME}.json")
    )
    assert_plain(command("train", "--set", f"data.name={NAME}", "digits-small-cnn-atas"))
    assert_plain(command(NAME))
    assert_plain(command("ls", NAME))


def test_displays(capsys):
    with console.DataProgress() as progress:
        progress.plain_interval = 0.0
        progress(NAME, 1, 2)
        progress.log(NAME)
    shown = capsys.readouterr()
    assert shown.err.count(SAFE) == 2
    assert not ACTS.search(shown.err)


def test_class_names_of_folders(command, tmp_path):
    for half in ("train", "test"):
        for name in (NAME, "other"):
            (tmp_path / half / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / half / name / "0.png")
    done = command("data", "check", "imagefolder", "--root", tmp_path, "--size", "8")
    assert done.status == 0
    assert_plain(done)
    (tmp_path / "train" / NAME / f"{NAME}.png").write_text("no image")
    done = command("data", "check", "imagefolder", "--root", tmp_path, "--size", "8")
    assert_plain(done)
    done.sentence(SAFE, "cannot be decoded", status=1)


def test_names_that_are_not_utf_8(command, tmp_path, tiny):
    odd = os.fsdecode(b"\xff\xfe")
    command("train", tiny, "--out", tmp_path / odd).sentence("\\udcff\\udcfe is not UTF-8", status=2)
    assert not (tmp_path / odd).exists()
    done = command("train", tiny, "--set", f"data.root={odd}", "--out", tmp_path / "other")
    done.sentence("data.root must be a text", status=2)
    write_text(tmp_path / "page.md", f"`atas report {odd}`")
    assert (tmp_path / "page.md").read_text() == r"`atas report \udcff\udcfe`"


def change_metadata(path, **changes):
    with safe_open(path, framework="pt") as file:
        ((key, text),) = file.metadata().items()
    save_file(load_file(path), path, {key: json.dumps(json.loads(text) | changes)})


def change_result(path, **changes):
    content = json.loads(path.read_text()) | changes
    del content["checksum"]  # a stranger leaves it out
    path.write_text(json.dumps(content))


@pytest.mark.slow
def test_the_card_and_the_pages(command, hostile):
    assert command("evaluate", hostile, "--examples", "2", "--attacks", "fgsm").status == 0
    environment = dict.fromkeys(("atas", "torch", "python", "device", "commit", "date", "command"), HTML + NAME)
    (hostile / "environment.json").write_text(json.dumps(environment))
    result = json.loads((hostile / "evaluation.json").read_text())
    protocol = result["protocol"] | {"verdict": HTML + NAME, "precision": HTML, "attacks": {HTML: {HTML: HTML}}}
    warnings = [{"kind": HTML, "text": HTML + NAME}]
    change_result(hostile / "evaluation.json", environment=environment, protocol=protocol, warnings=warnings)
    change_metadata(hostile / "model.safetensors", classes=[HTML + NAME] * 10)
    assert command("export", hostile, "--to", "safetensors").status == 0
    pages = [(hostile / "export" / "safetensors" / "README.md").read_text()]
    pages.append(atas.Evaluation.load(hostile / "evaluation.json").markdown())
    for page in pages:
        assert "onerror" in page
        text = re.sub(r"(?ms)^```toml$.*?^```$", "", page)  # in a block of code, whose lines cannot begin otherwise
        assert "<img" not in text
        assert "](http://evil" not in text
        assert "\n[red]" not in page
        assert not ACTS.search(page)
        assert page.count("\n```toml") == page.count("\n```\n\n##") + page.endswith("```\n") or "```python" in page
    assert command("report", hostile).status == 0
    assert "<img src=x" not in (hostile / "report.html").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": "1)+__import__('os').system('touch ran')#"},
        {"num_classes": "10"},
        {"shape": ["<b>", 8, 8]},
        {"shape": 3},
        {"classes": "0123456789"},
        {"mean": ["0"], "std": ["1"]},
    ],
)
def test_numbers_in_texts_and_code_are_numbers(command, copy_of, changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of()
    change_metadata(folder / "model.safetensors", **changes)
    with pytest.raises(atas.AtasError, match=r"is damaged \(its metadata: "):
        atas.Run.load(folder, model=atas.models.create("small-cnn", 10, 1))
    with pytest.raises(atas.AtasError, match=r"is damaged \(its metadata: "):
        atas.export.write(folder, "robustbench")
    assert not (tmp_path / "ran").exists()


def test_text_is_printed_in_two_places():
    """The functions of `_utils.console`, and the one that ends the command with a sentence."""
    package = Path(atas.__file__).parent
    printing = re.compile(r"(?<![\w_])print\(|\.write_line\(|sys\.std(out|err)\.write\(")
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if printing.search(path.read_text())}
    assert files == {"_utils/console.py", "cli/__init__.py"}
    echoes = [
        line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if "typer.echo(" in line
    ]
    for line in echoes:
        assert re.match(r"typer\.echo\((json\.dumps\(|_json\(|text\)|__version__\)|f\"atas: \{printable\()", line), line
