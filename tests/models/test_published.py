"""Trained models by name: from a folder, a mirror and Hugging Face; anything but the published file is refused."""

import hashlib
import http.server
import sys
import threading
import types
from functools import partial

import numpy as np
import pytest
import torch

import atas
from atas.errors import DataError, UsageError
from atas.models import published
from atas.models.weights import save_weights

NAME = "tiny-model"
METADATA = {"name": "small-cnn", "num_classes": 3, "channels": 1, "mean": None, "std": None, "shape": [1, 8, 8]}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return atas.models.create("small-cnn", num_classes=3, channels=1).eval()


@pytest.fixture
def weights(tmp_path, network, monkeypatch):
    """A folder with the weights of one published model."""
    folder = tmp_path / "weights"
    path = folder / NAME / published.FILE
    path.parent.mkdir(parents=True)
    save_weights(path, network, METADATA, half=True)
    entry = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size, "what": "a test"}
    monkeypatch.setattr(published, "published", lambda: {NAME: entry})
    monkeypatch.setenv("ATAS_WEIGHTS", str(folder))
    return path


@torch.no_grad()
def check_model(model, network):
    """The loaded model is the network with kernels rounded to float16, in float32 and eval mode."""
    x = torch.rand(4, 1, 8, 8)
    assert not model.training
    assert all(value.dtype == torch.float32 for value in model.parameters())
    torch.testing.assert_close(model(x), network(x), rtol=0, atol=1e-2)
    for name, value in network.state_dict().items():
        loaded = model.state_dict()[name]
        assert torch.equal(loaded, value.half().float() if value.dim() > 1 else value), name


def test_a_model_is_loaded_by_its_name(weights, network):
    check_model(atas.load(NAME), network)


def test_a_file_that_is_not_the_published_one_is_refused(weights, network):
    save_weights(weights, network, METADATA)
    with pytest.raises(DataError, match="is not the published tiny-model"):
        atas.load(NAME)


def test_a_missing_folder_says_where_weights_are_looked_for(weights, monkeypatch):
    monkeypatch.setenv("ATAS_WEIGHTS", "/nowhere")
    with pytest.raises(DataError, match="not in /nowhere/tiny-model; set ATAS_WEIGHTS"):
        atas.load(NAME)


def test_a_folder_of_that_name_comes_first(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    with pytest.raises(DataError, match=r"recipe\.toml"):
        atas.load(NAME)


def test_an_unknown_name_suggests_the_nearest(weights):
    with pytest.raises(DataError, match="no file, run or published model tiny-modle"):
        atas.load("tiny-modle")
    with pytest.raises(UsageError, match="did you mean 'tiny-model'"):
        published.locate("tiny-modle")


def test_a_name_that_is_not_published_is_told_the_same_everywhere(weights, command, monkeypatch):
    for entries, hints in (({}, ["no model is published yet", "or train one"]), ({NAME: {}}, ["did you mean", NAME])):
        monkeypatch.setattr(published, "published", lambda entries=entries: entries)
        parts = ["there is no file, run or published model tiny-modle", *hints, "hf:owner/name"]
        with pytest.raises(DataError) as caught:
            atas.load("tiny-modle")
        assert all(part in str(caught.value) for part in parts)
        data = ["--data", "digits", "--eps", "0.1"]
        command("evaluate", "--weights", "tiny-modle", *data).sentence(*parts, status=1)
        command("train", "digits-small-cnn-fgsm", "--set", "model.weights=tiny-modle").sentence(*parts, status=1)


def test_a_folder_with_weights_is_loaded_as_a_repository_is(weights, network, command, tmp_path, monkeypatch):
    """As `atas export --to hub` writes it, before it is published."""
    folder = weights.parent
    check_model(atas.load(folder), network)
    monkeypatch.chdir(tmp_path)
    noise = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8).numpy()
    np.savez("noise.npz", x=noise, y=np.arange(6) % 3)
    options = ["--data", "noise.npz", "--eps", "0.1", "--attacks", "fgsm", "--quiet"]
    assert command("evaluate", "--weights", folder, *options).status == 0
    assert (folder.parent / f"{NAME}-evaluation.json").exists()


@pytest.fixture
def mirror(weights, monkeypatch, tmp_path):
    """The folder behind a local server, with an empty cache; returns the paths that were requested."""
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=weights.parents[1]))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("ATAS_WEIGHTS", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("ATAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_mirror_is_asked_once(mirror, network):
    check_model(atas.load(NAME), network)
    check_model(atas.load(NAME), network)
    assert mirror == [f"/{NAME}/{published.FILE}"]


def test_a_damaged_copy_is_downloaded_again(mirror, network, tmp_path):
    atas.load(NAME)
    copy = tmp_path / "cache" / "weights" / NAME / published.FILE
    copy.write_bytes(copy.read_bytes()[:100])
    check_model(atas.load(NAME), network)
    assert len(mirror) == 2


def test_a_wrong_mirror_leaves_nothing(mirror, weights, tmp_path):
    weights.write_bytes(b"something else")
    with pytest.raises(DataError, match="is not the published"):
        atas.load(NAME)
    weights.unlink()
    with pytest.raises(DataError, match=r"cannot get the weights of tiny-model: .*404"):
        atas.load(NAME)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.fixture
def hugging_face(weights, monkeypatch):
    """A stand-in for huggingface_hub with one repository, `someone/robust`; returns the calls."""
    calls = []

    def hf_hub_download(repository, file, revision=None):
        calls.append((repository, file, revision))
        if repository != "someone/robust":
            raise OSError("401 Client Error.\nRepository Not Found")
        return str(weights)

    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_hugging_face(hugging_face, network):
    check_model(atas.load("hf:someone/robust"), network)
    check_model(atas.load("hf:someone/robust@v1"), network)
    assert hugging_face == [("someone/robust", published.FILE, None), ("someone/robust", published.FILE, "v1")]
    with pytest.raises(DataError, match=r"repository someone/else \(401 Client Error"):
        atas.load("hf:someone/else")
    with pytest.raises(UsageError, match="write hf:owner/name"):
        atas.load("hf:robust")


def test_hugging_face_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'atas\[hub\]'"):
        atas.load("hf:someone/robust")


def test_the_published_models_of_this_clone_are_whole():
    for name in published.names():
        assert atas.load(name) is not None
        assert published.published()[name]["bytes"] < 24 << 20
