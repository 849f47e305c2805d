"""Packed sets: what is in them, what is refused, and that neither a kill nor a full disk does harm."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from atas import data
from atas._utils.files import file_lock
from atas.data.packed import manifest_checksum
from atas.errors import AtasError, DataError, UsageError

SIZE = 16
SMALL = {"size": SIZE, "images_per_shard": 4}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def flip_a_byte(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 255
    path.write_bytes(raw)


@pytest.fixture
def packed(photos, tmp_path):
    data.pack(photos, tmp_path / "packed", workers=2, **SMALL)
    return tmp_path / "packed"


# What is in a set


def test_raw_is_what_the_image_folder_gives(photos, packed):
    expected, found = data.load("imagefolder", photos, size=SIZE), data.load("packed", packed)
    assert found.name == "packed"
    assert found.shape == (3, SIZE, SIZE)
    for half in ("train", "test"):
        one, other = getattr(expected, half), getattr(found, half)
        assert isinstance(other.images, data.LazyImages)
        assert one.classes == other.classes == ("cat", "dog")
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images[:])
        assert one.sha256() == other.sha256()


def test_images_by_every_kind_of_index(packed):
    images = data.load("packed", packed).train.images
    whole = images[:]
    assert images.shape == whole.shape == (21, 3, SIZE, SIZE)
    assert torch.equal(images[-1], whole[20])
    assert torch.equal(images[3:9:2], whole[3:9:2])
    rows = torch.tensor([20, 0, 7, 7])
    assert torch.equal(images[rows], whole[rows])
    assert torch.equal(images[rows.view(2, 2)], whole[rows.view(2, 2)])
    assert torch.equal(images.subset(rows)[1:], whole[rows][1:])
    assert torch.equal(images.subset(rows).subset(slice(2, None))[:], whole[[7, 7]])
    assert torch.equal(images.to(torch.device("cpu")), whole)
    with pytest.raises(IndexError):
        images[21]
    assert torch.equal(pickle.loads(pickle.dumps(images))[:], whole)  # for the workers of other loaders


@pytest.mark.slow
def test_squash_and_jpeg(photos, tmp_path):
    data.pack(photos, tmp_path / "squash", size=SIZE, fit="squash")
    squashed = data.load("packed", tmp_path / "squash").train.images
    first = sorted((photos / "train" / "cat").iterdir())[0]
    with Image.open(first) as image:
        expected = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    assert np.array_equal(squashed[0].numpy(), expected.transpose(2, 0, 1))

    cropped = data.load("imagefolder", photos, size=SIZE).train.images.float()
    for fit in ("crop", "keep"):
        data.pack(photos, tmp_path / fit, size=SIZE, fit=fit, format="jpeg", quality=100)
        images = data.load("packed", tmp_path / fit).train.images[:].float()
        assert (images - cropped).abs().mean() < 6, fit
    heights, widths = zip(*json.loads((tmp_path / "keep" / "train-00000.json").read_text())["sizes"], strict=True)
    assert min(min(pair) for pair in zip(heights, widths, strict=True)) == SIZE
    assert max(heights) > SIZE
    assert max(widths) > SIZE


def test_the_manifest_tells_how_it_was_made(photos, packed):
    manifest = json.loads((packed / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["settings"] == {"size": SIZE, "fit": "crop", "format": "raw", "quality": None}
    assert manifest["classes"] == ["cat", "dog"]
    assert manifest["source"]["files"] == 27
    assert [shard["count"] for shard in manifest["splits"]["train"]] == [4, 4, 4, 4, 4, 1]
    assert sorted(content(packed)) == sorted(
        ["manifest.json", "plan.json"]
        + [
            f"{half}-{n:05}.{kind}"
            for half, n in (("train", 6), ("test", 2))
            for n in range(n)
            for kind in ("raw", "json")
        ]
    )
    index = json.loads((packed / "test-00001.json").read_text())
    assert index["files"] == ["val/dog/003.png", "val/dog/005.jpg"]
    assert index["labels"] == [1, 1]
    assert index["offsets"] == [0, 3 * SIZE * SIZE]


def test_the_number_of_workers_changes_nothing(photos, packed, tmp_path):
    data.pack(photos, tmp_path / "alone", workers=1, **SMALL)
    assert content(tmp_path / "alone") == content(packed)


# What is refused


@pytest.mark.slow
def test_damaged_images_are_all_listed_or_left_out(photos, tmp_path):
    whole = data.pack(photos, tmp_path / "whole", **SMALL)
    for number in range(6):
        (photos / "train" / "cat" / f"x{number}.png").write_text("no image")
    (photos / "val" / "dog" / "empty.jpg").touch()
    with pytest.raises(DataError) as caught:
        data.pack(photos, tmp_path / "packed", **SMALL)
    said = str(caught.value)
    assert "7 images of 34 cannot be decoded: train/cat/x0.png (cannot identify image file)" in said
    assert f"and 2 more, all listed in {tmp_path / 'packed' / 'damaged.txt'}" in said
    assert "--skip-damaged" in said
    listed = (tmp_path / "packed" / "damaged.txt").read_text().splitlines()
    assert len(listed) == 7
    assert listed[-1] == "val/dog/empty.jpg\tthe file is empty"
    with pytest.raises(DataError, match=r"holds no packed set .* make one, or finish one, with"):
        data.load("packed", tmp_path / "packed")

    manifest = data.pack(photos, tmp_path / "packed", **SMALL, skip_damaged=True)
    assert [name for name, _ in manifest.skipped][-1] == "val/dog/empty.jpg"
    assert len(manifest.skipped) == 7
    assert not (tmp_path / "packed" / "damaged.txt").exists()
    assert len(manifest.source) == len(whole.source)
    assert torch.equal(
        data.load("packed", tmp_path / "packed").train.images[:],
        data.load("packed", tmp_path / "whole").train.images[:],
    )


@pytest.mark.slow
def test_unreadable_file_is_not_left_out_as_damaged(photos, tmp_path, monkeypatch):
    whole = data.pack(photos, tmp_path / "whole", **SMALL)
    open_image, bad = Image.open, sorted((photos / "train" / "dog").iterdir())[-1]

    def fail(path, *how, **more):
        if path == bad:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_image(path, *how, **more)

    monkeypatch.setattr(Image, "open", fail)
    for skip in (False, True):
        with pytest.raises(DataError, match=rf"cannot read {bad} \(Input/output error\), which may be intact; check"):
            data.pack(photos, tmp_path / "packed", **SMALL, skip_damaged=skip)
    assert not list((tmp_path / "packed").glob(".*.tmp"))
    monkeypatch.undo()
    assert data.pack(photos, tmp_path / "packed", **SMALL, skip_damaged=True).shards == whole.shards


@pytest.mark.slow
def test_other_settings_and_other_places(photos, packed, tmp_path):
    with pytest.raises(UsageError, match=r"with other settings \(size 16 became 8\)"):
        data.pack(photos, packed, size=8)
    with pytest.raises(UsageError, match="lies inside the folder of images"):
        data.pack(photos, photos / "train" / "packed")
    with pytest.raises(UsageError, match="is not empty and holds no packed set"):
        data.pack(photos, photos)
    (photos / "train" / "cat" / "000.png").unlink()
    with pytest.raises(UsageError, match="27 files that have changed since"):
        data.pack(photos, packed, **SMALL)
    with file_lock(packed / ".lock", "..."), pytest.raises(AtasError, match="another process packs into"):
        data.pack(photos, packed, **SMALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fit": "stretch"}, "unknown fit 'stretch'"),
        ({"format": "jpg"}, "did you mean 'jpeg'"),
        ({"size": 0}, "size is 0"),
        ({"size": 16.5}, r"size is 16\.5, expected a number of pixels"),
        ({"quality": 101, "format": "jpeg"}, "quality is 101"),
        ({"fit": "keep"}, "raw images are all of one size"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"images_per_shard": 0}, "images_per_shard must be at least 1"),
    ],
)
def test_wrong_options(photos, tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        data.pack(photos, tmp_path / "packed", **options)


def test_no_workers(packed):
    with pytest.raises(UsageError, match="workers must be at least 1; got -1"):
        data.verify(packed, workers=-1)


def test_a_packed_folder_is_not_an_image_folder(photos, packed):
    with pytest.raises(DataError, match="load it with the name packed"):
        data.load("imagefolder", packed)
    with pytest.raises(DataError, match=rf"holds image files, .* pack it with `atas data pack {photos} OUT`"):
        data.load("packed", photos)
    with pytest.raises(UsageError, match="size is for imagefolder"):
        data.load("packed", packed, size=8)


# What is found when a set is opened or verified


def test_a_changed_byte_is_found_and_named(photos, packed):
    assert data.verify(packed).settings["size"] == SIZE
    before = content(packed)
    flip_a_byte(packed / "train-00002.raw", 3 * SIZE * SIZE + 5)
    assert len(data.load("packed", packed).train) == 21
    names = json.loads((packed / "train-00002.json").read_text())["files"]
    with pytest.raises(DataError) as caught:
        data.verify(packed, workers=2)
    assert f"1 of 8 shards are damaged: {packed / 'train-00002.raw'} (images {names[1]})" in str(caught.value)

    (packed / "manifest.json").unlink()  # as the sentence says
    data.pack(photos, packed, **SMALL)
    assert content(packed) == before


def test_files_that_are_cut_missing_or_of_another_set(packed):
    shard = packed / "test-00000.raw"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{shard} has {len(raw) - 1} bytes, expected {len(raw)}"):
        data.load("packed", packed)
    with pytest.raises(DataError, match=f"has {len(raw) - 1} bytes"):
        data.verify(packed)
    shard.unlink()
    with pytest.raises(DataError, match=r"cannot read .*test-00000.raw of a packed set \(No such file"):
        data.load("packed", packed)
    shard.write_bytes(raw)
    flip_a_byte(packed / "test-00001.json", 40)
    with pytest.raises(DataError, match=r"test-00001.json has another checksum than in the manifest"):
        data.load("packed", packed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read"),
        ("[]", "is not a valid manifest"),
        ('{"kind": "other"}', "does not describe a packed set"),
        ('{"kind": "atas-packed", "version": 9}', "has version 9"),
        ('{"kind": "atas-packed", "version": 1}', "is not a valid manifest"),
    ],
)
def test_manifests_of_other_kinds(tmp_path, text, words):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=words):
        data.load("packed", tmp_path)


def test_a_damaged_jpeg_in_a_shard_is_named_when_it_is_read(photos, tmp_path):
    data.pack(photos, tmp_path / "packed", size=SIZE, format="jpeg")
    index = json.loads((tmp_path / "packed" / "train-00000.json").read_text())
    flip_a_byte(tmp_path / "packed" / "train-00000.jpg", index["offsets"][5] + index["lengths"][5] // 2)
    images = data.load("packed", tmp_path / "packed").train.images
    assert images[:5].shape[0] == 5
    with pytest.raises(DataError, match=r"image 5 in .*train-00000.jpg is damaged \(its checksum is wrong\)"):
        images[:]


# Stopped and gone on with


SCRIPT = """
import json, random, shutil, sys, time
from atas import data
from atas.errors import AtasError
from helpers.crash import attempt, count_calls, die_at_call, die_in_write

