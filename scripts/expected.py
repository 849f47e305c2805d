"""Write the table `[expected]` of the CIFAR-10 recipes from the records in `results/`.

    python scripts/expected.py

`atas evaluate`, `atas report` and `atas ls` read the table. Those of the digits have no records and are kept as they
are.
"""

from __future__ import annotations

from pathlib import Path

from atas import recipes
from atas.sweeps import Record, Store, Trial
from atas.sweeps.record import summarize_seeds

_HERE = Path(__file__).parent.parent
_RECIPES, _RESULTS = _HERE / "src" / "atas" / "recipes", _HERE / "results"
_HEADER = "[expected]  # accuracy in percent; no part of the training\n"


def table(records: list[Record]) -> str:
    """Return the table of the records that have the most attacks."""
    names = max((record.attacks for record in records), key=len)
    records = [record for record in records if not record.missing_attacks(names)]
    hardware = " and ".join(sorted({record.hardware for record in records}))
    lines = [
        f"examples = {records[0].n}",
        f"seeds = {[record.seed for record in records]}",
        f'hardware = "{hardware}"',
        *(f"{name} = {_accuracy(records, name)}" for name in names),
    ]
    if any(record.collapsed_in for record in records):
        lines.append("collapsed = true")
    return _HEADER + "".join(f"{line}\n" for line in lines)


def _accuracy(records: list[Record], name: str) -> str:
    stats = summarize_seeds(records, name)
    assert stats is not None
    if stats.runs == 1:
        return f"{stats.value:.2f}"
    return f"{{ mean = {stats.value:.2f}, min = {stats.low:.2f}, max = {stats.high:.2f} }}"


def updated_recipes() -> dict[Path, str]:
    """Return the content of every recipe that was trained unchanged and attacked, with its table at the end."""
    rows = Store(_RESULTS / "cifar10").by_row() | Store(_RESULTS / "record").by_row()
    contents = {}
    for name in recipes.names():
        records = [record for record in rows.get(Trial(name).row, []) if len(record.attacks) > 1]
        if records:
            path = _RECIPES / f"{name}.toml"
            training, _, _ = path.read_text(encoding="utf-8").partition(_HEADER)
            contents[path] = f"{training.rstrip()}\n\n{table(records)}"
    return contents


if __name__ == "__main__":
    for path, content in updated_recipes().items():
        path.write_text(content, encoding="utf-8")
