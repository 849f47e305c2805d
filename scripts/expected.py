"""Write into the recipes what they gave where they were run, by the records in `results/`.

    python scripts/expected.py

The comment that a recipe begins with says it, after the command; `atas evaluate`, `atas report` and `atas ls` read it
there. Those of the digits, which say more, are written by hand.
"""

from __future__ import annotations

from pathlib import Path

from atas import recipes
from atas.attacks.registry import display_name
from atas.sweeps import Record, Store, Trial
from atas.sweeps.seed_stats import summarize_seeds

_HERE = Path(__file__).parent.parent
_RECIPES, _RECORDS = _HERE / "src" / "atas" / "recipes", _HERE / "results" / "cifar10"


def sentence(records: list[Record]) -> str:
    """What those records say that have the most attacks."""
    names = max((record.attacks for record in records), key=len)
    known = [record for record in records if not record.missing_attacks(names)]
    seeds, hardware = [record.seed for record in known], sorted({record.hardware for record in known})
    said = [f"{display_name(name)} {_figure(known, name)}" for name in names]
    over = f"mean and range over seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"with seed {seeds[0]}"
    end = " It collapsed." if any(record.collapsed_in for record in known) else ""
    n, where = f"{known[0].n:,}", " and ".join(hardware)
    return f"Expect, on the {n} test images, {over} in percent: {', '.join(said)} ({where}).{end}"


def _figure(records: list[Record], name: str) -> str:
    found = summarize_seeds(records, name)
    assert found is not None
    return str(found) if found.runs > 1 else f"{found.value:.2f}"


def made() -> dict[Path, str]:
    """The recipes that have been run as they stand and attacked, with their comments."""
    rows, found = Store(_RECORDS).by_row(), {}
    for name in recipes.names():
        records = [record for record in rows.get(Trial(name).row, []) if len(record.attacks) > 1]
        if records:
            command, *rest = (_RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines(keepends=True)
            body = next(place for place, line in enumerate(rest) if not line.startswith("#"))
            found[_RECIPES / f"{name}.toml"] = "".join([command, f"# {sentence(records)}\n", *rest[body:]])
    return found


if __name__ == "__main__":
    for path, content in made().items():
        path.write_text(content, encoding="utf-8")
