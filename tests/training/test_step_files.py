"""One training step of ATAS is read in nine files; what else it calls need not be read to follow it."""

import sys
from pathlib import Path

import atas
from atas.training.engine import Engine

ALGORITHM = {
    "training/trainer.py",
    "training/engine.py",
    "training/optim.py",
    "methods/base.py",
    "methods/atas.py",
    "core/perturbations.py",
    "core/augment.py",
    "core/autograd.py",
    "threat.py",
}
LEAVES = {
    "core/dispatch.py",
    "core/rng.py",
    "core/validation.py",
    "data/loader.py",
    "distributed/sharding.py",
    "training/metrics.py",
}


def test_a_step_is_followed_in_nine_files(tmp_path, train_toy):
    package, files, steps = Path(atas.__file__).parent, set(), []

    def profile(frame, event, _):
        """Note the files of the second step, whose caches are warm, and of its caller."""
        path = Path(frame.f_code.co_filename)
        if frame.f_code is Engine.step.__code__ and event == "call":
            steps.append(frame)
            if len(steps) == 2:
                files.add(Path(frame.f_back.f_code.co_filename).relative_to(package).as_posix())
        if event == "call" and len(steps) == 2 and package in path.parents:
            files.add(path.relative_to(package).as_posix())
        if event == "return" and len(steps) == 2 and frame is steps[1]:
            sys.setprofile(None)

    sys.setprofile(profile)
    try:
        train_toy(tmp_path / "run", "atas", {"training.epochs": 1, "engine.kind": "eager"})
    finally:
        sys.setprofile(None)
    assert files == ALGORITHM | LEAVES
