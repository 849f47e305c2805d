"""Two trainings in one folder: the second is refused or continues the first, and never deletes what the first made."""

import threading
from contextlib import suppress

import pytest

import atas
from atas._utils import files
from atas.errors import UsageError
from atas.training import TrainingProgress, job

QUICK = {"training.epochs": 1}


@pytest.fixture
def during(toy_recipe, toy_data, tiny_net):
    """Train in a folder, and call `between` after the command has looked at the folder for the first time."""

    def train(folder, between, **options):
        recipe, live = toy_recipe("fgsm", QUICK), TrainingProgress(quiet=True)
        with pytest.MonkeyPatch.context() as patch:
            lock = job.file_lock

            def late(path, sentence):
                patch.setattr(job, "file_lock", lock)
                between()
                return lock(path, sentence)

            patch.setattr(job, "file_lock", late)
            return atas.train(recipe, out=folder, data=toy_data, model=tiny_net(), live=live, **options)

    return train


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_another_process_finished_meanwhile_is_kept(tmp_path, during, train_toy):
    folder, kept = tmp_path / "run", {}

    def first():
        train_toy(folder, "fgsm", QUICK | {"training.seed": 1})
        kept.update(contents(folder))

    with pytest.raises(UsageError, match=r"there is a run in .* already; continue it with --resume"):
        during(folder, first)
    assert contents(folder) == kept


def test_resume_continues_what_another_process_began_meanwhile(tmp_path, during, train_toy):
    folder, written = tmp_path / "run", []

    def first():
        train_toy(folder, "fgsm", QUICK)
        written.append((folder / "recipe.toml").stat().st_mtime_ns)

    during(folder, first, resume=True)
    assert (folder / "recipe.toml").stat().st_mtime_ns == written[0], "no new run was started"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_was_filled_with_something_else_meanwhile_is_refused(tmp_path, during):
    folder = tmp_path / "thesis"

    def fill():
        folder.mkdir()
        (folder / "chapter1.txt").write_text("it was a dark and stormy night")

    with pytest.raises(UsageError, match="not empty and not the folder of a run"):
        during(folder, fill)
    assert [path.name for path in folder.iterdir()] == ["chapter1.txt"]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_run_under_way_is_left_alone(options, tmp_path, train_toy, observer, monkeypatch):
    """Refused before data is loaded, and the run ends as if nothing had been tried."""
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.0)
    refused = []

    def second(seen):
        if seen == 2:
            try:
                train_toy(tmp_path / "run", "fgsm", **options)
            except atas.AtasError as error:
                refused.append(str(error))

    train_toy(tmp_path / "run", "fgsm", live=observer(on_batch=second))
    (sentence,) = refused
    expected = "another process trains in" if options else "there is a run in"
    assert sentence.startswith(expected), sentence
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_many_at_once_make_one_run(tmp_path, train_toy):
    """Of eight that start together one trains; each of the others is told why it does not."""
    done, refused, ready = [], [], threading.Barrier(8)

    def train(seed):
        ready.wait()
        try:
            train_toy(tmp_path / "run", "fgsm", QUICK | {"training.seed": seed})
            done.append(seed)
        except atas.AtasError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    assert len(refused) == 7
    assert all(sentence.startswith(("there is a run in", "another process trains in")) for sentence in refused)
    assert f"seed = {done[0]}" in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path, train_toy):
    with suppress(atas.AtasError):
        train_toy(tmp_path / "deep" / "run", values={"method.c": -1.0})
    with suppress(atas.AtasError):
        train_toy(tmp_path / "deep" / "run", values={"training.probe": 60, "training.on_collapse": "stop"})
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    with suppress(atas.AtasError):
        train_toy(tmp_path / "empty", values={"training.probe": 60, "training.on_collapse": "stop"})
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
