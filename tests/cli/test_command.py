"""The command itself: help, version, listing, and exit statuses of true processes."""

import io
import json
import sys

import pytest

import atas
from atas import attacks, data, methods, models, recipes
from atas.models import published

COMMANDS = (
    ["ls"],
    ["train"],
    ["evaluate"],
    ["compare"],
    ["export"],
    ["reproduce"],
    ["bench"],
    ["data", "get"],
    ["data", "check"],
    ["data", "pack"],
    ["data", "verify"],
    ["report"],
)


def test_version(command):
    result = command("--version")
    assert (result.status, result.out.strip()) == (0, atas.__version__)


def test_python_m_atas_is_the_command(process):
    result = process("--help")
    assert result.status == 0
    for name in ("ls", "data", "train", "evaluate", "compare", "export", "reproduce"):
        assert f"\n  {name} " in result.out
    assert result.err == ""


def test_command_without_arguments_shows_the_help(command):
    result = command()
    assert "Usage:" in result.out + result.err


@pytest.mark.parametrize("group", [[], ["data"]], ids=["atas", "data"])
def test_help_of_commands_is_not_cut_at_80_columns(group, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    said = command(*group, "--help").out.partition("Commands:")[2].strip().splitlines()
    assert len(said) >= 4
    assert all(line.endswith(".") and not line.endswith("...") for line in said), said


@pytest.mark.parametrize("name", [[], ["data"], ["train"], ["data", "pack"]], ids=str)
def test_help_has_a_short_name(name, command):
    assert command(*name, "-h") == command(*name, "--help")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_each_help_has_an_example_that_can_be_copied(name, command):
    result = command(*name, "--help")
    assert result.status == 0
    text = " ".join(result.out.split())
    assert f"Example: atas {' '.join(name)} " in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", methods.names()),
        ("models", models.names()),
        ("data", data.names()),
        ("attacks", attacks.names()),
        ("recipes", recipes.names()),
    ],
)
def test_ls_names_everything_whole(what, names, command, monkeypatch):
    """In the 80 columns of a pipe too: what is listed is there to be copied or searched."""
    monkeypatch.setenv("COLUMNS", "80")
    result = command("ls", what)
    assert result.status == 0
    words = result.out.split()
    missing = [name for name in names if name not in words]
    assert not missing, f"{len(missing)} of {len(names)}"


@pytest.mark.parametrize(
    ("what", "key", "names"),
    [
        ("methods", "method", methods.names()),
        ("models", "model", models.names()),
        ("data", "data", data.names()),
        ("attacks", "attack", attacks.names()),
        ("recipes", "recipe", recipes.names()),
    ],
)
def test_ls_as_json(what, key, names, command):
    result = command("ls", what, "--json")
    assert result.status == 0
    rows = json.loads(result.out)
    assert [row[key] for row in rows][: len(names)] == names


def test_ls_recipes_tells_what_they_are(command):
    rows = {row["recipe"]: row for row in json.loads(command("ls", "recipes", "--json").out)}
    assert rows["cifar100-wrn-28-10-ssat-eps4"] == {
        "recipe": "cifar100-wrn-28-10-ssat-eps4",
        "data": "cifar100",
        "model": "wrn-28-10",
        "method": "ssat",
        "threat": "Linf(4/255)",
        "epochs": 30,
        "AutoAttack": None,
        "expect": None,
    }
    known = rows["cifar10-preact-resnet18-atas"]
    assert f"AutoAttack {known['AutoAttack']:.2f} (" in known["expect"]


def test_ls_methods_tells_settings_and_mode(command):
    rows = {row["method"]: row for row in json.loads(command("ls", "methods", "--json").out)}
    assert rows["atas"]["attack in"] == "eval mode"
    assert rows["fgsm-rs"]["attack in"] == "train mode"
    assert (rows["atas"]["settings"]["c"], rows["pgd"]["settings"]["steps"]) == (1.28, 10)
    assert "c=1.28, max_step=auto" in command("ls", "methods").out
    assert all(row["what"] for row in rows.values())
    assert "first_layer_twice=false, layer=none" in command("ls", "methods").out


def test_ls_models_tells_them_apart(command):
    rows = json.loads(command("ls", "models", "--json").out)
    assert len({row["what"] for row in rows}) == len(rows)


def test_ls_alone_is_an_overview(command):
    rows = {row["list"]: row for row in json.loads(command("ls", "--json").out)}
    assert {name: row["count"] for name, row in rows.items()} == {
        "methods": len(methods.names()),
        "models": len(models.names()),
        "data": len(data.names()),
        "attacks": len(attacks.names()),
        "recipes": len(recipes.names()),
        "weights": len(published.names()),
    }
    for name, row in rows.items():
        listed = [next(iter(one.values())) for one in json.loads(command("ls", name, "--json").out)]
        assert set(row["examples"]) <= set(listed), name
        assert f" {name} " in command("ls").out


