"""`atas evaluate --root`: data from another folder, which may mean something else by its classes."""

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
from PIL import Image

import atas
from atas.models.weights import read_weights, save_weights

RECIPE = """\
[data]
name = "imagefolder"
root = "{root}"
size = 8
pad = 0

[model]
name = "small-cnn"

[method]
name = "fgsm"
eps = 0.1

[training]
epochs = 1
batch_size = 4
probe = 2

[engine]
device = "cpu"

[evaluation]
attacks = ["fgsm"]
"""


def draw(root, classes, count=3, shift=0):
    """A folder of images: each class has a grey of its own."""
    for half in ("train", "test"):
        for number, name in enumerate(classes):
            (root / half / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (60 + 120 * number + i + shift,) * 3).save(root / half / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A run on the classes cat and dog, and its data."""
    folder = tmp_path_factory.mktemp("folders")
    (folder / "r.toml").write_text(RECIPE.format(root=draw(folder / "own", ["cat", "dog"])))
    with redirect_stdout(io.StringIO()):
        atas.train(folder / "r.toml", out=folder / "run")
    return folder


@pytest.fixture
def run(once, tmp_path):
    """The same, to do things to."""
    return shutil.copytree(once / "run", tmp_path / "run")


@pytest.mark.parametrize(
    ("classes", "parts"),
    [
        (["1dog", "2cat"], ["only in the data: 1dog, 2cat; missing there: cat, dog"]),
        (["dog"], ["(missing there: cat)"]),
        (["bird", "cat", "dog"], ["(only in the data: bird)"]),
    ],
    ids=" ".join,
)
def test_other_classes_are_refused(classes, parts, command, run, contents, tmp_path):
    before, root = contents(run), draw(tmp_path / "other", classes)
    parts = [*parts, "pass data with the same class names in the same order"]
    command("evaluate", run, "--root", root).sentence(*parts, status=1)
    weights = ["--weights", run / "model.safetensors", "--data", "imagefolder", "--root", root, "--size", 8]
    command("evaluate", *weights, "--eps", "0.1").sentence(*parts, status=1)
    assert contents(run) == before


def test_another_order_is_refused(command, run):
    path = run / "model.safetensors"
    about, _ = read_weights(path)
    save_weights(path, atas.load(run), about | {"classes": ["dog", "cat"]})
    command("evaluate", run).sentence("(their order)", status=1)


@pytest.mark.slow
def test_classes_without_names_match_any(evaluate_json, run):
    """Arrays have none, and weights of other programs say nothing of them."""
    path = run / "model.safetensors"
    about, _ = read_weights(path)
    model = atas.load(run)
    for classes in ({"classes": ["0", "1"]}, {}):
        save_weights(path, model, {key: value for key, value in about.items() if key != "classes"} | classes)
        assert evaluate_json(run)["n"] == 6


@pytest.mark.slow
def test_weights_are_evaluated_on_images_of_the_size_that_they_know(evaluate_json, run, once):
    """Not at the default for folders, 224 pixels, where an unresized network would answer without a complaint."""
    weights = ["--weights", run / "model.safetensors", "--data", once / "own", "--eps", "0.1", "--attacks", "fgsm"]
    assert evaluate_json(*weights)["protocol"]["image_shape"] == [3, 8, 8]
    assert evaluate_json(*weights, "--size", 16)["protocol"]["image_shape"] == [3, 16, 16]


@pytest.mark.slow
def test_test_images_alone_are_enough(command, evaluate_json, run, tmp_path):
    root = draw(tmp_path / "later", ["cat", "dog"], 4)
    shutil.rmtree(root / "train")
    command("evaluate", run, "--data", root).sentence("--data cannot be", f"--root {root}", status=2)
    assert evaluate_json(run, "--root", root)["n"] == 8
    assert (run / "later-evaluation.json").exists()


def saved(folder):
    """The results of a folder, by name."""
    return {path.name: json.loads(path.read_text())["data"] for path in folder.glob("*evaluation*.json")}


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [False, True], ids=["first", "later"])
def test_other_images_go_beside_the_result(evaluated, evaluate_json, run, tmp_path):
    own = {"evaluation.json": evaluate_json(run)["data"]} if evaluated else {}
    for count in (2, 4):  # images a class: fewer than the run's own, and more
        root = draw(tmp_path / f"set{count}", ["cat", "dog"], count, shift=20)
        own[f"set{count}-evaluation.json"] = evaluate_json(run, "--root", root)["data"]
    assert saved(run) == own


@pytest.mark.parametrize("evaluated", [False, True], ids=["first", "later"])
def test_the_run_s_own_images_may_have_moved(evaluated, evaluate_json, once, run, tmp_path):
    if evaluated:
        evaluate_json(run, "--examples", 4)
    moved = shutil.copytree(once / "own", tmp_path / "moved")
    found = evaluate_json(run, "--root", moved)
    assert saved(run) == {"evaluation.json": found["data"]}
