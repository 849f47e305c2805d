"""Files of run folders, changed as a user or a stranger would."""

import json


def recipe_text(folder):
    """Return a run's recipe without its checksum, to be written back with changes."""
    lines = (folder / "recipe.toml").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# checksum"))


def metric_rows(folder):
    """Return the rows of a run's metrics without their checksums, to be written back with changes."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "checksum"} for line in lines]