order = json.loads(sys.argv[1])
chance = random.Random(order["seed"])
WAITS, WORKER_DIED = 7, 8


def pack(out, die=lambda: None):
    die()
    try:
        data.pack(order["photos"], out, size=64, format=order["format"], workers=2, images_per_shard=2)
    except AtasError as error:
        if "another process packs" in str(error):  # a worker of one that was killed may still be busy with an image
            return WAITS
        if "was killed by SIGKILL" in str(error):
            return WORKER_DIED
        raise


calls = count_calls(lambda: pack(order["whole"]))
kills, syncs = [], chance.sample(range(1, 5), 4)  # the first two may still be the parent's
for number in range(order["kills"]):
    call, sync = int(chance.uniform(0.1, 0.6) * calls), syncs[number // 2 % 4]
    code = WAITS
    while code == WAITS:
        if number % 2:  # its workers write, and they inherit this
            code = attempt(lambda: pack(order["killed"], lambda: die_in_write(sync)))
        else:
            code = attempt(lambda: pack(order["killed"], lambda: die_at_call(call)))
    kills.append({0: "none", WORKER_DIED: "worker", -9: "parent"}[code])
    if code == 0:
        shutil.rmtree(order["killed"])
while (code := attempt(lambda: pack(order["killed"]))) == WAITS:
    pass
assert code == 0
print(json.dumps(kills))
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["raw", "jpeg"])
def test_killed_at_random_moments(photos, tmp_path, format, run_script):
    """The packer or one of its workers is killed again and again; in the end every byte is as it should be."""
    kills = run_script(SCRIPT, photos=str(photos), format=format, kills=10)
    assert {"worker", "parent"} <= set(kills), kills
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".*.tmp"))


