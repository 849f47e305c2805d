"""Common corruptions."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import atas
from atas.errors import DataError, UsageError
from atas.evaluation import Evaluation, evaluate
from atas.evaluation.corruptions import Corruption, names

GREY = torch.full((4, 3, 32, 32), 0.5)


def corrupt(x, name, severity, **options):
    return Corruption(name, severity)(None, x, None, None, **options)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 17, 40)])
def test_more_severity_changes_more_and_images_stay_images(name, shape):
    coarse = torch.rand(6, shape[0], 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(coarse, shape[1:], mode="bilinear")
    distances = []
    for severity in range(1, 6):
        found = corrupt(x, name, severity)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        assert found.min() >= 0
        assert found.max() <= 1
        distances.append(float((found - x).norm()))
    if shape == (3, 32, 32):
        assert distances == sorted(distances)
    assert distances[-1] > 0


@pytest.mark.parametrize("name", names())
def test_an_image_s_corruption_does_not_depend_on_its_batch(name):
    x = torch.rand(5, 3, 16, 16)
    together = corrupt(x, name, 3, index=torch.arange(10, 15))
    alone = corrupt(x[3:4], name, 3, index=torch.tensor([13]))
    torch.testing.assert_close(together[3:4], alone, rtol=0, atol=1e-6)
    if name.endswith("noise"):
        assert not torch.equal(together, corrupt(x, name, 3))
        assert not torch.equal(together, corrupt(x, name, 3, index=torch.arange(10, 15), seed=1))


def test_the_size_of_the_noise():
    assert float((corrupt(GREY, "gaussian-noise", 2) - GREY).std()) == pytest.approx(0.06, rel=0.05)
    assert float((corrupt(GREY, "shot-noise", 3) - GREY).std()) == pytest.approx((0.5 / 100) ** 0.5, rel=0.05)
    changed = corrupt(GREY, "impulse-noise", 5)
    assert float((changed == 0).float().mean()) == pytest.approx(0.035, abs=0.01)
    assert float((changed == 1).float().mean()) == pytest.approx(0.035, abs=0.01)


def test_blur_is_a_slow_average():
    x = torch.rand(1, 1, 32, 32, dtype=torch.float64)
    found, radius = corrupt(x, "defocus-blur", 5)[0, 0], 1.7
    for row, column in ((0, 0), (15, 7), (31, 30)):
        total = weight = 0.0
        for i in range(-2, 3):
            for j in range(-2, 3):
                share = min(max(radius + 0.5 - (i * i + j * j) ** 0.5, 0), 1)
                total += share * float(x[0, 0, min(max(row + i, 0), 31), min(max(column + j, 0), 31)])
                weight += share
        assert float(found[row, column]) == pytest.approx(total / weight, abs=1e-9)
    for name in ("gaussian-blur", "defocus-blur", "contrast", "pixelate"):
        torch.testing.assert_close(corrupt(GREY, name, 5), GREY)


def test_jpeg_is_pillow_s():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), dtype=np.uint8)
    found = corrupt(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255, "jpeg", 4)
    for image, result in zip(pixels, found, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=50)
        np.testing.assert_array_equal((result.permute(1, 2, 0) * 255).round().numpy(), np.asarray(Image.open(file)))


def test_an_evaluation_counts_them_apart(problem, ball, tmp_path):
    model, x, y = problem
    result = evaluate(
        model, x, y, ball, attacks=["fgsm"], corruptions=["jpeg", "impulse-noise"], seed=3, chunk_bytes=4000, keep=True
    )
    plain = evaluate(model, x, y, ball, attacks=["fgsm"], seed=3)
    assert result.accuracy == plain.accuracy
    assert list(result.adversarial) == ["fgsm"]
    for name in ("jpeg", "impulse-noise"):
        for severity in range(1, 6):
            with torch.no_grad():
                expected = int((model(corrupt(x, name, severity, seed=3)).argmax(1) == y).sum())
            assert result.corruptions[name][severity - 1] == expected
    assert "impulse-noise" in str(result)
    assert "| jpeg |" in result.markdown()
    assert plain.to_json().keys() == result.to_json().keys() - {"corruptions"}
    result.save(tmp_path / "a.json")
    assert Evaluation.load(tmp_path / "a.json").corruptions == result.corruptions
    values = json.loads((tmp_path / "a.json").read_text())
    values["corruptions"]["jpeg"]["right"][0] = 31
    del values["checksum"]
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="a corruption has more than 30 correct examples"):
        Evaluation.load(tmp_path / "a.json")


@pytest.mark.slow
def test_a_stopped_evaluation_resumes(problem, ball, tmp_path):
    def run(progress):
        return evaluate(
            *problem, ball, attacks=["fgsm"], corruptions="all", progress=progress, progress_file=tmp_path / "p.json"
        )

    def stop(status):
        if status.attack == "contrast-3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    seen = []
    result = run(lambda status: seen.append(status.note or ""))
    assert any("resuming" in note for note in seen)
    assert list(result.corruptions) == names()
    assert result.corruptions == evaluate(*problem, ball, attacks=[], corruptions="all").corruptions


def test_wrong_corruptions_are_refused(problem, ball):
    with pytest.raises(UsageError, match="unknown corruption 'gaussian'; did you mean 'gaussian-noise'"):
        evaluate(*problem, ball, corruptions=["gaussian"])
    with pytest.raises(UsageError, match="corruptions are names such as"):
        evaluate(*problem, ball, corruptions=3)
    with pytest.raises(UsageError, match="leave out targets or corruptions"):
        evaluate(*problem, ball, corruptions="all", targets=1)
    with pytest.raises(UsageError, match="severity must be one of 1 to 5; got 6"):
        corrupt(GREY, "jpeg", 6)
    assert atas.evaluation.corruptions.names() == names()


def slow_filter(pixels, weight, reach):
    """A weighted mean around each pixel, by loops, with the pixels at the edges repeated beyond them."""
    height, width = pixels.shape
    out = np.zeros_like(pixels)
    offsets = [(i, j) for i in range(-reach, reach + 1) for j in range(-reach, reach + 1)]
    total = sum(weight(i, j) for i, j in offsets)
    for row, column in np.ndindex(height, width):
        out[row, column] = sum(
            weight(i, j) * pixels[min(max(row + i, 0), height - 1), min(max(column + j, 0), width - 1)]
            for i, j in offsets
        )
    return out / total


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scale"), [((9, 12), 1.0), ((33, 44), 33 / 32)])
def test_gaussian_blur_is_the_slow_one_s(size, scale):
    """Lengths grow with the shorter side above 32 pixels."""
    x = torch.rand(1, 1, *size, dtype=torch.float64)
    sigma = 0.8 * scale
    expected = slow_filter(x[0, 0].numpy(), lambda i, j: np.exp(-(i * i + j * j) / (2 * sigma**2)), int(3 * sigma) + 1)
    np.testing.assert_allclose(corrupt(x, "gaussian-blur", 4)[0, 0].numpy(), expected, rtol=0, atol=1e-12)


def test_contrast_shrinks_each_channel_towards_its_mean():
    x = torch.rand(4, 3, 5, 6, dtype=torch.float64)
    found = corrupt(x, "contrast", 4).numpy()
    for image, channel in np.ndindex(4, 3):
        pixels = x[image, channel].numpy()
        np.testing.assert_allclose(found[image, channel], pixels.mean() + 0.3 * (pixels - pixels.mean()), atol=1e-12)


def test_pixelate_has_that_many_pixels_along_each_side():
    x = torch.rand(1, 1, 20, 60, dtype=torch.float64)
    found = corrupt(x, "pixelate", 5)[0, 0]
    assert len(found.unique(dim=0)) == 6
    assert len(found.unique(dim=1).T) == 18


def test_a_corruption_that_cannot_be_made_is_refused_before_the_attacks(small_net, ball):
    seen = []
    with pytest.raises(UsageError, match="jpeg needs images of 1 or 3 channels; got 2"):
        evaluate(
            small_net(channels=2),
            torch.rand(4, 2, 6, 5),
            torch.zeros(4).long(),
            ball,
            corruptions="all",
            progress=seen.append,
        )
    assert not seen
    with pytest.raises(UsageError, match="a corruption must be a text; got 3"):
        evaluate(small_net(), torch.rand(4, 3, 6, 5), torch.zeros(4).long(), ball, corruptions=[3])
