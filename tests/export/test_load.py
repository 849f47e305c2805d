"""`atas.load`: the model back as it was, and everything else refused in a sentence."""

import io
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import atas
from atas.errors import AtasError, DataError, UsageError
from atas.models.weights import load_weights, read_weights


@pytest.fixture(scope="module")
def exported(evaluated, tmp_path_factory):
    out = tmp_path_factory.mktemp("export")
    return next(path for path in atas.export.write(evaluated, "safetensors", out).files if path.suffix != ".md")


@torch.no_grad()
def test_the_model_comes_back_ready_for_pixels(exported, pixels, logits_of):
    model = atas.load(exported)
    assert not model.training
    assert torch.equal(model(pixels), logits_of)
    assert torch.equal(atas.load(str(exported))(pixels), logits_of)


@torch.no_grad()
def test_a_run_and_its_own_weights_load_too(evaluated, pixels, logits_of):
    assert torch.equal(atas.load(evaluated)(pixels), logits_of)
    assert torch.equal(atas.load(evaluated / "model.safetensors")(pixels), logits_of)


def test_the_file_says_what_it_is(exported, evaluated):
    with safe_open(exported, framework="pt") as file:
        (about,) = (json.loads(text) for text in file.metadata().values())
    settings = atas.Run.load(evaluated).recipe
    assert about["format"] == 1
    assert (about["name"], about["num_classes"], about["channels"]) == ("small-cnn", 10, 1)
    assert (about["shape"], about["classes"]) == ([1, 8, 8], [str(digit) for digit in range(10)])
    assert (about["mean"], about["std"]) == ([0.5], [0.25])
    assert (about["norm"], about["eps"], about["threat"]) == ("linf", 0.1, "Linf(0.1)")
    assert about["recipe_hash"] == atas.recipes.recipe_fingerprint(settings)
    assert about["atas"] == atas.__version__
    assert about["weights"] == atas.Evaluation.load(evaluated / "evaluation.json").weights
    assert "commit" in about


def test_the_callers_random_numbers_stay(exported):
    before = torch.get_rng_state()
    atas.load(exported)
    assert torch.equal(torch.get_rng_state(), before)


def test_constants_of_ones_own_come_back(train_tiny, tmp_path, pixels):
    run = train_tiny(tmp_path / "run", {"model.mean": 0.3, "model.std": 0.7, "training.epochs": 1})
    written = atas.export.write(run, "safetensors")
    model = atas.load(written.files[0])
    assert model.normalize.mean.item() == pytest.approx(0.3)
    assert torch.equal(model(pixels), run.model(pixels))


# What is refused


class Bomb:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('exploded').touch()",)


def pickled():
    return pickle.dumps(Bomb())


def saved_by_torch():
    content = io.BytesIO()
    torch.save({"bomb": Bomb()}, content)
    return content.getvalue()


def tensors(model):
    """A state dict, in the ways in which people save it."""
    found = model.state_dict()
    return {
        "plain": found,
        "checkpoint": {"epoch": 3, "state_dict": found},
        "parallel": {"model": {f"module.{name}": value for name, value in found.items()}},
    }


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "parallel"])
@pytest.mark.parametrize("old", [False, True])
def test_a_state_dict_of_torch_save_is_read(kind, old, tmp_path, small_net):
    net, other = small_net(), small_net()
    torch.save(tensors(net)[kind], tmp_path / "net.pt", _use_new_zipfile_serialization=not old)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    load_weights(tmp_path / "net.pt", other)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("length", [0x0280, 0x0580])
def test_safetensors_whose_length_looks_like_a_pickle(length, tmp_path):
    """The file begins with the length of its header, here 80 02 or 80 05."""
    path, content = tmp_path / "net.safetensors", {"weight": torch.ones(3)}

    def saved(filling):
        save_file(content, path, {"filling": "x" * filling})
        return int.from_bytes(path.read_bytes()[:8], "little")

    assert saved(length - saved(0)) == length
    _, tensors = read_weights(path)
    assert torch.equal(tensors["weight"], content["weight"])


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(2)], {}])
def test_a_file_of_torch_save_without_weights(content, tmp_path, small_net):
    torch.save(content, tmp_path / "net.pt")
    with pytest.raises(DataError, match=r"holds no state dict.*save model\.state_dict\(\)"):
        load_weights(tmp_path / "net.pt", small_net())