def test_finished_shards_are_kept_and_damaged_ones_made_anew(photos, packed, monkeypatch):
    before = content(packed)
    (packed / "manifest.json").unlink()
    flip_a_byte(packed / "train-00001.raw", 7)
    (packed / "train-00003.json").unlink()
    (packed / "train-00009.raw").write_text("of an earlier attempt with more files")
    stamps = {path.name: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert len(data.pack(photos, packed, **SMALL).shards) == 8
    assert content(packed) == before
    made = {path.name for path in packed.iterdir() if path.stat().st_mtime_ns != stamps.get(path.name)}
    assert {name for name in made if name.endswith(".raw")} == {"train-00001.raw", "train-00003.raw"}


def test_what_a_killed_packer_left_is_removed_and_nothing_else(photos, packed):
    (packed / "manifest.json").unlink()
    for name in (".train-00000.raw.0a1b2c3d.tmp", ".test-00099.jpg.0a1b2c3d.tmp", ".train-00001.json.0a1b2c3d.tmp"):
        (packed / name).mkdir()
        (packed / name / "train.tmp").write_bytes(b"half")
    (packed / ".plan.json.4711.tmp").write_text("of an earlier version")
    own = {".notes.tmp", ".mine.raw.0a1b2c3d.tmp", ".train-00000.raw.mine.tmp"}
    for name in own:
        (packed / name).write_text("mine")
    data.pack(photos, packed, **SMALL)
    assert {path.name for path in packed.glob(".*")} == own


def test_what_the_last_write_of_a_killed_packer_left_is_removed(photos, packed):
    """It is killed when the manifest has its name and the temporary folder is still there."""
    (packed / ".manifest.json.0a1b2c3d.tmp").mkdir()
    data.pack(photos, packed, **SMALL)
    assert not list(packed.glob(".*"))


def test_a_file_that_was_mended_meanwhile_is_packed_as_it_is_now(photos, packed):
    """The shard is whole, but of another picture."""
    (packed / "manifest.json").unlink()
    Image.new("RGB", (20, 20), "red").save(photos / "train" / "cat" / "000.png")
    data.pack(photos, packed, **SMALL)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, SIZE, SIZE)
    assert torch.equal(data.load("packed", packed).train.images[0], red)