def test_ls_describes_everything_in_numbers(command):
    of = {
        what: json.loads(command("ls", what, "--json").out)
        for what in ("models", "data", "attacks", "methods", "weights")
    }
    for what, rows in of.items():
        assert all(row["what"] for row in rows), what
    parameters = {row["model"]: row["parameters"] for row in of["models"]}
    assert parameters["small-cnn"] == sum(p.numel() for p in models.create("small-cnn", 10).parameters())
    digits = data.load("digits")
    (row,) = (row for row in of["data"] if row["data"] == "digits")
    assert row["train"] == len(digits.train)
    assert row["test"] == len(digits.test)
    assert (row["shape"], row["classes"]) == (list(digits.shape), digits.num_classes)
    assert all(row["where"] for row in of["data"])
    queries = {row["attack"]: row["max_queries"] for row in of["attacks"]}
    assert (queries["clean"], queries["fgsm"], queries["pgd50"]) == (0, 1, 50)
    assert queries["autoattack"] == sum(queries[name] for name in ("apgd-ce", "apgd-t", "fab-t", "square"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "methodz"], "invalid value for 'what': 'methodz' is not one of 'methods', "),
        (["trian"], "no such command 'trian'; did you mean 'train'? See atas --help"),
        (["train", "--set"], "option '--set' requires an argument; see atas"),
        (["evaluate"], "pass a run folder"),
        (["compare"], ""),
        (["export", "runs/first", "--to", "foo"], "; see atas export --help"),
        (["data", "pack", "photos"], "missing argument 'out'; see atas data pack --help"),
        (["ls", "--nope"], "no such option: --nope; see atas ls"),
        (["train", "x", "--resum"], "no such option: --resum; did you mean --resume? See atas train"),
        (["train", "x", "--epochs", "3"], "no such option: --epochs; did you mean --set training.epochs=3? See atas"),
        (["train", "x", "--lr=0.1"], "did you mean --set schedule.peak=0.1?"),
        (["train", "x", "--batch-size", "8"], "did you mean --set training.batch_size=8?"),
        (["train", "x", "--eps", "8/255"], "--eps is for --auto DATA; with a recipe, pass --set method.eps=8/255"),
        (["train", "--model", "--seed", "1"], "did you mean --set model.name=VALUE?"),
        (["bench", "x", "--epoch", "3"], "did you mean --set training.epochs=3?"),
        (["reproduce", "table-cifar10", "--max-step", "0.1"], "did you mean --set method.max_step=0.1?"),
        (["evaluate", "x", "--epochs", "3"], "no such option: --epochs; did you mean --eps?"),
        (["train", "x", "--epoch=3"], "no such option: --epoch; did you mean --set training.epochs=3?"),
        (["train", "--auto"], "option '--auto' requires an argument; see atas train --help"),
        (["train", "x", "--seed", "abc"], "invalid value for '--seed': it must be a whole number; see atas train"),
        (["train", "--auto", "digits", "--minutes", "x"], "invalid value for '--minutes': it must be a number; see"),
        (["evaluate", "x", "--examples", "0"], "invalid value for '--examples': it must be at least 1; see atas"),
        (["evaluate", "x", "--corruptions", ","], "--corruptions is empty; pass values separated by commas"),
    ],
)
def test_wrong_use_is_one_sentence_with_status_2(arguments, said, command):
    command(*arguments).sentence(said, status=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["train", "cifar10-preact-resnet18-atass"], 2, "did you mean 'cifar10-preact-resnet18-atas'?"),
        (["evaluate", "nowhere"], 1, "nowhere is not the folder of a run"),
    ],
)
def test_exit_status_and_standard_error_of_a_process(arguments, status, part, process, tmp_path):
    result = process(*arguments, cwd=tmp_path)
    assert result.status == status
    assert result.out == ""
    assert result.err.startswith("atas: ")
    assert result.err.count("\n") == 1
    assert part in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_written_at_once(command, monkeypatch):
    """torchrun puts a prefix before every write, and mixes those of several processes."""

    class Stream(io.StringIO):
        def write(self, text):
            writes.append(text)
            return super().write(text)

    writes = []
    from atas import cli

    monkeypatch.setattr(sys, "stderr", Stream())
    monkeypatch.setattr(sys, "argv", ["atas", "train", "no-such-recipe"])
    with pytest.raises(SystemExit):
        cli.main()
    (text,) = [text for text in writes if text]
    assert text.startswith("atas: unknown recipe")
    assert text.endswith("\n")
