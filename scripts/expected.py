"""Make the figures that runs are held against from the records in `results/`.

python scripts/expected.py
"""

from __future__ import annotations

import json
from pathlib import Path

from atas.reproduce import Store, Trial
from atas.reproduce import expected as module
from atas.reproduce.expected import Expected
from atas.training import recipe

RESULTS = Path(__file__).parent.parent / "results"
_FOLDERS = ("cifar10", "digits")


def made() -> str:
    """An entry for every recipe of the package that has been run as it stands."""
    known = {row: records for name in _FOLDERS for row, records in Store(RESULTS / name).by_row().items()}
    rows = {Trial(name).row: name for name in recipe.names()}
    found = {row: Expected.of(name, known[row]) for row, name in rows.items() if row in known}
    return json.dumps({row: entry.to_json() for row, entry in found.items() if entry is not None}, indent=1) + "\n"


if __name__ == "__main__":
    Path(module.__file__).with_name(module.FILE).write_text(made(), encoding="utf-8")
