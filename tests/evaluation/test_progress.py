"""A stopped evaluation resumes with the same verdicts, and its status says how far it is."""

import copy
import json
from itertools import pairwise

import pytest
import torch

import atas
from atas.evaluation import evaluate
from atas.evaluation.resume import ProgressFile

BALL = atas.Linf(0.15)
FIGURES = ("correct", "accuracy", "broken_by", "weights", "data", "n", "warnings")


def figures(result):
    """What does not depend on when and how often an evaluation was stopped."""
    document = result if isinstance(result, dict) else result.to_json()
    stages = {name: [stage["accuracy"] for stage in found] for name, found in document["stages"].items()}
    return {key: document[key] for key in FIGURES} | {"stages": stages}


@pytest.fixture(scope="module")
def options(tiny):
    return {"attacks": ["fgsm", "pgd4", "pgd10x2", tiny], "batch_size": 16, "seed": 3}


@pytest.fixture(scope="module")
def never_stopped(robust_digits, options):
    model, x, y = robust_digits
    return evaluate(model, x[:40], y[:40], BALL, **options)


class StopError(Exception):
    pass


def stopping(attack, doing, after):
    """A watcher that has had enough at the given look of that stage."""
    looks = []

    def watch(status):
        if status.note is None and (status.attack, status.stage) == (attack, doing):
            looks.append(status)
            if len(looks) == after:
                raise StopError

    return watch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "doing", "after"),
    [
        ("fgsm", "fgsm", 2),
        ("pgd4", "pgd4", 2),
        ("pgd10x2", "restart 1 of 2", 2),
        ("pgd10x2", "restart 2 of 2", 3),
        ("tiny", "apgd-ce", 1),
        ("tiny", "apgd-t", 9),
        ("tiny", "fab-t", 2),
        ("tiny", "square", 3),
    ],
)
def test_a_stop_in_any_stage(robust_digits, never_stopped, options, tmp_path, attack, doing, after):
    model, x, y = (robust_digits[0], *(part[:40] for part in robust_digits[1:]))
    file, passes, notes = tmp_path / "progress.json", [], []
    with pytest.raises(StopError):
        evaluate(model, x, y, BALL, **options, progress_file=file, progress=stopping(attack, doing, after))
    assert file.exists()
    hook = model.register_forward_pre_hook(lambda _, arguments: passes.append(len(arguments[0])))
    try:
        found = evaluate(model, x, y, BALL, **options, progress_file=file, progress=lambda s: notes.append(s.note))
    finally:
        hook.remove()
    assert figures(found) == figures(never_stopped)
    assert f"resuming from {file}" in notes
    assert file.exists(), "until the result is saved"
    found.save(tmp_path / "result.json")
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "result.safetensors"}
    if attack == "tiny":
        done = 40 * (1 + 4 + 10) + 10 * int(never_stopped.correct["pgd10x2"].sum())
        landscapes = 3 * (21 * 21 + 1)
        most = sum(never_stopped.queries.values()) - done + landscapes
        assert sum(passes) < most, "what was done is not done again"


def test_a_stop_in_a_later_chunk(robust_digits, tmp_path):
    model, x, y = (robust_digits[0], *(part[:60] for part in robust_digits[1:]))
    file, options = tmp_path / "progress.json", {"attacks": ["pgd10"], "chunk_bytes": 20 * 64 * 4}
    expected = evaluate(model, x, y, BALL, attacks=["pgd10"])
    with pytest.raises(StopError):
        evaluate(model, x, y, BALL, **options, progress_file=file, progress=stopping("pgd10", "pgd10", 10))
    assert {key.split("/")[0] for key in json.loads(file.read_text())["records"]} == {"0", "1", "2"}
    assert figures(evaluate(model, x, y, BALL, **options, progress_file=file)) == figures(expected)


def test_the_progress_file_is_written_at_the_interval(robust_digits, tiny, tmp_path):
    model, x, y = (robust_digits[0], *(part[:20] for part in robust_digits[1:]))
    file, options = tmp_path / "progress.json", {"attacks": [tiny], "progress_file": tmp_path / "progress.json"}
    evaluate(model, x, y, BALL, **options)
    assert not file.exists(), "an evaluation of less than 20 seconds writes none"
    sizes = []
    evaluate(
        model,
        *(x, y, BALL),
        **options,
        progress_interval=0.0,
        progress=lambda _: sizes.append(file.stat().st_size if file.exists() else 0),
    )
    assert len(set(sizes)) > 4
    assert file.exists()


