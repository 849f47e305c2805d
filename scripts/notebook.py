"""Run the notebook `examples/story.ipynb` and store its outputs.

    pip install nbclient ipykernel
    python scripts/notebook.py

The file depends on the code and on nothing else of the machine: no times of execution, no paths, sorted keys. It keeps
a digest of the code that gave the outputs, so that a test notices code that was changed and not run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "story.ipynb"
_DIGEST = "executed_code_sha256"  # in the metadata
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

Notebook = dict[str, Any]


def code_cells(book: Notebook) -> list[dict[str, Any]]:
    """Return the cells with code."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def digest(book: Notebook) -> str:
    """Return the SHA-256 of the code of all cells.

    >>> digest({"cells": [{"cell_type": "code", "source": ["x = 1"]}]})[:8]
    'c98ade23'
    """
    sources = ["".join(cell["source"]) for cell in code_cells(book)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def is_current(book: Notebook) -> bool:
    """Return whether the stored outputs are those of the stored code."""
    return book["metadata"].get(_DIGEST) == digest(book)


def normalize(book: Notebook) -> Notebook:
    """Return the notebook without what differs from run to run."""
    cells = []
    for cell in book["cells"]:
        kept = {key: cell[key] for key in ("cell_type", "id", "source")} | {"metadata": {}}
        if cell["cell_type"] == "code":
            outputs = [_normalize_output(output) for output in cell["outputs"] if not _is_empty(output)]
            kept |= {"execution_count": cell["execution_count"], "outputs": outputs}
        cells.append(kept)
    metadata = _METADATA | {_DIGEST: digest({"cells": cells})}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _is_empty(output: dict[str, Any]) -> bool:
    """Return whether an output shows nothing, such as a line of progress at its end."""
    return "data" in output and not any("".join(lines) for lines in output["data"].values())


def _normalize_output(output: dict[str, Any]) -> dict[str, Any]:
    return {key: {} if key == "metadata" else value for key, value in output.items() if key != "transient"}


def write(book: Notebook, path: Path) -> None:
    """Write a notebook in the form in which it is kept."""
    path.write_text(json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run all cells in a new kernel, in a temporary folder."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(book, kernel_name="python3", record_timing=False, coalesce_streams=True)
        client.resources = {"metadata": {"path": folder}}
        client.execute()
    executed = json.loads(nbformat.writes(book))  # sources as lists of lines
    write(normalize(executed), NOTEBOOK)
    print(f"written: {NOTEBOOK.name}, {NOTEBOOK.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
