"""Forward and backward passes: modes, flags, precision, gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atas.core.autograd import (
    contiguous,
    cross_entropy,
    cross_entropy_sum,
    freeze,
    gradient_penalty,
    input_gradient,
    keep_statistics,
    set_mode,
    to_float32,
)
from atas.errors import UsageError


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("was_training", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_mode_is_set_and_put_back(small_net, was_training, training):
    model = small_net().train(was_training)
    found = modes(model)
    with set_mode(model, training):
        assert modes(model) == [training] * len(found)
    assert modes(model) == found


@pytest.mark.parametrize("training", [True, False])
def test_each_module_gets_its_own_mode_back(small_net, training):
    model = small_net().train()
    model.bn1.eval()
    found = modes(model)
    with set_mode(model, training):
        assert not model.bn1.training
        assert model.bn2.training == training
    assert modes(model) == found


def test_a_part_in_train_mode_goes_into_eval_mode_with_the_rest(small_net):
    model = small_net().eval()
    model.bn1.train()
    with set_mode(model, False):
        assert not any(modes(model))
    assert model.bn1.training
    assert not model.training


@pytest.mark.parametrize("training", [True, False])
def test_modes_come_back_after_an_error(small_net, training):
    model = small_net().train(not training)
    found = modes(model)
    with pytest.raises(KeyError), set_mode(model, training):
        raise KeyError
    assert modes(model) == found


def test_modes_nest(small_net):
    model = small_net().train()
    with set_mode(model, False):
        with set_mode(model, True):
            assert all(modes(model))
        assert not any(modes(model))
    assert all(modes(model))


def test_frozen_weights_thaw(small_net):
    model = small_net()
    model.fc.weight.requires_grad_(False)
    flags = [weight.requires_grad for weight in model.parameters()]
    with freeze(model):
        assert not any(weight.requires_grad for weight in model.parameters())
    assert [weight.requires_grad for weight in model.parameters()] == flags
    with pytest.raises(KeyError), freeze(model):
        raise KeyError
    assert [weight.requires_grad for weight in model.parameters()] == flags


def test_frozen_weights_get_no_gradient(small_net, make_images):
    model, x = small_net(), make_images(3).requires_grad_()
    with freeze(model):
        logits = model(x)
    logits.sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_losses_are_in_float32_at_least(dtype, wanted):
    logits, y = torch.randn(3, 4).to(dtype), torch.tensor([0, 1, 2])
    assert to_float32(logits).dtype == wanted
    assert cross_entropy(logits, y).dtype == wanted
    assert cross_entropy_sum(logits, y).dtype == wanted


def test_one_loss_is_the_mean_and_the_other_the_sum():
    logits, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    each = torch.stack([-torch.log(row.exp()[label] / row.exp().sum()) for row, label in zip(logits, y, strict=True)])
    torch.testing.assert_close(cross_entropy(logits, y), each.sum() / 5)
    torch.testing.assert_close(cross_entropy_sum(logits, y), each.sum())


def test_input_gradients_by_finite_differences(small_net, make_images):
    model, x, y = small_net().double().eval(), make_images(3, dtype=torch.float64), torch.tensor([0, 1, 2])
    gradient, logits = input_gradient(model, x, y)
    torch.testing.assert_close(logits, model(x).detach())
    assert not gradient.requires_grad
    assert not logits.requires_grad
    h = 1e-6
    for place in [(0, 0, 0, 0), (1, 2, 3, 4), (2, 1, 7, 9)]:
        there, back = x.clone(), x.clone()
        there[place] += h
        back[place] -= h
        with torch.no_grad():
            slope = (F.cross_entropy(model(there), y) - F.cross_entropy(model(back), y)) * len(y) / (2 * h)
        assert float(gradient[place]) == pytest.approx(float(slope), rel=1e-5)


def test_input_gradients_do_not_depend_on_the_batch(small_net, make_images):
    model, x, y = small_net().double().eval(), make_images(4, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    whole, _ = input_gradient(model, x, y)
    for i in range(4):
        alone, _ = input_gradient(model, x[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(alone[0], whole[i])


def test_input_gradients_of_another_loss(make_images):
    x = make_images(2)
    gradient, _ = input_gradient(nn.Flatten(), x, torch.zeros(2), lambda logits, _: (logits**2).sum())
    torch.testing.assert_close(gradient, 2 * x)


def test_input_gradients_leave_the_input_alone_and_work_where_gradients_are_off(small_net, make_images):
    model, x, y = small_net().eval(), make_images(2), torch.tensor([0, 1])
    with torch.no_grad():
        gradient, _ = input_gradient(model, x, y)
    assert not x.requires_grad
    assert x.grad is None
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_transposed_arrays_get_the_strides_of_new_tensors(channels):
    images = torch.rand(2, 4, 5, channels, requires_grad=True).permute(0, 3, 1, 2)
    laid_out = contiguous(images)
    assert laid_out.stride() == torch.empty(images.shape).stride()
    assert torch.equal(laid_out, images)
    assert laid_out.requires_grad


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 1, 1), (0, 3, 4, 4), (2, 1, 4, 4)])
def test_images_with_the_strides_of_new_tensors_are_not_copied(shape):
    images = torch.rand(shape)
    assert contiguous(images) is images


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("fix", ["freeze", "export"])
def test_a_graph_that_is_fixed_in_eval_mode_stays_in_it(small_net, fix):
    model = small_net().eval()
    x = torch.rand(2, 3, 8, 8)
    if fix == "freeze":
        graph = torch.jit.freeze(torch.jit.trace(model, x))
    else:
        graph = torch.export.export(model, (x,)).module()
    with set_mode(graph, False):
        torch.testing.assert_close(graph(x), model(x))
    if fix == "freeze":
        with pytest.raises(UsageError, match="fixed in eval mode"), set_mode(graph, True):
            pass
    whole = nn.Sequential(nn.Dropout(0.5), graph)
    with set_mode(whole, False):
        torch.testing.assert_close(whole(x), model(x))
    assert whole.training
    assert whole[0].training
    whole.training = whole[0].training = False
    with set_mode(whole, True):
        assert whole[0].training
    assert not whole[0].training


def test_a_model_whose_modules_are_all_in_the_mode_is_not_switched(small_net):
    model = small_net().eval()
    model.train = lambda mode=True: pytest.fail("the mode was set")
    with set_mode(model, False):
        assert not any(modes(model))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_input_gradients_in_eval_mode_on_a_gpu(kind):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = kind(8, 8, batch_first=True, dropout=0.0), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.rnn(x.squeeze(1))[0][:, -1])

    model, x, y = Rows(), torch.rand(5, 1, 8, 8), torch.arange(5) % 3
    with set_mode(model, False):
        expected, _ = input_gradient(model, x, y)
    model.cuda().train()
    before = torch.backends.cudnn.enabled
    with set_mode(model, False):
        found, _ = input_gradient(model, x.cuda(), y.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-5)
    assert torch.backends.cudnn.enabled == before
    assert not model.rnn._forward_hooks
    assert not model.rnn._forward_pre_hooks


def test_recurrent_layers_leave_cudnn_and_come_back(monkeypatch):
    """As on a GPU, but for the device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    model, seen = nn.Sequential(nn.LSTM(4, 4)), []
    model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled), prepend=True)
    with set_mode(model, False):
        model(torch.rand(2, 3, 4))
        with pytest.raises(RuntimeError):
            model(torch.rand(2, 3, 5))
        assert torch.backends.cudnn.enabled
    model(torch.rand(2, 3, 4))
    assert seen == [False, True]
    assert len(model[0]._forward_hooks) == 1