def test_the_interval_of_a_progress_file(tmp_path):
    now = [100.0]
    path = tmp_path / "progress.json"
    file = ProgressFile(path, {}, print, interval=20.0, clock=lambda: now[0])
    file.save({})
    assert not path.exists()
    now[0] = 119.9
    file.save({})
    assert not path.exists()
    now[0] = 120.0
    file.save({})
    assert path.exists()
    path.unlink()
    now[0] = 139.0
    file.save({})
    assert not path.exists()
    file.save({}, now=True)
    assert path.exists()


CHANGES = {
    "weights": lambda call: call["model"][5].bias.add_(0.01),
    "data": lambda call: call["x"].mul_(0.999),
    "data, examples": lambda call: call.update(x=call["x"][:19], y=call["y"][:19]),
    "threat, attacks": lambda call: call.update(threat=atas.Linf(0.14)),
    "attacks": lambda call: call.update(attacks=["pgd10", "pgd20"]),
    "seed": lambda call: call.update(seed=1),
    "logits": lambda call: call.update(model=Warmer(call["model"])),
}


class Warmer(torch.nn.Module):
    """The same weights, and the same predictions too."""

    def __init__(self, model, factor=0.25):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x):
        return self.model(x) * self.factor


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.slow
def test_the_progress_of_another_evaluation_is_left_alone(robust_digits, tmp_path, change):
    model = copy.deepcopy(robust_digits[0])
    call = {"model": model, "x": robust_digits[1][:20].clone(), "y": robust_digits[2][:20], "threat": BALL}
    call |= {"attacks": ["pgd10", "pgd50"], "seed": 0}
    file, notes = tmp_path / "progress.json", []

    def run(**options):
        model, x, y, threat = (call[key] for key in ("model", "x", "y", "threat"))
        return evaluate(
            model, x, y, threat, attacks=call["attacks"], seed=call["seed"], progress_interval=0.0, **options
        )

    with pytest.raises(StopError):
        run(progress_file=file, progress=stopping("pgd50", "pgd50", 3))
    CHANGES[change](call)
    found = run(progress_file=file, progress=lambda status: notes.append(status.note))
    expected = run()
    said = [note for note in notes if note]
    assert said == [f"{file} holds the progress of another evaluation (different {change}); starting over"]
    assert figures(found) == figures(expected)


@pytest.mark.parametrize(("factor", "resumes"), [(1.0005, True), (1.005, False)])
def test_progress_is_kept_if_logits_differ_by_rounding_alone(robust_digits, tmp_path, factor, resumes):
    model, x, y = (robust_digits[0], *(part[:20] for part in robust_digits[1:]))
    file, notes = tmp_path / "progress.json", []
    options = {"attacks": ["pgd10", "pgd50"], "progress_file": file}
    with pytest.raises(StopError):
        evaluate(model, x, y, BALL, **options, progress=stopping("pgd50", "pgd50", 3))
    evaluate(Warmer(model, factor), x, y, BALL, **options, progress=lambda status: notes.append(status.note))
    assert (f"resuming from {file}" in notes) is resumes


def test_a_model_that_answers_by_chance_goes_on_too(robust_digits, tmp_path):
    class Noisy(Warmer):
        def forward(self, x):
            return self.model(x) + torch.randn(len(x), 10)

    model, (x, y) = Noisy(robust_digits[0]), (part[:20] for part in robust_digits[1:])
    file, notes = tmp_path / "progress.json", []
    options = {"attacks": ["pgd10", "pgd50"], "progress_file": file}
    with pytest.raises(StopError):
        evaluate(model, x, y, BALL, **options, progress=stopping("pgd50", "pgd50", 3))
    evaluate(model, x, y, BALL, **options, progress=lambda status: notes.append(status.note))
    assert f"resuming from {file}" in notes


def test_a_quick_evaluation_does_not_cost_another_its_progress(robust_digits, tmp_path):
    model, x, y = robust_digits
    file = tmp_path / "progress.json"
    with pytest.raises(StopError):
        evaluate(
            model, x, y, BALL, attacks=["pgd10", "pgd50"], progress_file=file, progress=stopping("pgd50", "pgd50", 4)
        )
    before = file.read_bytes()
    evaluate(model, x, y, BALL, attacks=["fgsm"], progress_file=file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 9}', '{"format": 1, "identity": {}, "records": 5}'])
