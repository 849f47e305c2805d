from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from atas.cli.data import app
from atas.data import cifar
from atas.errors import DataError, UsageError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_get_then_check(tiny, tmp_path, monkeypatch):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    name, spec = tiny.spec.name, tiny.spec
    monkeypatch.setitem(cifar.SPECS, name, spec)
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
    assert f"train: {spec.train_count} images, SHA-256 {spec.train_sha256} (official content)" in check.stdout
    assert f"test: {spec.test_count} images, SHA-256 {spec.test_sha256} (official content)" in check.stdout


def test_check_of_digits():
    check = run("check", "digits")
    assert check.exit_code == 0
    assert "classes: 0, 1, 2" in check.stdout
    assert "train: 1297 images" in check.stdout
    assert "no official checksum" in check.stdout


def test_errors_pass_through(tmp_path):
    assert isinstance(run("check", "cifar10", "--root", tmp_path).exception, DataError)
    assert isinstance(run("check", "digits", "--size", "3").exception, UsageError)
    assert isinstance(run("get", "digits").exception, UsageError)


@pytest.mark.slow
def test_pack_then_verify_then_check(photos, tmp_path):
    out = tmp_path / "packed"
    packed = run("pack", photos, out, "--size", 16, "--workers", 1)
    assert packed.exit_code == 0, packed.exception
    assert f"packed into {out}: 21 training and 6 test images of 2 classes, 16 pixels (crop)" in packed.stdout
    assert f"already packed in {out}" in run("pack", photos, out, "--size", 16).stdout
    assert f"{out}: 2 shards, all intact" in run("verify", out).stdout
    assert json.loads(run("verify", out, "--json").stdout) == {"folder": str(out), "shards": 2, "intact": True}
    about = json.loads(run("pack", photos, out, "--size", 16, "--json").stdout)
    assert about["images"] == {"train": 21, "test": 6}
    assert not about["packed"]
    check = run("check", "packed", "--root", out)
    assert "packed: 3 x 16 x 16 pixels, 2 classes" in check.stdout
    assert "train: 21 images" in check.stdout
    assert isinstance(run("pack", photos, out, "--size", 8).exception, UsageError)
    assert isinstance(run("verify", photos).exception, DataError)


@pytest.mark.slow
def test_pack_without_damaged_images(photos, tmp_path):
    (photos / "train" / "cat" / "bad.png").touch()
    assert isinstance(run("pack", photos, tmp_path / "packed", "--size", 16).exception, DataError)
    packed = run("pack", photos, tmp_path / "packed", "--size", 16, "--skip-damaged", "--format", "jpeg")
    assert isinstance(packed.exception, UsageError)
    packed = run("pack", photos, tmp_path / "packed", "--size", 16, "--skip-damaged")
    assert f"skipped 1 damaged image; {tmp_path / 'packed'}/manifest.json lists it" in packed.stdout


@pytest.mark.parametrize(
    "example", ["get cifar10", "check cifar10", "pack imagenette packed/imagenette", "verify packed/imagenette"]
)
def test_help_has_an_example(example):
    assert f"Example: atas data {example}" in run(example.split()[0], "--help").stdout
