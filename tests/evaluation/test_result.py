"""Result files and tables."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

import atas
from atas.errors import DataError, UsageError
from atas.evaluation import Evaluation, evaluate, wilson
from atas.evaluation.result_format import encode_labels


def test_figures_follow_from_the_verdicts(result):
    for name, verdicts in result.correct.items():
        right = int(verdicts.sum())
        assert result.accuracy[name] == right / 30
        assert result.interval[name] == wilson(right, 30)
        assert result.interval[name][0] < result.accuracy[name] < result.interval[name][1]
    assert result.n == 30


def test_a_result_cannot_be_changed(result):
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.data = ""


@pytest.mark.parametrize("ball", [atas.Linf(4 / 255), atas.L2(0.1)], ids=str)
def test_a_result_survives_its_file(problem, ball, tmp_path):
    result = evaluate(*problem, ball, attacks=("fgsm", "pgd10"))
    path = tmp_path / "evaluation.json"
    path.write_text("older")
    result.save(path)
    found = Evaluation.load(path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"evaluation.json", "evaluation.safetensors"}, "no temporary file is left"
    assert found.to_json() == result.to_json() == json.loads(path.read_text())
    assert found.threat == ball
    assert found.interval == result.interval
    assert list(found.correct) == list(result.correct)
    assert all(torch.equal(found.correct[name], result.correct[name]) for name in result.correct)
    assert found.correct["clean"].dtype == torch.bool


def test_a_changed_value_is_noticed(result, tmp_path):
    """Also where nothing else in the file contradicts it; its spaces and lines may change."""
    path = tmp_path / "result.json"
    result.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, indent=4))
    assert Evaluation.load(path).to_json() == content
    for values in ({"weights": "0" * 16}, {"seconds": content["seconds"] | {"clean": 1e6}}, {"data": "other"}):
        path.write_text(json.dumps(content | values))
        with pytest.raises(DataError, match="its checksum is wrong"):
            Evaluation.load(path)


def test_a_file_of_an_earlier_version_is_read(result, tmp_path):
    document = result.to_json()
    for key in ("queries", "stages", "broken_by", "warnings", "sentence", "checksum"):
        del document[key]
    (tmp_path / "old.json").write_text(json.dumps(document))
    found = Evaluation.load(tmp_path / "old.json")
    assert found.accuracy == result.accuracy
    assert (found.queries, found.stages, found.broken_by, found.warnings) == ({}, {}, {}, ())
    assert str(found).splitlines()[2].endswith("-"), "what is not known is not made up"
    assert found.sentence() == result.sentence()


def test_at_most_so_many_attacks_can_be_told_apart():
    with pytest.raises(UsageError, match="at most 62 attacks and stages"):
        encode_labels([str(number) for number in range(63)])


def test_an_attack_of_one_s_own_may_have_the_name_of_a_pgd(problem, ball, tmp_path):
    class Stay:
        name = "pgd7"

        def settings(self, threat):
            return {}

        def __call__(self, model, x, y, threat, *, seed=0, index=None):
            return x

    found = evaluate(*problem, ball, attacks=[Stay()])
    found.save(tmp_path / "result.json")
    assert Evaluation.load(tmp_path / "result.json").sentence() == found.sentence()


def test_verdicts_are_stored_as_digits(result):
    digits = result.to_json()["correct"]["pgd10"]
    assert [digit == "1" for digit in digits] == result.correct["pgd10"].tolist()


def test_a_result_replaces_no_other_kind_of_file(result, tmp_path):
    (tmp_path / "cells.npz").write_bytes(b"PK of somebody's data")
    with pytest.raises(UsageError, match=r"would replace .*cells\.npz, which holds something else: give another name"):
        result.save(tmp_path / "cells.npz")
    assert (tmp_path / "cells.npz").read_bytes() == b"PK of somebody's data"
    with pytest.raises(UsageError, match="is a folder; add a file's name"):
        result.save(tmp_path)
    for _ in range(2):  # a result replaces a result
        result.save(tmp_path / "mine")


def test_the_old_file_stays_if_writing_fails(result, tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text("older")
    broken = dataclasses.replace(result, environment={"date": object()})
    with pytest.raises(TypeError):
        broken.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]
    assert path.read_text() == "older"


def _change(key, value):
    def change(document):
        document[key] = value
        return document

    return change


def _drop(key):
    return lambda document: {k: v for k, v in document.items() if k != key}


def _verdict(digits):
    def change(document):
        document["correct"]["pgd10"] = digits
        return document

    return change


@pytest.mark.parametrize(
    "damage",
    [
        _change("format", 99),
        _change("n", 31),
        _change("accuracy", {}),
        _change("correct", "0101"),
        _change("correct", {}),
        _change("threat", {"norm": "l7", "eps": 1}),
        _change("threat", {"norm": "linf", "eps": 8}),
        _change("threat", None),
        _change("threat", {"norm": "linf", "eps": 0.5, "text": "Linf(4/255)"}),
        _change("threat", {"norm": "linf", "eps": 0.5, "text": "Linf(4/0)"}),
        _change("stages", {"fgsm": [{"after": "a", "right": 3, "accuracy": 0.2, "seconds": 1, "queries": 1}]}),
        _change("corruptions", {"jpeg": {"right": [9], "accuracy": [0.4]}}),
        _change("seconds", {"clean": 1.0}),
        _change("protocol", None),
        _change("broken_by", {"worst": {"names": ["clean"], "examples": "0" * 30}}),
        _change("broken_by", {"worst": {"names": [], "examples": "-" * 29}}),
        _change("broken_by", {"other": {"names": [], "examples": "-" * 30}}),
        _change("stages", {"fgsm": [{"after": "nothing"}]}),
        _change("protocol", {"precision": "float32", "mask": "half"}),
        _change("protocol", {"precision": "float32", "mask": {"share": 0.5}}),
        _change("protocol", {"precision": "float32", "targets": [3]}),
        _change("warnings", ["text"]),
        _change("queries", [1, 2]),
        _verdict("01"),
        _verdict("2" * 30),
        _verdict("1" * 30),
        _verdict(None),
        *(_drop(key) for key in ("format", "threat", "n", "accuracy", "seconds", "protocol", "weights", "correct")),
        lambda document: [document],
        lambda document: "text",
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(result, tmp_path, damage):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(damage(result.to_json())))
    with pytest.raises(DataError, match=r"evaluation\.json is damaged \(.*\); evaluate again") as caught:
        Evaluation.load(path)
    assert "\n" not in str(caught.value)


def test_a_character_that_stands_for_no_attack_is_named(result, tmp_path):
    path = tmp_path / "evaluation.json"
    broken = {"worst": {"names": ["clean"], "examples": "0Z" + "-" * 28}}
    document = _change("broken_by", broken)(result.to_json())
    del document["checksum"]  # as earlier versions wrote none
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="broken_by has the character 'Z', which stands for no attack"):
        Evaluation.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"format": 1'])
def test_a_file_that_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "evaluation.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged \(not JSON\); evaluate again"):
        Evaluation.load(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the result file .*: No such file"):
        Evaluation.load(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot read the result file"):
        Evaluation.load(tmp_path)


def test_tables_of_a_result_show_accuracies_and_intervals(result):
    seconds = dict.fromkeys(result.seconds, 12.34)
    result = dataclasses.replace(result, seconds=seconds)
    right = int(result.correct["pgd10"].sum())
    low, high = (100 * end for end in result.interval["pgd10"])
    cells = ["pgd10", f"{100 * right / 30:.2f}%", f"{low:.2f}% to {high:.2f}%", f"{right}/30", "12.3 s"]

    lines = str(result).splitlines()
    assert lines[0] == "Linf(4/255), 30 examples, float32"
    assert [line.split()[0] for line in lines[1:]] == ["attack", "clean", "fgsm", "pgd10", "worst"]
    assert all(cell in lines[4] for cell in cells)
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"

    console = Console(file=io.StringIO(), width=100)
    console.print(result.table())
    text = console.file.getvalue()
    assert any(all(cell in line for cell in cells) for line in text.splitlines())
    assert "worst" in text
    assert repr(result).startswith("Evaluation(Linf(4/255), n=30, clean=0.9000, fgsm=")


def test_names_are_no_markup(result):
    marked, name = Console(file=io.StringIO(), width=100), "mine[v2]"
    figures = {key: {**getattr(result, key), name: getattr(result, key)["clean"]} for key in ("correct", "seconds")}
    marked.print(dataclasses.replace(result, **figures).table())
    assert name in marked.file.getvalue()


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0), (5, 5, 0.5655, 1.0)],
)
def test_known_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(("successes", "n"), [(0, 3), (1, 7), (4800, 10000), (9999, 10000), (7, 7)])
def test_scipy_agrees(successes, n, confidence):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    expected = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson(successes, n, confidence) == pytest.approx(tuple(expected), abs=1e-12)


def test_ends_are_exact_and_hold_the_fraction():
    for n in (1, 3, 10, 997):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            assert 0 <= low <= successes / n <= high <= 1


@pytest.mark.parametrize("arguments", [(1, 0), (-1, 5), (6, 5), (1, 5, 0.0), (1, 5, 1.0), (1, 5, 95)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(UsageError):
        wilson(*arguments)


class Nothing:
    """An attack that changes nothing."""

    def __init__(self, name):
        self.name = name

    def settings(self, threat):
        return {}

    def __call__(self, model, x, y, threat, *, seed=0, index=None):
        return x


def test_more_attacks_than_a_file_can_name_are_refused_before_the_work(problem, ball, tmp_path):
    """And not as the result is saved, after hours."""
    model, x, y = problem
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(UsageError, match="at most 62 attacks and stages, clean included; got 63"):
        evaluate(model, x, y, ball, attacks=[Nothing(f"mine{number}") for number in range(62)])
    assert not passes
    attacks = [*(Nothing(f"mine{number}") for number in range(57)), "autoattack"]
    with pytest.raises(UsageError, match="got 63"):
        evaluate(model, x, y, ball, attacks=[*attacks, "pgd10"])
    attacks = [Nothing(f"mine{number}") for number in range(61)]
    evaluate(model, x[:4], y[:4], ball, attacks=attacks).save(tmp_path / "result.json")
    assert len(Evaluation.load(tmp_path / "result.json").correct) == 63
