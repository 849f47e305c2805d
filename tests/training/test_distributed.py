"""Several processes train what one trains alone, go on where another number stopped, and end together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import atas
from atas._utils.system import available_cpus
from atas.distributed.world import init
from atas.errors import AtasError, UsageError
from atas.training import checkpoint

METHODS = ("atas", "atta", "fgsm-rs", "free", "yopo", "trades", "sora", "aaer", "elle", "fgsm-pgi")
OTHERS = tuple(name for name in atas.methods.names() if name not in METHODS)
OWN = {
    "atas": {"method.warmup_epochs": 1, "method.reset_every": 2, "method.max_step": 0.2, "method.clip": (0.02, 0.15)},
    "atta": {"method.reset_every": 2, "method.step_size": 0.05},
    "free": {"method.replays": 2},
    "yopo": {"method.outer": 2, "method.inner": 2, "method.step_size": 0.03},
    "trades": {"method.steps": 2},
    "pgd": {"method.steps": 2},
    "mart": {"method.steps": 2},
    "fgsm-rs-cs": {"method.stride": 0, "method.gamma": 1e-3},  # active in the second of two epochs
    "fgsm-mep-cs": {"method.stride": 0, "method.gamma": 1e-3},
    "elle": {"method.sensitivity": 0.0},  # its penalty jumps in ten steps
}


@pytest.fixture(scope="module")
def ranks():
    """Train in processes that are forked from one: `ranks(2, out, settings)`; the answer of ranks.py."""
    server = subprocess.Popen(
        [sys.executable, "-m", "helpers.ranks"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(processes, out, settings, net="plain", **job):
        file = out.with_name(f"{out.name}.toml")
        file.write_text(settings.to_toml())
        job |= {"processes": processes, "out": str(out), "recipe": str(file), "net": net}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield run
    server.stdin.close()
    server.wait()
    server.stdout.close()


@pytest.fixture(scope="module")
def train(ranks):
    """As `ranks`, for a training that must end well."""

    def run(processes, out, settings, net="plain", **job):
        answer = ranks(processes, out, settings, net, **job)
        assert answer["codes"] == [0] * processes, answer["said"]
        return answer

    return run


@pytest.fixture(scope="module")
def settings_of(toy_recipe):
    """A recipe of ten steps in four shards of unequal size; the last batch of an epoch has one example."""

    def make(method="atas", **values):
        usual = {"training.batch_size": 8, "training.epochs": 2, "data.shards": 4, "engine.sync_batchnorm": True}
        exact = {"method.dtype": "float32"} if method.startswith(("at", "fgsm-p", "fgsm-mep")) else {}
        return toy_recipe(method, usual | exact | OWN.get(method, {}) | values)

    return make


def assert_same_training(folder, other, rows_of):
    """Two runs come to the same in float64, whatever the number of their processes."""
    (tensors, state), (tensors_2, state_2) = (
        checkpoint.load(place / "checkpoints" / "last.safetensors") for place in (folder, other)
    )
    assert list(tensors) == list(tensors_2)
    for name, tensor in tensors.items():
        exact = tensor.dtype == torch.float64  # what is remembered of examples is rounded to float32
        torch.testing.assert_close(tensors_2[name], tensor, rtol=0, atol=1e-9 if exact else 1e-5, msg=name)
    for key in ("epoch", "batch", "updates", "rollbacks", "monitor", "data", "recipe"):
        assert state[key] == state_2[key], key
    mine, others = ([row for row in rows_of(place) if row.get("event") != "resume"] for place in (folder, other))
    assert len(mine) == len(others)
    for row, row_2 in zip(mine, others, strict=True):
        assert row.keys() == row_2.keys()
        for key, value in row.items():
            assert row_2[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def assert_all_have_the_same_model(folder, processes):
    models = [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]
    for model in models[1:]:
        for name, tensor in models[0].items():
            assert torch.equal(tensor, model[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "net", "several"),
    [
        ("atas", "plain", (2, 4)),
        ("atas", "norm", (2, 3, 4)),
        *((method, "plain", (4,)) for method in METHODS[1:]),
        *((method, "norm", (3,)) for method in METHODS[1:]),  # of four shards, one process has two
    ],
)
def test_several_processes_are_one(method, net, several, train, settings_of, tmp_path, rows_of):
    for processes in (1, *several):
        train(processes, tmp_path / str(processes), settings_of(method), net)
    for processes in several:
        assert_same_training(tmp_path / "1", tmp_path / str(processes), rows_of)
        assert_all_have_the_same_model(tmp_path / str(processes), processes)


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_every_method_knows_processes(method, train, settings_of, tmp_path, rows_of):
    for processes in (1, 3):  # of four shards, one process has two
        train(processes, tmp_path / str(processes), settings_of(method), "norm")
    assert_same_training(tmp_path / "1", tmp_path / "3", rows_of)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
def test_weights_are_perturbed_along_the_gradient_of_all_processes(form, train, settings_of, tmp_path, rows_of):
    """Of a global batch in which processes have unequal parts, and in the last one none."""
    settings = settings_of("atas", **{"optimizer.perturb": form, "optimizer.perturb_gamma": 0.05})
    for processes in (1, 3):
        train(processes, tmp_path / str(processes), settings, "norm")
    train(1, tmp_path / "plain", settings_of("atas"), "norm")
    assert_same_training(tmp_path / "1", tmp_path / "3", rows_of)
    assert_all_have_the_same_model(tmp_path / "3", 3)
    moved, plain = (torch.load(tmp_path / name / "rank0.pt") for name in ("1", "plain"))
    assert (moved["fc.weight"] - plain["fc.weight"]).abs().max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"data.loading": "streaming", "data.workers": 1},
        {"method.store": "host"},
        {"training.ema": 0.9, "training.on_collapse": "stop", "training.probe": 3},
        {"training.ema": (0.9, 0.99), "training.ema_batchnorm": "re-estimate"},
    ],
    ids=["streaming", "host", "ema", "averages"],
)
def test_wherever_images_and_memory_live(values, train, settings_of, tmp_path, rows_of):
    same = {key: values[key] for key in values if key.startswith("training")}
    train(1, tmp_path / "1", settings_of(**same), "norm")
    train(2, tmp_path / "2", settings_of(**values), "norm")
    assert_same_training(tmp_path / "1", tmp_path / "2", rows_of)


@pytest.mark.slow
def test_clipped_steps_of_adamw_from_given_weights(train, settings_of, tmp_path, rows_of):
    """The norm is that of the global batch's gradient, and rank 0 reads the file."""
    train(1, tmp_path / "start", settings_of("standard", **{"training.epochs": 1}))
    adamw = {"optimizer.name": "adamw", "schedule.name": "cosine", "schedule.warmup": 0.3, "schedule.peak": 0.01}
    start = {"model.weights": str(tmp_path / "start")}
    for name, processes, values in (("1", 1, {}), ("3", 3, {}), ("free", 1, {"optimizer.clip_norm": None})):
        train(processes, tmp_path / name, settings_of(**adamw | start | {"optimizer.clip_norm": 0.05} | values))
    assert_same_training(tmp_path / "1", tmp_path / "3", rows_of)
    assert_all_have_the_same_model(tmp_path / "3", 3)
    clipped, free = (torch.load(tmp_path / name / "rank0.pt") for name in ("1", "free"))
    assert (clipped["fc.weight"] - free["fc.weight"]).abs().max() > 1e-5