@pytest.mark.parametrize(("name", "loader"), [("net.onnx", "onnxruntime"), ("net.pt2", r"torch\.export\.load")])
def test_programs_are_not_weights(name, loader, tmp_path):
    (tmp_path / name).write_bytes(b"PK\x03\x04" if name.endswith("pt2") else b"\x08\x0a")
    with pytest.raises(DataError, match=rf"holds a program, not weights; load it with {loader}"):
        atas.load(tmp_path / name)


@pytest.mark.parametrize("content", [pickled(), saved_by_torch()], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_and_never_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"is a pickle.*could run any code.*safetensors\.torch\.save_file"):
        atas.load("model.safetensors")
    assert not (tmp_path / "exploded").exists()


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 0.9999))
def test_every_truncation_is_refused(share, exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    content = exported.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="cannot be read") as caught:
        atas.load(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 0.9999), bit=st.integers(0, 7))
def test_no_flipped_bit_gives_another_model(share, bit, exported, tmp_path_factory):
    """A flip in the header may concern what no one needs; one in the weights is always found."""
    path = tmp_path_factory.mktemp("flip") / "model.safetensors"
    content = bytearray(exported.read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        model = atas.load(path)
    except AtasError:
        return
    whole = load_file(exported)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


def rewritten(exported, path, about=None, tensors=None):
    """The file with something else in it."""
    with safe_open(exported, framework="pt") as file:
        ((key, text),) = file.metadata().items()
    content = json.dumps(json.loads(text) | about) if isinstance(about, dict) else about or text
    save_file(tensors or load_file(exported), path, {key: content})
    return path


@pytest.mark.parametrize(
    ("about", "part"),
    [
        ("[1, 2]", "not a JSON object"),
        ("{", "cannot be read"),
        ({"name": "small-cnnn"}, "unknown model 'small-cnnn'"),
        ({"num_classes": "ten"}, "num_classes is 'ten'"),
        ({"num_classes": 10**15}, "damaged"),
        ({"mean": [0.1, 0.2]}, "mean is"),
        ({"channels": 3, "mean": None, "std": None}, "do not fit this model"),
        ({"weights": "0" * 16}, "the hash of its tensors is wrong"),
    ],
    ids=str,
)
def test_a_damaged_header_is_refused(about, part, exported, tmp_path):
    path = rewritten(exported, tmp_path / "model.safetensors", about)
    with pytest.raises(DataError) as caught:
        atas.load(path)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_foreign_file_is_refused_until_its_model_is_given(tmp_path, pixels):
    model = atas.models.create("small-cnn", 10, 1).eval()
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    with pytest.raises(UsageError, match=r"another program wrote it; pass the network: atas\.load\(path, model="):
        atas.load(tmp_path / "foreign.safetensors")
    loaded = atas.load(tmp_path / "foreign.safetensors", model=atas.models.create("small-cnn", 10, 1))
    assert torch.equal(loaded(pixels), model(pixels))


def test_a_training_checkpoint_is_no_model(evaluated):
    with pytest.raises(UsageError, match="does not name its network"):
        atas.load(evaluated / "checkpoints" / "last.safetensors")


@pytest.mark.parametrize("name", ["nothing.safetensors", "nothing"])
def test_load_of_a_missing_file_is_refused(name, tmp_path):
    with pytest.raises(DataError, match=r"there is no file, run or published model .*nothing"):
        atas.load(tmp_path / name)


def test_a_path_is_text_or_a_path():
    with pytest.raises(UsageError, match="path must be a string or a Path; got int"):
        atas.load(5)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(DataError, match="is not the folder of a run"):
        atas.load(tmp_path)


# Networks of one's own


def test_a_file_is_no_reason_to_import_anything(exported, tmp_path, monkeypatch):
    (tmp_path / "innocent.py").write_text("import pathlib; pathlib.Path('exploded').touch()")
    monkeypatch.chdir(tmp_path)
    path = rewritten(exported, tmp_path / "model.safetensors", {"name": "innocent:build"})
    with pytest.raises(UsageError, match=r"user code \(innocent:build, 10 classes, images of shape \[1, 8, 8\]\)"):
        atas.load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_model_made_in_python_is_passed_again(train_tiny, own_net, tmp_path, pixels):
    run = train_tiny(tmp_path / "run", {"training.epochs": 1}, model=own_net())
    written = atas.export.write(run, "safetensors")
    assert "`OwnNet` is user code" in written.files[-1].read_text()
    assert "Build it for 10 classes and 1\nchannels" in written.files[-1].read_text()
    with pytest.raises(UsageError, match=r"user code \(OwnNet, 10 classes"):
        atas.load(written.files[0])
    assert torch.equal(atas.load(written.files[0], model=own_net())(pixels), run.model(pixels))
