"""What holds for every attack: where its points lie, what it leaves behind, what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atas import attacks, threat
from atas.core.validation import DeviceChecks
from atas.errors import DataError, UsageError

ATTACKS = {
    "fgsm": attacks.fgsm,
    "pgd": attacks.pgd,
    "pgd-restarts": lambda model, x, y, ball: attacks.pgd(model, x, y, ball, steps=2, restarts=3),
    "by-name": attacks.create("pgd3x2"),
}


@pytest.fixture(params=list(ATTACKS))
def attack(request):
    return ATTACKS[request.param]


@pytest.fixture
def problem(small_net, make_images, labels):
    return small_net(sharpness=5.0), make_images(5), labels(5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["linf", "l2"]),
    st.floats(0, 1),
    st.floats(1e-3, 1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)
def test_points_stay_in_the_ball_and_are_images(small_net, make_images, norm, eps, size, steps, restarts, seed, first):
    ball = threat.create(norm, eps)
    net, x, y = small_net(channels=1), make_images(3, (1, 4, 5), seed=seed % 1000), torch.tensor([0, 3, 1])
    for point in (
        attacks.fgsm(net, x, y, ball),
        attacks.pgd(net, x, y, ball, steps, size, restarts, seed, first + torch.arange(3)),
    ):
        assert point.min() >= 0
        assert point.max() <= 1
        assert ball.distance(point, x).max() <= eps * (1 + 1e-5) + 1e-6


def test_attacks_raise_the_loss(attack, problem, ball):
    model, x, y = problem
    model.eval()
    loss = nn.CrossEntropyLoss(reduction="none")
    assert (loss(model(attack(model, x, y, ball)), y) > loss(model(x), y)).all()


def test_modes_flags_gradients_and_statistics_are_left_as_found(attack, problem, ball):
    model, x, y = problem
    model.train()
    model.bn2.eval()
    model.conv1.weight.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    before = x.clone()
    x.requires_grad_()

    def check():
        assert [m.training for m in model.modules()] == modes
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["conv1.weight"]
        assert [n for n, p in model.named_parameters() if p.grad is not None] == ["fc.weight"]
        assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert torch.equal(x, before)
        assert x.grad is None

    found = attack(model, x, y, ball)
    assert not found.requires_grad
    check()

    hook = model.fc.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        attack(model, x, y, ball)
    hook.remove()
    check()


def test_the_model_runs_in_eval_mode_and_no_weight_takes_part(attack, problem, ball):
    model, x, y = problem
    seen = []
    model.train()
    model.register_forward_hook(
        lambda m, _, __: seen.append((m.training, any(p.requires_grad for p in m.parameters())))
    )
    attack(model, x, y, ball)
    assert set(seen) == {(False, False)}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_caller_s_gradient_mode_does_not_matter(attack, problem, ball, context):
    model, x, y = problem
    expected = attack(model, x, y, ball)
    with context():
        found = attack(model, x.clone(), y.clone(), ball)
    assert torch.equal(found, expected)


def test_channels_last(attack, problem, ball):
    model, x, y = problem
    expected = attack(model.double(), x.double(), y, ball)
    x = x.to(memory_format=torch.channels_last)
    found = attack(model.to(memory_format=torch.channels_last), x.double(), y, ball)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_that_of_the_images(attack, problem, ball, dtype):
    model, x, y = problem
    found = attack(model.to(dtype), x.to(dtype), y.int(), ball)
    assert (found.dtype, found.device, found.shape) == (dtype, x.device, x.shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_in_half_precision_are_refused(attack, problem, ball, dtype):
    """Their rounding is a good part of a budget."""
    model, x, y = problem
    with pytest.raises(DataError, match=r"must be float32.*x\.float\(\)"):
        attack(model.to(dtype), x.to(dtype), y, ball)


def test_an_empty_batch_stays_empty(attack, problem, ball):
    model, x, y = problem
    assert attack(model, x[:0], y[:0], ball).shape == (0, *x.shape[1:])


def test_an_example_s_point_does_not_depend_on_its_batch(problem, ball):
    model, x, y = problem
    model, x = model.double(), x.double()
    together = attacks.pgd(model, x, y, ball, restarts=2)
    for i in range(len(x)):
        alone = attacks.pgd(model, x[i : i + 1], y[i : i + 1], ball, restarts=2, index=torch.tensor([i]))
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-10)
    order = torch.tensor([3, 0, 4])
    torch.testing.assert_close(
        attacks.pgd(model, x[order], y[order], ball, restarts=2, index=order.int()), together[order], rtol=0, atol=1e-10
    )


def test_seed_and_index_change_the_start(problem):
    model, x, y = problem
    ball = threat.Linf(8 / 255)
    found = attacks.pgd(model, x, y, ball, steps=1)
    assert torch.equal(found, attacks.pgd(model, x, y, ball, steps=1))
    assert not torch.equal(found, attacks.pgd(model, x, y, ball, steps=1, seed=1))
    assert not torch.equal(found, attacks.pgd(model, x, y, ball, steps=1, index=torch.arange(len(x)) + 1))


def test_where_the_gradient_is_not_a_number_the_point_stays_an_image(attack, ball):
    class Root(nn.Module):
        def forward(self, x):
            total = x[:, 0].flatten(1).mul(0).sum(1)
            return torch.stack([total.sqrt(), total + 1], 1)

    x = torch.rand(3, 1, 2, 2)
    found = attack(Root(), x, torch.tensor([0, 1, 1]), ball)
    assert found.isfinite().all()
    assert ball.distance(found, x).max() <= ball.eps + 1e-6


def test_logits_that_are_not_numbers_are_never_right():
    nan = float("nan")
    logits = torch.tensor([[nan, nan], [0.0, nan], [2.0, 1.0], [1.0, float("inf")]])
    assert attacks.correct(logits, torch.tensor([0, 1, 0, 1])).tolist() == [False, False, True, True]


def _set(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (x * 255, y), r"the images leave \[0, 1\].* divide uint8 images by 255"),
        (lambda x, y: (_set(x, float("nan")), y), "NaN or infinite"),
        (lambda x, y: (_set(x, -0.5), y), r"the images leave \[0, 1\]"),
        (lambda x, y: ((x * 255).byte(), y), "images must be float"),
        (lambda x, y: (x[0], y), r"images must be a batch \(N, C, H, W\)"),
        (lambda x, y: (x, _set(y, 4)), r"outside of 0..3"),
        (lambda x, y: (x, _set(y, -1)), r"outside of 0..3"),
        (lambda x, y: (x, y[:-1]), "labels must be one number an image"),
        (lambda x, y: (x, y.float()), "labels must be integers"),
        (lambda x, y: (x, y.to("meta")), "the labels are on meta, the images on cpu"),
    ],
)
def test_wrong_inputs_are_refused(attack, problem, ball, spoil, message):
    model, x, y = problem
    with pytest.raises(DataError, match=message) as caught:
        attack(model, *spoil(x, y), ball)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda logits: (logits, logits), "must return a tensor of logits .*; got tuple"),
        (lambda logits: logits[:, :, None], r"got \(5, 4, 1\)"),
        (lambda logits: logits[:, :1], r"two classes or more for 5 images; got \(5, 1\)"),
        (lambda logits: logits[:-1], r"got \(4, 4\)"),
        (lambda logits: logits.sum(), r"got \(\)"),
    ],
)
def test_a_model_without_logits_is_refused(attack, problem, ball, output, message):
    model, x, y = problem
    model.register_forward_hook(lambda _, __, logits: output(logits))
    with pytest.raises(UsageError, match=message):
        attack(model, x, y, ball)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"restarts": 0}, "restarts must be at least 1; got 0"),
        ({"step_size": 0.0}, "step_size must be a number above zero"),
        ({"step_size": float("nan")}, "step_size must be a finite number"),
    ],
)
def test_wrong_settings_are_refused(problem, ball, setting, message):
    with pytest.raises(UsageError, match=message):
        attacks.pgd(*problem, ball, **setting)
    if "step_size" in setting:
        with pytest.raises(UsageError, match=message):
            attacks.create("pgd10", **setting).settings(ball)


def test_a_step_in_grey_levels_is_told_how_to_be_written(problem):
    with pytest.raises(UsageError, match=r"step_size is in pixel units of \[0, 1\]: write 2/255 rather than 2"):
        attacks.pgd(*problem, threat.Linf(8 / 255), step_size=2)


def test_wrong_indices_are_refused(problem, ball):
    with pytest.raises(DataError, match="indices must be one number an image"):
        attacks.pgd(*problem, ball, index=torch.arange(3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fgsm", "pgd10x3"])
def test_attacks_run_on_a_gpu(name, problem, ball):
    model, x, y = problem
    attack = attacks.create(name)
    expected = attack(model.double(), x.double(), y, ball)
    model, x, y = model.cuda(), x.double().cuda(), y.cuda()
    found = attack(model, x, y, ball).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # starts are drawn in float32
    for bad_x, bad_y, message in ((x * 255, y, "leave"), (x, y + 4, "outside of"), (x / 0, y, "NaN")):
        with pytest.raises(DataError, match=message):
            attack(model, bad_x, bad_y, ball)
    assert attack(model, x[:0], y[:0], ball).shape == (0, *x.shape[1:])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_never_waits_between_the_steps(problem, ball, monkeypatch):
    model, x, y = problem
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    attacks.pgd(model, x, y, ball)
    passes = []

    def forbid_waiting(*_):
        torch.cuda.set_sync_debug_mode("error")
        passes.append(1)

    def allow_waiting(guard):
        torch.cuda.set_sync_debug_mode("default")
        return raise_if_set(guard)

    raise_if_set = DeviceChecks.raise_if_set
    monkeypatch.setattr(DeviceChecks, "raise_if_set", allow_waiting)
    model.register_forward_pre_hook(forbid_waiting)
    try:
        attacks.pgd(model, x, y, ball, steps=5, restarts=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(passes) == 2 * 5 + 1