def test_recurrent_layers_leave_cudnn_for_a_second_derivative(monkeypatch):
    """As on a GPU, but for the device."""
    model, seen = nn.Sequential(nn.RNN(4, 4)), []
    model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    x, y = torch.rand(2, 3, 4), torch.zeros(2, dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        gradient_penalty(model, x, y, lambda outputs, _: outputs[0].sum(), torch.sum).backward()
    assert seen == [False]
    assert torch.backends.cudnn.enabled
    assert len(model[0]._forward_hooks) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_a_second_derivative_on_a_gpu(kind):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = kind(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.rnn(x.squeeze(1))[0][:, -1])

    model, x, y = Rows(), torch.rand(5, 1, 8, 8), torch.arange(5) % 3
    found = {}
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        gradient_penalty(model, x.to(device), y.to(device), cross_entropy_sum, lambda g: g.square().sum()).backward()
        found[device] = [weight.grad.cpu().clone() for weight in model.parameters() if weight.grad is not None]
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-2, atol=1e-5)


class Counting(nn.Module):
    """Counts its passes on the host, as networks of kernels do."""

    train_forward_count = 0

    def forward(self, x):
        self.train_forward_count += 1
        return x


def test_statistics_that_are_kept_include_the_counts_of_a_wrapped_network():
    network = Counting()
    model = nn.Sequential(network, nn.BatchNorm1d(3))
    with keep_statistics(model):
        model(torch.randn(4, 3))
    assert network.train_forward_count == 0
    assert model[1].num_batches_tracked == 0
    assert not model[1].running_mean.any()