def test_a_damaged_progress_file_is_no_obstacle(robust_digits, tmp_path, content):
    model, x, y = robust_digits
    file, notes = tmp_path / "progress.json", []
    file.write_text(content)
    found = evaluate(
        model, x[:20], y[:20], BALL, attacks=["fgsm"], progress_file=file, progress=lambda s: notes.append(s.note)
    )
    assert figures(found) == figures(evaluate(model, x[:20], y[:20], BALL, attacks=["fgsm"]))
    (said,) = [note for note in notes if note]
    assert "starting over" in said
    assert "\n" not in said


def stopped(problem, file, **options):
    """The progress file of an evaluation that was stopped in PGD-50."""
    model, x, y = problem
    with pytest.raises(StopError):
        evaluate(model, x[:20], y[:20], BALL, **options, progress_file=file, progress=stopping("pgd50", "pgd50", 3))


def test_a_damaged_digit_of_a_verdict_is_noticed(robust_digits, tmp_path):
    """It would be a wrong verdict in the result."""
    file, notes, options = tmp_path / "progress.json", [], {"attacks": ["pgd10", "pgd50"]}
    stopped(robust_digits, file, **options)
    content = file.read_text()
    start = content.index('"broken": "') + len('"broken": "')
    file.write_text(content[:start] + str(1 - int(content[start])) + content[start + 1 :])
    model, x, y = robust_digits
    options |= {"progress_file": file, "progress": lambda status: notes.append(status.note)}
    found = evaluate(model, x[:20], y[:20], BALL, **options)
    assert [note for note in notes if note] == [
        f"cannot read the progress file {file} (its checksum is wrong); starting over"
    ]
    assert figures(found) == figures(evaluate(model, x[:20], y[:20], BALL, attacks=["pgd10", "pgd50"]))


def test_progress_of_an_earlier_version_has_no_checksum(robust_digits, tmp_path):
    file, notes, options = tmp_path / "progress.json", [], {"attacks": ["pgd10", "pgd50"]}
    stopped(robust_digits, file, **options)
    content = json.loads(file.read_text())
    assert content.pop("checksum")
    file.write_text(json.dumps(content))
    model, x, y = robust_digits
    options |= {"progress_file": file, "progress": lambda status: notes.append(status.note)}
    evaluate(model, x[:20], y[:20], BALL, **options)
    assert f"resuming from {file}" in notes


def test_progress_on_chunks_of_another_size_is_not_used(robust_digits, tmp_path):
    file, notes, options = tmp_path / "progress.json", [], {"attacks": ["pgd10", "pgd50"]}
    stopped(robust_digits, file, **options, chunk_bytes=8 * 64 * 4)
    model, x, y = robust_digits
    expected = evaluate(model, x[:20], y[:20], BALL, **options)
    options |= {"progress_file": file, "progress": lambda status: notes.append(status.note)}
    assert figures(evaluate(model, x[:20], y[:20], BALL, **options)) == figures(expected)
    assert f"cannot use the progress in {file} (it is of chunks of another size); starting over" in notes


def test_a_disk_that_fails_does_not_stop_an_evaluation(robust_digits, tmp_path, monkeypatch):
    model, x, y = robust_digits
    notes = []

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr("os.fsync", full)
    evaluate(
        model,
        *(x[:20], y[:20], BALL),
        attacks=["pgd10"],
        progress_file=tmp_path / "progress.json",
        progress_interval=0.0,
        progress=lambda status: notes.append(status.note),
    )
    assert any("No space left on device" in note for note in notes if note)


SCRIPT = """
import json, os, random, sys, time
import torch

torch.set_num_threads(1)
import atas
from atas.attacks import APGD, FAB, AttackEnsemble, Square
from helpers.crash import attempt, count_calls, die_at_call

order = json.loads(sys.argv[1])
chance = random.Random(order["seed"])
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2, padding=1),
    torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 4 * 4, 10),
)
model.load_state_dict(torch.load(order["weights"], weights_only=True))
test = atas.data.load("digits").test
short = APGD(loss="ce", iterations=30), APGD(loss="t", iterations=15), FAB(iterations=15), Square(queries=400)
attacks = ["pgd10", AttackEnsemble("auto", short)]


def work(folder, die=lambda: None):
    die()
    file = os.path.join(folder, "progress.json")
    result = atas.evaluate(
        model, test.images[:60], test.labels[:60], atas.Linf(0.15), attacks=attacks, batch_size=32, progress_file=file,
        progress_interval=0.0,
    )
    result.save(os.path.join(folder, "result.json"))


def killed():
    call = int(chance.uniform(0.1, 0.5) * calls)
    code = attempt(lambda: work(order["killed"], lambda: die_at_call(call)))
    assert code in (0, -9), code
    return code == -9


calls = count_calls(lambda: work(order["whole"]))
kills = 0
while kills < 6 and killed():
    kills += 1
assert attempt(lambda: work(order["killed"])) == 0
print(json.dumps({"kills": kills, "left": sorted(os.listdir(order["killed"]))}))
"""