@pytest.mark.slow
def test_a_file_that_cannot_grow(photos, tmp_path):
    """The limit of the system on the size of a file, as a disk that is full in the middle of a shard."""
    command = [sys.executable, "-m", "atas", "data", "pack", str(photos), str(tmp_path / "packed"), "--size", "64"]
    limit = (100_000, 100_000)
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert "run the same command again" in done.stderr
    assert not list((tmp_path / "packed").glob("train*"))
    assert not list((tmp_path / "packed").glob(".*.tmp"))
    data.pack(photos, tmp_path / "packed", size=64)
    data.pack(photos, tmp_path / "other", size=64)
    assert content(tmp_path / "packed") == content(tmp_path / "other")


def test_a_disk_too_small_is_seen_before_the_work(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    with pytest.raises(DataError, match=r"needs 5.44 GB more and its disk has 1 MB left"):
        data.pack(photos, tmp_path / "packed", size=8192)


def test_progress_and_an_interrupt(photos, tmp_path, monkeypatch):
    seen = []
    data.pack(photos, tmp_path / "packed", **SMALL, progress=lambda *told: seen.append(told))
    assert seen[0] == ("packing", 0, 27)
    assert seen[-1] == ("packing", 27, 27)

    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.pack(photos, tmp_path / "stopped", **SMALL, progress=stop)
    data.pack(photos, tmp_path / "stopped", **SMALL)
    assert content(tmp_path / "stopped") == content(tmp_path / "packed")


def test_names_that_are_no_text(photos, tmp_path):
    odd = os.fsencode(photos / "train" / "cat") + b"/\xff\xfe.png"
    Image.new("RGB", (20, 20), "red").save(os.fsdecode(odd))
    bad = os.fsencode(photos / "train" / "cat") + b"/\xff\xfd.png"
    with open(bad, "wb"):
        pass
    with pytest.raises(DataError, match="1 image of 29 cannot be decoded"):
        data.pack(photos, tmp_path / "packed", size=SIZE)
    data.pack(photos, tmp_path / "packed", size=SIZE, skip_damaged=True)
    assert len(data.load("packed", tmp_path / "packed").train) == 22
    assert data.load("imagefolder", photos, size=SIZE, lazy=True).train.fingerprint()


# Sets that someone else has made


def rewrite(folder: Path, change) -> None:
    """Change the manifest, and let its checksum fit again."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    document["sha256"] = manifest_checksum(document)
    path.write_text(json.dumps(document))


def rewrite_index(folder: Path, change) -> None:
    """Change the index of the first shard, and let all checksums fit again."""
    path = folder / "train-00000.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(folder, lambda document: document["splits"]["train"][0].update(index_sha256=sha256))


@pytest.mark.slow
def test_every_changed_byte_of_a_manifest_is_found(packed, capfd):
    path = packed / "manifest.json"
    whole = path.read_bytes()
    meaning = json.loads(whole)
    for place in range(0, len(whole), 7):
        flip_a_byte(path, place)
        try:
            same = json.loads(path.read_bytes()) == meaning  # a blank between two values
        except ValueError:
            same = False
        if not same:
            with pytest.raises(DataError, match=r"manifest.json"):
                data.verify(packed, workers=1)
        path.write_bytes(whole)


def test_a_changed_class_name_is_damage(packed, command):
    path = packed / "manifest.json"
    path.write_text(path.read_text().replace('"cat"', '"cow"'))
    command("data", "verify", packed).sentence("is not a valid manifest (its checksum is wrong)", status=1)


def test_a_set_of_an_earlier_version_has_no_checksum(packed, command):
    assert command("data", "verify", packed).out == f"{packed}: 8 shards, all intact\n"
    document = json.loads((packed / "manifest.json").read_text())
    del document["sha256"]
    (packed / "manifest.json").write_text(json.dumps(document))
    assert len(data.load("packed", packed).train) == 21
    said = command("data", "verify", packed).out
    assert said == f"{packed}: 8 shards, all intact; the manifest, of an earlier version of atas, has no checksum\n"


def first(document):
    return document["splits"]["train"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: first(d).update(name="../../etc/passwd"),
        lambda d: first(d).update(name="train-00000\n"),
        lambda d: first(d).update(name="test-00000"),
        lambda d: first(d).update(name="train-00001"),
        lambda d: first(d).update(count=-4),
        lambda d: first(d).update(count=10**30, bytes=3 * SIZE * SIZE * 10**30),
        lambda d: first(d).update(count=3),
        lambda d: first(d).update(count="4"),
        lambda d: first(d).update(count=True),
        lambda d: d["splits"].update(other=[]),
        lambda d: d["splits"].update(train={}),
        lambda d: d["settings"].update(size=0),
        lambda d: d["settings"].update(size=10**9),
        lambda d: d["settings"].update(size=16.0),
        lambda d: d["settings"].update(format=["raw"]),
        lambda d: d.update(classes="cat"),
        lambda d: d.update(classes=[["cat"], {}]),
        lambda d: d.update(skipped=[["one"]]),
        lambda d: d.update(source=None),
        lambda d: d.update(version="1"),
        lambda d: d.update(kind=[]),
        lambda d: d.update(more=1),
    ],
)
def test_manifests_with_wrong_values(packed, change, command):
    rewrite(packed, change)
    with pytest.raises(DataError, match=r"manifest.json"):
        data.load("packed", packed)
    command("data", "verify", packed).sentence("manifest.json", status=1)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"NaN", b"", b'"atas-packed"', b"\x00" * 10],
    ids=["bytes", "lists", "objects", "digits", "nan", "empty", "text", "zeros"],
)
def test_manifests_that_are_none(packed, content, command):
    (packed / "manifest.json").write_bytes(content)
    for arguments in (("verify", packed), ("check", "packed", "--root", packed)):
        command("data", *arguments).sentence("manifest.json", status=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i.update(labels="0000"),
        lambda i: i.update(labels=[0, 0, 0]),
        lambda i: i.update(labels=[0, 0, 0, "1"]),
        lambda i: i.update(labels=[0, 0, 0, 2]),
        lambda i: i.update(labels=[0, 0, 0, -1]),
        lambda i: i.update(labels=[0, 0, 0, 10**30]),
        lambda i: i.update(labels=[0, 0, 0, [1]]),
        lambda i: i.update(labels=[0.5, 0, 0, 1]),
        lambda i: i.update(lengths=[2**62] * 4),
        lambda i: i.update(offsets=[-1] * 4),
        lambda i: i.update(files=[1, 2, 3, 4]),
        lambda i: i.pop("crc32"),
    ],
)
def test_indices_with_wrong_values(packed, change, command):
    rewrite_index(packed, change)
    with pytest.raises(
        DataError, match=r"train-00000.json of a packed set cannot be used \('(labels|lengths|offs|f|crc)"
    ):
        data.load("packed", packed)
    command("data", "verify", packed).sentence("shards are damaged: ", "train-00000.json", status=1)


def test_a_manifest_may_be_a_folder_or_nested_deeply(photos, packed, tmp_path):
    (packed / "plan.json").write_text("[" * 100_000)
    (packed / "manifest.json").unlink()
    (packed / "train-00000.json").write_text("[" * 100_000)
    assert len(data.pack(photos, packed, **SMALL).shards) == 8  # made anew
    (packed / "manifest.json").unlink()
    (packed / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*manifest.json"):
        data.load("packed", packed)
