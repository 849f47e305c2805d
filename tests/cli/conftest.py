"""Recipes and runs for the command to work with."""

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

TINY = """\
[data]
name = "digits"
pad = 1
flip = false

[model]
name = "small-cnn"

[method]
name = "atas"
eps = 0.1

[training]
epochs = 1
batch_size = 512
probe = 50

[engine]
device = "cpu"

[evaluation]
attacks = ["fgsm"]
examples = 40
"""


@pytest.fixture
def tiny(tmp_path):
    """A recipe file of one epoch of three steps."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished run; not to be changed."""
    import atas

    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(TINY)
    with redirect_stdout(io.StringIO()):
        atas.train(folder / "tiny.toml", out=folder / "first")
    return folder / "first"


@pytest.fixture
def unfinished(tmp_path, finished):
    """The folder of a run that has begun and has not finished."""
    folder = tmp_path / "unfinished"
    folder.mkdir()
    for name in ("recipe.toml", "environment.json", "metrics.jsonl"):
        (folder / name).write_bytes((finished / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def finished_and_evaluated(finished, tmp_path_factory):
    """The folder of a finished run with an evaluation; not to be changed."""
    from atas.cli import app

    folder = shutil.copytree(finished, tmp_path_factory.mktemp("evaluated") / "first")
    with redirect_stdout(io.StringIO()):
        app(["evaluate", str(folder)], standalone_mode=False)
    assert (folder / "evaluation.json").exists()
    return folder


@pytest.fixture
def copy_of(tmp_path, finished):
    """A finished run to do things to."""

    def make(name="copy"):
        return shutil.copytree(finished, tmp_path / name)

    return make


@pytest.fixture
def evaluated_copy(tmp_path, finished_and_evaluated):
    """A finished run with an evaluation to do things to."""

    def make(name="copy"):
        return shutil.copytree(finished_and_evaluated, tmp_path / name)

    return make


@pytest.fixture
def contents():
    """All files of a folder, to see that none was lost."""

    def read(folder):
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read


@pytest.fixture
def no_forward_pass():
    """Fail where any network runs: a mistake must be seen before the work."""

    def fail(module, arguments):
        pytest.fail("too late: a network runs")

    hook = register_module_forward_pre_hook(fail)
    yield
    hook.remove()


@pytest.fixture
def evaluate_json(command):
    """The result of `atas evaluate --json`."""

    def run(*arguments):
        result = command("evaluate", *arguments, "--json")
        assert result.status == 0, result
        return json.loads(result.out)

    return run
