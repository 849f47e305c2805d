"""Statements of pages about the code, and the generators of pages."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from atas import methods

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a module of `scripts/docs`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    yield importlib.import_module
    for name in ("command_page", "recipe_page", "results_page"):
        sys.modules.pop(name, None)


def test_every_key_has_a_sentence_and_every_sentence_a_key(script):
    page = script("recipe_page")
    meanings = page.meanings_of_keys()
    known = {section: {key for key, *_ in page.keys(kind)} for section, kind in page.sections().items()}
    users = {key: {name for name in methods.names() if key in methods.settings(name)} for key in meanings["settings"]}
    known["settings"] = {key for name in methods.names() for key in methods.settings(name)}
    assert {section: set(keys) for section, keys in meanings.items()} == known, "write it into scripts/docs/keys.toml"
    for key, meaning in meanings["settings"].items():
        assert isinstance(meaning, str) or set(meaning) == users[key], key


def test_the_page_of_recipes(script):
    page = script("recipe_page").page()
    kept = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    assert kept == page, "run python scripts/docs/recipe_page.py"
    assert key_section(page, "method.eps").endswith('Type: number. Default: `"8/255"`.')
    assert key_section(page, "schedule.milestones").endswith('Type: list of numbers. Default: `["24/30", "28/30"]`.')
    assert key_section(page, "method.clip").endswith(
        'Type: 2 numbers or multiples of eps or `"auto"`. Default: `"auto"`. Methods: `atas`, `atas-plus`.'
    )
    assert key_section(page, "targets.teacher_temperature").endswith("Type: 2 numbers. Default: `[2.5, 2]`.")
    assert "Type: 2 numbers. Default: `[0.1, 0.5]`." in key_section(page, "method.ratio")
    assert "- `trades`: Weight of the divergence" in key_section(page, "method.beta")
    for name in methods.names():
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == list(methods.settings(name)), name


def key_section(page: str, key: str) -> str:
    """Return the text below the heading of a key."""
    (text,) = re.findall(rf"^### {re.escape(key)}\n\n(.*?)\n\n(?=#|\Z)", page + "\n\n", re.MULTILINE | re.DOTALL)
    return str(text)


def test_the_names_for_completion(script):
    kept = (ROOT / "src" / "atas" / "cli" / "completion.json").read_text(encoding="utf-8")
    assert kept == script("recipe_page").completion_names(), "run python scripts/docs/recipe_page.py"


def test_the_page_of_the_command_has_every_option(script):
    page = script("command_page")
    text = page.page()
    for path in ([name] for name in ("ls", "train", "evaluate", "compare", "report", "export", "reproduce", "bench")):
        printed = page.help_of(*path)
        assert f"## atas {path[0]}\n" in text
        for option in set(re.findall(r"--[a-z][a-z-]*", printed.partition("Options:")[2])) - {"--help"}:
            assert f"`{option}" in text or option in text, option
        for example in page.read(printed).examples:
            assert example in text


def test_help_is_parsed(script):
    text = """Usage: atas x [OPTIONS]

  Do this.

  Example: atas x --a
           atas x --b

Options:
  --a <int>  First
             line.  [default: 1]
  --a-very-long-option <one|two>
             Second, comma-
             separated.
  --help     Show this message and exit.
"""
    parsed = script("command_page").read(text)
    assert (parsed.usage, parsed.about, parsed.examples) == (
        "atas x [OPTIONS]",
        "Do this.",
        ["atas x --a", "atas x --b"],
    )
    rows = [("--a <int>", "First line.  [default: 1]"), ("--a-very-long-option <one|two>", "Second, comma-separated.")]
    assert parsed.tables["Options:"][:2] == rows


def test_the_table_of_methods():
    """Names and BatchNorm modes are those of the code, costs those of the measurement."""
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == methods.names()
    measured = json.loads((ROOT / "results" / "step-cost-cpu.json").read_text())["rows"]
    for name, _, mode, _, cost, _ in ((row[0].strip("`"), *row[1:]) for row in rows):
        assert mode == ("-" if name == "standard" else methods.get(name).attack_mode), name
        assert cost == f"{measured[name]['relative']:.1f}", name


def test_the_wilson_intervals_of_the_page_on_reading():
    from atas.evaluation import wilson

    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    for images in (500, 1000, 10000):
        low, high = wilson(images * 45 // 100, images)
        assert f"| {images:,} | {100 * low:.1f} to {100 * high:.1f} |" in text


def test_names_on_the_pages_of_the_reference_exist():
    pages = list((ROOT / "docs" / "reference").glob("*.md"))
    assert len(pages) >= 8
    named = 0
    for page in pages:
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            named += 1
            parts = name.split(".")
            for length in range(len(parts) - 1, 0, -1):
                try:
                    found = importlib.import_module(".".join(parts[:length]))
                except ImportError:
                    continue
                break
            for part in parts[length:]:
                found = getattr(found, part)
            assert found.__doc__, name
    assert named >= 20


def test_targets_of_links_between_files_exist():
    """Links to generated pages are checked when the site is built."""
    generated = {ROOT / "docs" / name for name in ("reference/command.md", "results.md")}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert target.startswith("http") or path.exists() or path in generated, (
                f"{page.relative_to(ROOT)}: {target}"
            )


def test_everything_public_is_in_the_reference():
    import atas

    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    modules = {"attacks", "data", "export", "methods", "models", "__version__"}
    missing = [
        name for name in set(atas.__all__) - modules if not re.search(rf"^::: atas\.(\w+\.)*{name}$", text, re.M)
    ]
    assert not missing
