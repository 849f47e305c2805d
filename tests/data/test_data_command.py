from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from atas.cli.data import app
from atas.data import _cifar_spec
from atas.errors import DataError, UsageError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_get_then_check(tiny, tmp_path, monkeypatch):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    name, spec = tiny.spec.name, tiny.spec
    monkeypatch.setitem(_cifar_spec.SPECS, name, spec)
    first = run("get", name, "--root", tmp_path)
    assert first.exit_code == 0
    assert f"{name} is in {tmp_path / spec.binary.folder}" in first.stdout
    again = run("get", name, "--root", tmp_path)
    assert again.exit_code == 0
    assert f"already in {tmp_path / spec.binary.folder} and intact" in again.stdout
    as_json = run("get", name, "--root", tmp_path, "--json")
    assert json.loads(as_json.stdout) == {"data": name, "folder": str(tmp_path / spec.binary.folder), "fetched": False}
    assert json.loads(run("check", name, "--root", tmp_path, "--json").stdout)["test"]["official"] is True
    check = run("check", name, "--root", tmp_path)
    assert check.exit_code == 0
    assert f"{name}: 3 x 32 x 32 pixels, {len(spec.classes)} classes" in check.stdout
    assert f"train: {spec.train_count} images, SHA-256 {spec.train_sha256} (the official content)" in check.stdout
    assert f"test: {spec.test_count} images, SHA-256 {spec.test_sha256} (the official content)" in check.stdout


def test_check_of_digits():
    check = run("check", "digits")
    assert check.exit_code == 0
    assert "classes: 0, 1, 2" in check.stdout
    assert "train: 1297 images" in check.stdout
    assert "no official hash" in check.stdout


def test_errors_pass_through(tmp_path):
    assert isinstance(run("check", "cifar10", "--root", tmp_path).exception, DataError)
    assert isinstance(run("check", "digits", "--size", "3").exception, UsageError)
    assert isinstance(run("get", "digits").exception, UsageError)


@pytest.mark.parametrize("command", ["get", "check"])
def test_help_has_an_example(command):
    assert f"Example: atas data {command} cifar10" in run(command, "--help").stdout