@pytest.mark.slow
def test_killed_at_random_moments(robust_digits, tmp_path, run_script):
    """SIGKILL, again and again, in the middle of writes too: what is known is kept, and the verdicts are the same."""
    torch.save(robust_digits[0].state_dict(), tmp_path / "weights.pt")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    told = run_script(SCRIPT, weights=str(tmp_path / "weights.pt"))
    assert told["kills"] >= 2, told
    assert sorted(told["left"]) == ["result.json", "result.safetensors"]
    whole, killed = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed"))
    assert figures(whole) == figures(killed)
    assert 0.2 < whole["accuracy"]["auto"] < whole["accuracy"]["pgd10"] < 1


BALL = atas.Linf(0.15)


def watched(problem, **options):
    model, x, y = problem
    seen = []
    evaluate(model, x[:50], y[:50], BALL, progress=seen.append, **options)
    return seen


def test_attacks_and_stages_are_named_in_their_order(robust_digits, tiny):
    seen = watched(robust_digits, attacks=["fgsm", "pgd5x2", tiny])
    named = list(dict.fromkeys((status.attack, status.stage) for status in seen))
    assert named == [
        ("clean", "clean"),
        ("fgsm", "fgsm"),
        ("pgd5x2", "restart 1 of 2"),
        ("pgd5x2", "restart 2 of 2"),
        *(("tiny", name) for name in ("apgd-ce", "apgd-t", "fab-t", "square")),
    ]
    assert all(status.note is None for status in seen)


def test_examples_that_hold_are_counted_down(robust_digits, tiny):
    model, x, y = robust_digits
    result = evaluate(model, x[:50], y[:50], BALL, attacks=[tiny])
    seen = [status for status in watched(robust_digits, attacks=[tiny]) if status.attack == "tiny"]
    right = [status.num_correct for status in seen]
    assert right == sorted(right, reverse=True)
    assert (right[0], right[-1]) == (result.correct["clean"].sum(), result.correct["tiny"].sum())
    assert {status.examples for status in seen} == {50}


@pytest.mark.slow
def test_the_share_grows_to_one_and_the_time_left_falls_to_nothing(robust_digits, tiny):
    for options in ({"attacks": [tiny]}, {"attacks": ["pgd10x2", tiny], "batch_size": 8}, {"attacks": ["fgsm"]}):
        seen = watched(robust_digits, **options)
        done = [status.done for status in seen]
        assert done[0] < 0.1
        assert done[-1] == 1
        assert all(0 <= share <= 1 for share in done)
        assert done == sorted(done)
        left = [status.seconds_left for status in seen]
        assert left[0] is None
        assert left[-1] == 0
        assert all(seconds >= 0 for seconds in left if seconds is not None)


@pytest.mark.slow
def test_the_work_left_is_an_upper_bound_that_is_not_far_off(robust_digits, tiny):
    """Halfway through the work, in images that the model has seen; the time left is in proportion to it."""
    passes, seen = [0], []
    model, x, y = robust_digits

    def count(module, arguments):
        passes[0] += len(arguments[0])

    hook = model.register_forward_pre_hook(count)
    try:
        evaluate(model, x, y, BALL, attacks=[tiny, "pgd50x3"], progress=lambda s: seen.append((passes[0], s.done)))
    finally:
        hook.remove()
    made, done = next(entry for entry in seen if entry[1] > 0.5)
    left = (passes[0] - made) / made
    assert 0.5 * left < (1 - done) / done < 10 * left


def test_work_is_counted_in_forward_passes(robust_digits, tiny):
    """A query of Square is less work than a step with a gradient, so the share grows more slowly in it."""
    pace = {}
    seen = [status for status in watched(robust_digits, attacks=[tiny], batch_size=50) if status.attack == "tiny"]
    for before, after in pairwise(seen):
        if before.stage == after.stage and before.num_correct == after.num_correct:
            pace.setdefault(after.stage, after.done - before.done)
    assert 0 < pace["square"] < 0.5 * pace["apgd-t"]