@pytest.mark.slow
def test_shifted_boxes_and_erased_rectangles_are_those_of_one_process(train, settings_of, tmp_path, rows_of):
    views = {"data.view": "cropshift", "data.shift": 3, "data.erase": 0.7, "data.view_until": 0.5}
    for processes in (1, 2):
        train(processes, tmp_path / str(processes), settings_of(**views), "norm")
    assert_same_training(tmp_path / "1", tmp_path / "2", rows_of)


@pytest.mark.slow
def test_processes_share_the_processors(ranks, settings_of, tmp_path):
    """Each streams with its part of them; otherwise eight processes on 64 would start 512."""
    values = {"data.loading": "streaming", "training.epochs": 1}
    said = ranks(2, tmp_path / "run", settings_of(**values))["said"]
    workers = max(1, min(available_cpus() // 2, 4))  # of its four images in a batch each reads one at least
    assert f"are streamed from memory by {workers} process" in said


@pytest.mark.slow
def test_one_shard_is_the_order_of_before(train, toy_recipe, settings_of, tmp_path, assert_same_run):
    train(1, tmp_path / "none", toy_recipe("atas", {"training.epochs": 2}))
    train(1, tmp_path / "one", toy_recipe("atas", {"training.epochs": 2, "data.shards": 1}))
    assert_same_run(tmp_path / "none", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("average", [{}, {"training.ema": 0.9, "training.ema_batchnorm": "re-estimate"}])
def test_running_statistics_are_averaged(average, train, settings_of, tmp_path):
    """Without synchronised BatchNorm: after one step, whose rate is zero, the first layer's mean is that of the whole
    batch; re-estimated, it is that mean itself."""
    once = {"training.batch_size": 36, "training.epochs": 1, "engine.sync_batchnorm": False}
    settings = settings_of("standard", **once, **{"schedule.name": "cyclic"}, **average)
    for processes in (1, 3):
        train(processes, tmp_path / str(processes), settings, "norm")
    alone, together = (torch.load(tmp_path / name / "rank0.pt") for name in ("1", "3"))
    torch.testing.assert_close(together["norm1.running_mean"], alone["norm1.running_mean"], rtol=0, atol=1e-12)
    assert not torch.allclose(together["norm1.running_var"], alone["norm1.running_var"], rtol=0, atol=1e-9)
    assert_all_have_the_same_model(tmp_path / "3", 3)


@pytest.mark.slow
def test_without_synchronised_batchnorm_all_attack_the_same_model(train, settings_of, tmp_path):
    train(4, tmp_path / "run", settings_of("fgsm-rs", **{"engine.sync_batchnorm": False}), "norm")
    assert_all_have_the_same_model(tmp_path / "run", 4)


@pytest.mark.slow
def test_the_monitor_has_fewer_images_than_processes(train, settings_of, tmp_path, rows_of):
    settings = settings_of(**{"training.probe": 1, "training.epochs": 1})
    for count in (1, 3):
        train(count, tmp_path / str(count), settings)
    assert_same_training(tmp_path / "1", tmp_path / "3", rows_of)


@pytest.mark.slow
def test_a_collapse_is_everyones(train, settings_of, tmp_path, rows_of):
    settings = settings_of(**{"training.on_collapse": "rollback", "training.probe": 3, "training.epochs": 3})
    for processes in (1, 2):
        train(processes, tmp_path / str(processes), settings, collapse_in=1)
    assert [row["event"] for row in rows_of(tmp_path / "2") if "event" in row] == ["collapse", "rollback"]
    assert_same_training(tmp_path / "1", tmp_path / "2", rows_of)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize("method", ["atas", "free"])
def test_another_number_of_processes_goes_on(before, after, method, ranks, train, settings_of, tmp_path, rows_of):
    """One process is asked to stop in the second epoch, and all of them do."""
    settings = settings_of(method, **{"data.shards": 6, "training.batch_size": 12, "training.epochs": 3})
    train(1, tmp_path / "whole", settings, "norm")
    stopped = ranks(before, tmp_path / "run", settings, "norm", acts={str(before - 1): ["int", 4]})
    assert stopped["codes"] == [1] * before, stopped["said"]
    assert stopped["said"].count("the run is saved") == 1
    train(after, tmp_path / "run", settings, "norm", resume=True)
    assert_same_training(tmp_path / "whole", tmp_path / "run", rows_of)
    (event,) = [row for row in rows_of(tmp_path / "run") if "event" in row]
    assert event["processes"] == after


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "processes", "loading"), [(0, 2, "resident"), (1, 4, "streaming")])
def test_a_killed_process_ends_the_run(victim, processes, loading, ranks, train, settings_of, tmp_path, rows_of):
    """Its workers, who have inherited its connections, end with it."""
    values = {"data.loading": loading, "data.workers": 1}
    settings = settings_of(**{"training.checkpoint_every": 0.0, "training.epochs": 3} | values)
    train(1, tmp_path / "whole", settings)
    killed = ranks(processes, tmp_path / "run", settings, acts={str(victim): ["kill", 8]})
    assert killed["codes"] == [-signal.SIGKILL if rank == victim else 1 for rank in range(processes)]
    for rank in set(range(processes)) - {victim}:
        assert f"process {rank} of {processes} cannot reach another, which has ended or hangs" in killed["said"]
    assert f"--resume --out {tmp_path / 'run'}" in killed["said"]
    assert "Traceback" not in killed["said"]
    train(2, tmp_path / "run", settings, resume=True)
    assert_same_training(tmp_path / "whole", tmp_path / "run", rows_of)


@pytest.mark.slow
def test_wrong_use_is_said_once(ranks, settings_of, tmp_path):
    few = ranks(3, tmp_path / "few", settings_of(**{"data.shards": 2}))
    assert few["codes"] == [2, 2, 2]
    assert few["said"].count("data.shards = 2 gives work to 2 of 3 processes") == 1
    rigid = ranks(2, tmp_path / "rigid", settings_of(**{"data.shards": 2}), "rigid")
    assert rigid["codes"] == [2, 2]
    assert rigid["said"].count("the model cannot take an empty batch") == 1
    assert not (tmp_path / "rigid").exists()


@pytest.mark.slow
def test_shards_follow_the_processes_that_start_a_run(ranks, train, settings_of, tmp_path):
    settings = settings_of(**{"data.shards": None})
    train(2, tmp_path / "run", settings)
    assert "shards = 2" in (tmp_path / "run" / "recipe.toml").read_text()
    answer = train(1, tmp_path / "run", settings, resume=True)
    assert "has finished already" in answer["said"]
    alone = ranks(1, tmp_path / "alone", settings)
    assert alone["codes"] == [0]
    assert "\nshards" not in (tmp_path / "alone" / "recipe.toml").read_text()
    more = ranks(2, tmp_path / "alone", settings, resume=True)
    assert more["codes"] == [2, 2]
    assert more["said"].count("data.shards = 1 gives work to 1 of 2 processes") == 1


@pytest.mark.parametrize("sync", [True, False])
def test_a_single_value_has_no_variance(sync, ranks, settings_of, tmp_path):
    """The last of 33 images is alone in its batch; its variance would be 0/0, in the running statistics for good."""
    values = {"data.shards": 2, "engine.sync_batchnorm": sync}
    answer = ranks(2, tmp_path / "run", settings_of(**values), "flat")
    assert answer["codes"] == [2, 2]
    assert answer["said"].count("the model cannot be trained on a single image") == 1
    assert not (tmp_path / "run").exists()


def test_other_data_elsewhere_is_refused(ranks, settings_of, tmp_path):
    answer = ranks(2, tmp_path / "run", settings_of(), other_data={"1": 1})
    assert answer["codes"] == [1, 1]
    assert "process 1 of 2 has another recipe or other training images than process 0" in answer["said"]
    assert "Traceback" not in answer["said"]


def test_processes_that_do_not_find_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(AtasError, match="start them with torchrun"), init():
        pass


def test_a_batch_takes_as_much_of_every_shard(settings_of):
    with pytest.raises(UsageError, match="must be a multiple of data"):
        settings_of(**{"data.shards": 3})


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """The command itself: Ctrl-C saves once, a killed process ends the other, and two more end and evaluate the run."""
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "atas"]
    recipe = [
        "digits-small-cnn-atas",
        "--set",
        "data.shards=4",
        "--set",
        "training.epochs=1",
        "--set",
        "training.probe=50",
    ]
    recipe += ["--set", "evaluation.attacks=fgsm", "--set", "evaluation.examples=50"]
    often = ("--set", "training.checkpoint_every=0")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def start(*arguments):
        return subprocess.Popen(
            [*torchrun, "train", *recipe, "--out", str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # a group for Ctrl-C
        )

    def wait_for_checkpoint(job, after=None):
        file = folder / "checkpoints" / "last.safetensors"
        while not file.exists() or file.stat().st_mtime == after:
            assert job.poll() is None, job.stdout.read()
            time.sleep(0.05)

    job = start(*often)
    wait_for_checkpoint(job)
    os.killpg(job.pid, signal.SIGINT)
    said, _ = job.communicate()
    assert job.returncode != 0
    assert said.count("the run is saved, continue with") == 1

    job = start("--resume", *often)
    wait_for_checkpoint(job, (folder / "checkpoints" / "last.safetensors").stat().st_mtime)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    said, _ = job.communicate()
    assert job.returncode != 0
    assert "cannot reach another, which has ended or hangs; continue from the last checkpoint with --resume" in said

    job = start("--resume", "--evaluate")
    said, _ = job.communicate()
    assert job.returncode == 0, said
    assert said.count("written: ") == 2
    assert json.loads((folder / "evaluation.json").read_text())["protocol"]["processes"] == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["small-cnn", "preact-resnet18"])
def test_a_step_is_captured_with_the_all_reduce_of_nccl(model, tmp_path):
    """In a group of one process, which communicates as several do; the weights are those of a run without a group."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(256, 3, 32, 32, generator=generator), torch.arange(256) % 4
    data = atas.data.from_arrays("noise", images, labels, images[:16], labels[:16])
    values = {"model.name": model, "training.epochs": 2, "training.batch_size": 64, "training.probe": 32}
    values |= {"engine.deterministic": True, "training.loggers": ()}

    def train(name):
        run = atas.train("cifar10-preact-resnet18-atas", out=tmp_path / name, values=values, data=data)
        return json.loads((tmp_path / name / "environment.json").read_text())["engine"], run.model.state_dict()

    _, expected = train("alone")
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        engine, weights = train("group")
    finally:
        torch.distributed.destroy_process_group()
    assert engine == "captured"
    for name, weight in weights.items():
        assert torch.equal(weight.cpu(), expected[name].cpu()), name
