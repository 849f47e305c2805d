"""Training examples by gradient norm, as a run's folder holds them after the training."""

import pytest
import torch

import atas
from atas import attacks
from atas.errors import DataError
from atas.training import TrainingProgress, checkpoint
from atas.training.examples import measure_examples, read_examples
from atas.training.monitor import split_probe

VALUES = {"training.epochs": 2, "engine.device": "cpu", "training.probe": 40}


def train(out, **values):
    run = atas.train(
        "digits-small-cnn-atas", out=out, values=VALUES | values, live=TrainingProgress(quiet=True), overwrite=True
    )
    return run, out / "training_examples.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that holds the monitor's images out, so that its rows are not those of the data set."""
    return train(tmp_path_factory.mktemp("runs") / "run", **{"training.on_collapse": "stop"})


def test_convolutions_are_not_searched_for_a_few_batches(trained, monkeypatch):
    """The engine switches the search on; it takes longer than these passes."""
    run, _ = trained
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen, norms = set(), torch.ones(10)
    hook = run.model.register_forward_hook(lambda *_: seen.add(torch.backends.cudnn.benchmark))
    measure_examples(
        run.model, atas.data.load("digits").train, None, norms, norms, run.recipe.threat, epochs=1, batch_size=8
    )
    hook.remove()
    assert (seen, torch.backends.cudnn.benchmark) == ({False}, True)


def test_extremes_are_those_of_the_checkpoint(trained):
    run, path = trained
    found, data = read_examples(path), atas.data.load("digits").train
    tensors, _ = checkpoint.load(run.folder / "checkpoints" / "last.safetensors")
    norms, sizes = tensors["method.norms.average"].sqrt(), tensors["method.norms.step_size"]
    _, rows = split_probe(len(data), 40, held_out=True)
    assert (found.count, found.classes) == (len(norms), data.classes) == (len(rows), data.classes)
    order = norms.argsort(stable=True)
    chosen = torch.cat([order.flip(0)[:8], order[:8]])
    assert torch.equal(found.index, rows[chosen])
    assert torch.equal(found.norms, norms[chosen])
    assert torch.equal(found.step_sizes, sizes[chosen])
    assert torch.equal(found.images, data.images[found.index])
    assert torch.equal(found.labels, data.labels[found.index])
    assert found.deciles[:, 0].tolist() == [10] * 10, "100 images after a short training"


def test_deciles_are_counted_by_the_trained_model(trained):
    run, _ = trained
    data, n = atas.data.load("digits").train, 300
    norms = torch.rand(n, generator=torch.Generator().manual_seed(0))
    found = measure_examples(
        run.model, data, torch.arange(n), norms, norms, run.recipe.threat, epochs=10_000, batch_size=64
    )
    x, y = data.images[:n].float() / 255, data.labels[:n]
    points = attacks.pgd(run.model, x, y, run.recipe.threat, steps=10)
    with torch.no_grad():
        verdicts = [run.model(point).argmax(1) == y for point in (x, points)]
    for part, (count, clean, robust) in zip(
        norms.argsort(stable=True).tensor_split(10), found.deciles.tolist(), strict=True
    ):
        assert (count, clean, robust) == (len(part), int(verdicts[0][part].sum()), int(verdicts[1][part].sum()))


@pytest.mark.slow
def test_other_methods_have_none_and_a_new_run_removes_them(tmp_path):
    _, path = train(tmp_path / "run")
    assert path.exists()
    train(tmp_path / "run", **{"method.name": "fgsm-rs"})
    assert not path.exists()
    assert read_examples(path) is None


def test_a_resume_writes_them_again(trained):
    run, path = trained
    before = path.read_bytes()
    path.unlink()
    atas.train(out=run.folder, resume=True, live=TrainingProgress(quiet=True))
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", [0.05, 0.5, 0.95])
def test_damage_is_noticed(trained, tmp_path, place):
    content = bytearray(trained[1].read_bytes())
    content[int(place * len(content))] ^= 4
    path = tmp_path / "training_examples.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged .*write it again with: atas train --resume"):
        read_examples(path)
