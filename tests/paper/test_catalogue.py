"""Studies are listed and found by name without torch."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from atas.errors import UsageError
from atas.paper import catalogue, studies


def test_studies_are_the_modules_of_their_package():
    files = Path(studies.__file__).parent.glob("[!_]*.py")
    assert studies.names() == catalogue.study_names() == sorted(path.stem.replace("_", "-") for path in files)


@pytest.mark.parametrize("name", ["table-cifar", "table_cifar10"])
def test_a_wrong_name_is_answered_with_the_nearest(name):
    with pytest.raises(UsageError, match=f"unknown study '{name}'; did you mean 'table-cifar10"):
        catalogue.study_module(name)


def test_listing_imports_no_torch():
    code = "import sys; from atas.paper import catalogue; catalogue.study_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_examples():
    outcome = doctest.testmod(catalogue)
    assert outcome.attempted
    assert not outcome.failed
