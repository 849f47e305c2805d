"""Check that a tag, the version, the changelog and the built files of a release agree.

    python scripts/release.py v1.2.3              # before the tag is pushed, and first in the workflow
    python scripts/release.py v1.2.3 dist/*       # the built files too

The exit status is 0 if they agree, and 1 with one sentence for each difference if not. Only the standard library is
needed: the package is read, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_version(root: Path = ROOT) -> str:
    """Return `__version__` of the package.

    >>> read_version().count(".") >= 2
    True
    """
    module = ast.parse((root / "src" / "atas" / "__init__.py").read_text(encoding="utf-8"))
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("src/atas/__init__.py has no __version__")


def problems(tag: str, files: Sequence[Path] = (), root: Path = ROOT) -> Iterator[str]:
    """Yield a sentence for everything that does not fit the tag.

    >>> list(problems("v0.0.0"))[0].startswith("the tag v0.0.0 does not belong to version")
    True
    """
    version = read_version(root)
    if tag != f"v{version}":
        yield f"the tag {tag} does not belong to version {version}: correct src/atas/__init__.py, or tag v{version}"
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no entry for version {version}: move 'Unreleased' to a heading '[{version}] - DATE'"
    if files:
        expected = {f"atas-{version}.tar.gz", f"atas-{version}-py3-none-any.whl"}
        names = {path.name for path in files if path.is_file()}
        if names != expected:
            yield f"the built files are {_list(names)} and should be {_list(expected)}"


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def main() -> int:
    """Print what does not fit, to standard error, and return the exit status."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python scripts/release.py TAG [BUILT FILES]")
    found = list(problems(sys.argv[1], [Path(name) for name in sys.argv[2:]]))
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
