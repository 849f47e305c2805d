"""Files of run folders, changed as a user or a stranger would."""


def recipe_text(folder):
    """Return a run's recipe without its checksum, to be written back with changes."""
    lines = (folder / "recipe.toml").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# checksum"))
