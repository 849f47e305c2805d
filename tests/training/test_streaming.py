"""Training from a stream of images: the same weights, to the bit, as with all of them on the device."""

import multiprocessing

import pytest
import torch
from PIL import Image

import atas
from atas import recipes
from atas.errors import AtasError, DataError, UsageError
from atas.recipes import fingerprint
from atas.training import checkpoint
from atas.training.trainer import Interrupted

STREAM = {"data.loading": "streaming", "data.workers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_data):
    """The toy data as a folder of PNG files."""
    root = tmp_path_factory.mktemp("toy")
    for half, split in (("train", toy_data.train), ("test", toy_data.test)):
        for number, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
            place = root / half / split.classes[label] / f"{number:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(place)
    return root


@pytest.fixture
def train_folder(train_toy, folder, tiny_net):
    def train(out, loading, **options):
        values = {"data.name": "imagefolder", "data.root": str(folder), "data.size": 8, "data.loading": loading}
        return train_toy(out, values=values, data=None, model=tiny_net(channels=3), **options)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "free", "yopo", "pgd"])
def test_the_same_run(method, tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "resident", method)
    train_toy(tmp_path / "streaming", method, STREAM)
    assert_same_run(tmp_path / "resident", tmp_path / "streaming")
    assert not multiprocessing.active_children()


def test_the_same_run_with_images_held_out(tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "resident", values={"training.on_collapse": "rollback"})
    train_toy(tmp_path / "streaming", values={"training.on_collapse": "rollback", **STREAM})
    assert_same_run(tmp_path / "resident", tmp_path / "streaming")


@pytest.mark.slow
def test_from_files_and_from_a_packed_set(tmp_path, train_folder, folder, train_toy, tiny_net, observer):
    atas.data.pack(folder, tmp_path / "packed", size=8)
    packed = {"data.name": "packed", "data.root": str(tmp_path / "packed")}
    live = observer()
    runs = [
        train_folder(tmp_path / "1", "resident"),
        train_folder(tmp_path / "2", "streaming", live=live),
        train_toy(tmp_path / "3", values=packed, data=None, model=tiny_net(channels=3)),
        train_toy(tmp_path / "4", values=packed | STREAM, data=None, model=tiny_net(channels=3)),
    ]
    assert any(f"are streamed from {folder}" in text for text in live.said)
    first = runs[0].model.state_dict()
    for run in runs[1:]:
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, first[name]), name
    test = atas.data.load("packed", tmp_path / "packed").test
    results = [
        atas.evaluate(runs[3].model, *given, threat=atas.Linf(0.1), attacks=("fgsm",))
        for given in ((test.images[:], test.labels), (test.images, test.labels), (test, None))
    ]
    assert results[0].accuracy == results[1].accuracy == results[2].accuracy


@pytest.mark.slow
def test_stopped_in_the_middle_of_an_epoch_and_gone_on_with(tmp_path, train_toy, interrupt_after, assert_same_run):
    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "stopped", values=STREAM, live=interrupt_after(6))
    assert not multiprocessing.active_children()
    train_toy(tmp_path / "stopped", values=STREAM, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_begun_as_a_stream_and_ended_resident(tmp_path, train_toy, interrupt_after, rows_of):
    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "stopped", values=STREAM, live=interrupt_after(6))
    train_toy(tmp_path / "stopped", values={"data.loading": "resident"}, resume=True)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("streaming", "resident"), ("resident", "streaming")])
def test_files_are_the_same_images_in_either_way(ways, tmp_path, train_folder, interrupt_after, assert_same_run):
    train_folder(tmp_path / "whole", ways[0])
    with pytest.raises(Interrupted):
        train_folder(tmp_path / "parts", ways[0], live=interrupt_after(6))
    train_folder(tmp_path / "parts", ways[1], resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["streaming", "resident"])
def test_checkpoints_with_one_fingerprint_go_on(way, tmp_path, train_folder, folder, interrupt_after, assert_same_run):
    """As they were written before there were several."""
    train_folder(tmp_path / "whole", way)
    with pytest.raises(Interrupted):
        train_folder(tmp_path / "parts", way, live=interrupt_after(6))
    path = tmp_path / "parts" / "checkpoints" / "last.safetensors"
    tensors, state = checkpoint.load(path)
    images = atas.data.load("imagefolder", folder, size=8, lazy=way == "streaming").train
    checkpoint.save(path, tensors, {**state, "data": images.fingerprint()[:16]})
    train_folder(tmp_path / "parts", way, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_second_interrupt_leaves_no_process(tmp_path, train_toy, observer):
    def stop(batches):
        if batches == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "run", values=STREAM, live=observer(on_batch=stop))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_resume_goes_on(tmp_path, train_toy, observer, assert_same_run):
    def kill(batches):
        if batches == 6:
            multiprocessing.active_children()[0].kill()

    train_toy(tmp_path / "whole", values={"training.checkpoint_every": 0.0})
    often = {"training.checkpoint_every": 0.0, **STREAM}
    with pytest.raises(AtasError, match="was killed by SIGKILL"):
        train_toy(tmp_path / "killed", values=often, live=observer(on_batch=kill))
    assert not multiprocessing.active_children()
    train_toy(tmp_path / "killed", values=often, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_damaged_file_ends_the_run(tmp_path, train_folder, folder):
    path = folder / "train" / "0" / "000.png"
    raw = path.read_bytes()
    path.write_bytes(raw[:20])
    try:
        with pytest.raises(DataError, match=r"cannot decode .*000.png"):
            train_folder(tmp_path / "run", "streaming")
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"data.loading": "stream"}, "did you mean 'streaming'"),
        ({"data.workers": 0}, "data.workers must be at least 1"),
    ],
)
def test_values_that_are_refused(toy_recipe, value, words):
    with pytest.raises(UsageError, match=words):
        toy_recipe().with_values(value)


def test_how_images_are_loaded_may_change_at_a_resume(toy_recipe):
    one, other = toy_recipe(), toy_recipe(values=STREAM)
    assert fingerprint.recipe_fingerprint(one) == fingerprint.recipe_fingerprint(other)
    assert recipes.load(one).data.loading == "auto"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_the_same_run_on_a_gpu(kind, tmp_path, train_toy):
    values = {"engine.device": "cuda", "engine.kind": kind, "engine.deterministic": True, "engine.precision": "float32"}
    runs = [train_toy(tmp_path / name, values=values | more) for name, more in (("1", {}), ("2", STREAM))]
    states = [run.model.state_dict() for run in runs]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
