"""Processes that share the examples find what one of them finds alone."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import atas
from atas.distributed.world import World
from atas.evaluation import evaluate
from atas.evaluation.outcomes import AttackOutcome, merge_shards

BALL = atas.Linf(0.15)
WORKER = """
import json, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
import atas
from atas.attacks import APGD, FAB, AttackEnsemble, Square

weights, folder, examples = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2, padding=1),
    torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 10),
)
model.load_state_dict(torch.load(weights, weights_only=True))
test = atas.data.load("digits").test
short = APGD(loss="ce", iterations=8), APGD(loss="t", iterations=8), FAB(iterations=5), Square(queries=20)
tiny = AttackEnsemble("tiny", short)
seen = []
model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
for n in (examples, 1):
    result = atas.evaluate(
        model, test.images[:n], test.labels[:n], atas.Linf(0.15), attacks=["fgsm", "pgd10x2", tiny], seed=3,
        shard=True, progress_file=f"{folder}/progress.json", keep=True,
    )
    result.save_adversarial(f"{folder}/{n}-{rank}.npz")
    result.save(f"{folder}/{n}-{rank}.json")
    print(json.dumps({"rank": rank, "passes": sum(seen)}), file=open(f"{folder}/passes-{n}-{rank}", "w"))
    seen.clear()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds(robust_digits, tiny, tmp_path):
    model, x, y = robust_digits
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "out").mkdir()
    n = 61
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "worker.py"), str(tmp_path / "weights.pt"), str(tmp_path / "out"), str(n)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "out").glob("progress*"))
    for count in (n, 1):
        alone = evaluate(model, x[:count], y[:count], BALL, attacks=["fgsm", "pgd10x2", tiny], seed=3)
        expected = alone.to_json()
        for rank in (0, 1):
            details = atas.Evaluation.load(tmp_path / "out" / f"{count}-{rank}.json").details
            assert torch.equal(details.labels, alone.details.labels)
            for name in ("clean", "fgsm", "pgd10x2"):  # a search may take another adversarial input of an example
                assert torch.equal(details.predicted[name], alone.details.predicted[name]), name
            assert torch.equal(details.examples.index, alone.details.examples.index)
            torch.testing.assert_close(details.landscapes.loss, alone.details.landscapes.loss)
            found = json.loads((tmp_path / "out" / f"{count}-{rank}.json").read_text())
            for key in ("correct", "accuracy", "broken_by", "weights", "data", "n", "warnings"):
                assert found[key] == expected[key], key
            assert found["queries"]["pgd10x2"] == expected["queries"]["pgd10x2"]
            assert found["protocol"]["processes"] == 2
            with np.load(tmp_path / "out" / f"{count}-{rank}.npz", allow_pickle=False) as file:
                for name in ("fgsm", "pgd10x2", "tiny"):
                    points = torch.from_numpy(file[f"x_adv.{name}"])
                    assert torch.equal(model(points).argmax(1) == y[:count], alone.correct[name])
                    assert BALL.distance(points, x[:count]).max() <= BALL.eps + 1e-6
    passes = [json.loads((tmp_path / "out" / f"passes-{n}-{rank}").read_text())["passes"] for rank in (0, 1)]
    assert max(passes) < 0.75 * sum(passes), "the work is shared"


@pytest.mark.parametrize(("examples", "count"), [(10, 3), (2, 4), (7, 1)])
def test_every_example_has_one_process(examples, count):
    rows = [row for rank in range(count) for row in World(rank, count).rows(examples)]
    assert sorted(rows) == list(range(examples))


def test_one_process_talks_to_itself():
    assert World().all_gather("a") == ["a"]
    assert World().on_rank0(lambda: "a") == "a"


def test_merged_shards_take_the_longest_time_and_all_queries():
    """Processes work side by side: a stage takes as long as the slowest of them."""
    first = {"pgd10": AttackOutcome(torch.tensor([0, 2, 0]), [3.0, 1.0], [30, 10])}
    second = {"pgd10": AttackOutcome(torch.tensor([1, 3]), [2.0, 4.0], [20, 40])}
    found = merge_shards([(range(0, 5, 2), first), (range(1, 5, 2), second)], 5)["pgd10"]
    assert found.code.tolist() == [0, 1, 2, 3, 0]
    assert (found.seconds, found.queries) == ([3.0, 4.0], [50, 50])
