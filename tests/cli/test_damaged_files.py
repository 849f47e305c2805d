"""Whatever bytes a file of a run holds, a command says in one sentence which file it is and what is wrong with it."""

import json

import pytest
from safetensors.torch import load_file, save_file

from atas import Evaluation

DEEP = 100_000
NO_DOCUMENT = {
    "not UTF-8": b'{"epoch": "\xff"}\n',
    "nested lists": b"[" * DEEP + b"\n",
    "nested objects": b'{"a":' * DEEP + b"\n",
    "list": b"[1, 2]\n",
    "text": b'"text"\n',
    "long number": b"1" * 5000 + b"\n",
    "cut off": b'{"epoch": 0, \n',
    "zeros": b"\0" * 512 + b"\n",
}
NO_TOML = {
    "not UTF-8": b'[data]\nname = "\xff"\n',
    "nested": b"a = " + b"[" * DEEP,
    "long number": b"a = " + b"1" * 5000,
    "cut off": b"[data",
    "sections of other types": b"data = 1\nmodel = []\n",
}


@pytest.fixture
def evaluated(evaluated_copy):
    """A finished run with an evaluation."""
    return evaluated_copy()


def commands(folder, *names):
    """The arguments of these commands for a run's folder."""
    known = {
        "compare": ("compare", folder),
        "evaluate": ("evaluate", folder),
        "export": ("export", folder, "--to", "safetensors"),
        "report": ("report", folder),
        "resume": ("train", "--resume", "--out", folder),
    }
    return [known[name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("content", NO_DOCUMENT.values(), ids=NO_DOCUMENT)
@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("metrics.jsonl", ("compare", "evaluate", "export", "report", "resume")),
        ("environment.json", ("evaluate", "export", "report", "resume")),
        ("evaluation.json", ("compare", "export", "report")),
        ("evaluation.safetensors", ("compare", "export", "report")),
        ("training_examples.safetensors", ("report",)),
    ],
)
def test_a_file_that_is_no_document_of_ours(name, readers, content, command, evaluated):
    for arguments in commands(evaluated, *readers):
        (evaluated / name).write_bytes(content)
        command(*arguments).sentence(str(evaluated / name), "damaged (", status=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [('"pgd10": 0.', '"pgd10": 1.'), ('"collapsed": false', '"collapsed": true'), ('"seconds": ', '"seconds": 9')],
)
def test_a_changed_value_in_the_metrics(old, new, command, evaluated):
    """The row is valid, and does not fit its checksum."""
    path = evaluated / "metrics.jsonl"
    content = path.read_text()
    assert old in content
    for arguments in commands(evaluated, "compare", "evaluate", "export", "report", "resume"):
        path.write_text(content.replace(old, new))
        command(*arguments).sentence(f"{path} are damaged (line 1: its checksum is wrong); restore", status=1)


@pytest.mark.slow
@pytest.mark.parametrize("content", NO_TOML.values(), ids=NO_TOML)
def test_a_recipe_that_is_none(content, command, evaluated):
    (evaluated / "recipe.toml").write_bytes(content)
    for arguments in commands(evaluated, "compare", "evaluate", "export", "report", "resume"):
        result = command(*arguments)
        assert "Traceback" not in result.err
        assert result.status == 2, result
        assert len(result.err.splitlines()) == 1


def test_a_value_nested_too_deeply_on_the_command_line(command, tiny, tmp_path):
    result = command("train", tiny, "--set", f"method.eps={'[' * 5000}", "--out", tmp_path / "run")
    assert result.status == 2
    assert len(result.err.splitlines()) == 1


def paths_of(value, path=()):
    """The paths of all values in a document: the first of a list stands for the others."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_of(inner, (*path, key))


def changed(document, path, value):
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


OTHERS = (None, True, -1, 1.5, 10**400, "text", [], {}, [[]], {"a": {}})


@pytest.mark.slow
def test_any_value_of_another_type_in_a_result(command, evaluated):
    """Refused, or taken as it is: never a traceback."""
    path, refused = evaluated / "evaluation.json", 0
    document = json.loads(path.read_text())
    del document["checksum"]
    for place in paths_of(document):
        for other in OTHERS if place else ():
            path.write_text(json.dumps(changed(document, place, other)))
            result = command("compare", evaluated)
            if result.status:
                result.sentence(str(path), "damaged (", status=1)
                refused += 1
            else:
                Evaluation.load(path)
    assert refused > 200


@pytest.mark.slow
def test_any_value_of_another_type_in_the_environment(command, evaluated):
    path = evaluated / "environment.json"
    document = json.loads(path.read_text())
    for place in paths_of(document):
        for other in OTHERS if place else ():
            path.write_text(json.dumps(changed(document, place, other)))
            result = command("export", evaluated, "--to", "safetensors")
            if result.status:
                result.sentence(str(path), "damaged (", place[0], status=1)


HEADER = {
    "name": (None, 1, "no-such-model", "given:Net"),
    "num_classes": (None, "ten", True, 0, -1, 11, 10**7, 10**12, 10**400),
    "channels": (None, "one", 0, 2, 10**7, 10**12),
    "mean": ("half", [None], [0.5] * 5, {}),
    "std": ("half", 0, [[]], True),
    "shape": (None, [], [1], [1, 8], [1, 8, "8"], [0, 8, 8], [1, -8, -8], [1, 10**6, 10**6], [1, 10**400, 1], "8x8"),
    "classes": (None, "cats", [1, 2], {"a": 1}, 5),
    "weights": (None, 5, "0123456789abcdef"),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", HEADER)
def test_any_value_in_the_header_of_weights(key, command, evaluated, tmp_path):
    """Refused in a moment, however large a network it asks for, or taken."""
    path = evaluated / "model.safetensors"
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        (name,), (header,) = zip(*file.metadata().items(), strict=True)
    for value in HEADER[key]:
        save_file(tensors, path, {name: json.dumps(json.loads(header) | {key: value})})
        for arguments in commands(evaluated, "evaluate", "export"):
            result = command(*arguments)
            assert "Traceback" not in result.err
            if result.status:
                result.sentence(str(path), status=result.status)
            else:
                assert key in ("mean", "classes"), (value, result)


@pytest.mark.parametrize("content", [b"\xff", b"[" * DEEP, b"[]", b"{"])
def test_metadata_of_weights_that_are_none(content, command, evaluated):
    path = evaluated / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, {"atas-model-1": content.decode("latin1")})
    command("evaluate", evaluated).sentence(str(path), status=1)


def test_a_damaged_result_beside_the_first_is_told(command, evaluated):
    """Its name does not tell that it is one."""
    other = evaluated / "autoattack.json"
    content = (evaluated / "evaluation.json").read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b'"weights"', b'"weightz"'), content + b"}"):
        other.write_bytes(damaged)
        command("compare", evaluated).sentence(str(other), "damaged (", status=1)
    other.write_bytes(b'{"mine": [1, 2')
    assert command("compare", evaluated).status == 0


def test_an_evaluation_replaces_a_damaged_result(command, evaluated):
    (evaluated / "evaluation.json").write_bytes(b"{")
    result = command("evaluate", evaluated)
    assert result.status == 0
    assert "evaluation.json is damaged (not JSON); evaluate again: this evaluation replaces it" in result.err
    assert Evaluation.load(evaluated / "evaluation.json").n == 40
