"""The monitor: what it looks at, what it calls a collapse, and what is done about one."""

import hashlib
import itertools

import pytest
import torch
from helpers.probes import scripted_probe
from torch import nn

import atas
from atas import recipes
from atas.errors import AtasError
from atas.training import Run, checkpoint
from atas.training.monitor import Monitor, ProbeResult, split_probe
from atas.training.monitor_budget import resolve_probe
from atas.training.run import RunFolder
from atas.training.trainer import Interrupted, Trainer

HEALTHY = ProbeResult(clean=0.9, fgsm=0.6, pgd10=0.5)
COLLAPSED = ProbeResult(clean=0.9, fgsm=0.95, pgd10=0.02)


def judge(*pgd_and_fgsm):
    """What the monitor says of each of these epochs, given as (PGD, FGSM)."""
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    return [monitor.update(ProbeResult(clean=0.9, fgsm=fgsm, pgd10=pgd)) for pgd, fgsm in pgd_and_fgsm]


# Judging


def test_a_collapse_is_pgd_falling_while_fgsm_rises():
    assert judge((0.3, 0.35), (0.4, 0.45), (0.45, 0.5), (0.05, 0.8)) == [False, False, False, True]
    assert judge((0.45, 0.5), (0.0, 0.9), (0.0, 0.95)) == [False, True, True]


def test_a_collapse_in_which_fgsm_falls_too_is_found_after_two_epochs():
    """As FGSM-RS collapsed on CIFAR-10 at 16/255. On the digits, ATTA and ATAS have such epochs and recover."""
    assert judge((0.231, 0.259), (0.009, 0.099), (0.0, 0.103), (0.0, 0.45)) == [False, False, True, True]
    assert judge((0.153, 0.18), (0.093, 0.25), (0.007, 0.14), (0.067, 0.12)) == [False] * 4
    assert judge((0.45, 0.5), (0.01, 0.1), (0.06, 0.1), (0.01, 0.1)) == [False] * 4  # not in a row


@pytest.mark.parametrize(("attacked", "best", "fires"), [(True, 0.4, True), (False, 0.4, False), (True, 0.15, False)])
def test_robustness_that_is_not_trained_for_may_be_lost(attacked, best, fires):
    """As in standard training of a model that was robust; nor is one robust whose best is hardly above chance."""
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1), adversarial=attacked)
    probes = ProbeResult(0.5, best + 0.01, best), ProbeResult(0.6, 0.06, 0.0), ProbeResult(0.7, 0.03, 0.0)
    assert [monitor.update(probe) for probe in probes] == [False, False, fires]


def test_the_sentence_names_the_sign():
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    monitor.update(ProbeResult(0.99, 0.95, 0.9))
    assert monitor.update(ProbeResult(0.99, 0.94, 0.1))
    (event,) = monitor.events({"epoch": 1, "clean": 0.99, "fgsm": 0.94, "pgd10": 0.1})
    assert event.row == {"event": "collapse", "epoch": 1, "pgd10": 0.1, "fgsm": 0.94}
    assert "while FGSM accuracy is 94.0%" in event.message
    assert monitor.events({"epoch": 2, "clean": 0.99, "fgsm": 0.94, "pgd10": 0.1}) == []


def test_a_breakdown_is_no_collapse():
    """Robustness is gone in both; in a breakdown clean accuracy is, too."""
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    epochs = ProbeResult(0.8, 0.45, 0.4), ProbeResult(0.3, 0.1, 0.0), ProbeResult(0.3, 0.1, 0.0)
    assert not any(monitor.update(probe) for probe in epochs)
    assert monitor.update(ProbeResult(0.5, 0.1, 0.0)) is False
    assert monitor.update(ProbeResult(0.5, 0.1, 0.0)) is True
    (event,) = monitor.events({"epoch": 4, "clean": 0.5, "fgsm": 0.1, "pgd10": 0.0})
    assert "while clean accuracy is 50.0%. The model has lost" in event.message


def test_a_collapse_to_weak_robustness_is_one_too():
    assert judge((0.6, 0.65), (0.24, 0.78)) == [False, True]


def test_a_slow_collapse_is_found_when_half_is_gone():
    found = judge((0.50, 0.55), (0.42, 0.60), (0.34, 0.65), (0.24, 0.70), (0.10, 0.80))
    assert found == [False, False, False, True, True]


@pytest.mark.parametrize(
    "epochs",
    [
        [(0.45, 0.5), (0.1, 0.15), (0.46, 0.51)],  # a bad epoch: both fall
        [(0.45, 0.5), (0.1, 0.1)],
        [(0.45, 0.5), (0.2, 0.28), (0.4, 0.5)],
        [(0.0, 0.1), (0.0, 0.5), (0.0, 0.7)],  # never robust: ordinary training seen by FGSM
        [(0.02, 0.1), (0.01, 0.7), (0.0, 0.75)],
        [(0.08, 0.1), (0.0, 0.7)],  # less than ten points to lose
        [(k / 100, k / 100 + 0.05) for k in range(10, 60)],  # slow improvement
        [(k / 100, 2 * k / 100) for k in range(10, 50)],  # the gap widens while both rise
        [(0.5, 0.55), (0.45, 0.6), (0.4, 0.65), (0.5, 0.6)],  # a dip, by less than half
        [(0.3, 0.7)],  # the first epoch has nothing to fall from
        [(0.53, 0.66), (0.16, 0.47), (0.38, 0.59)],  # a bad epoch under a large budget: the gap is wide, but both fall
    ],
)
def test_monitor_reports_no_collapse_for_ordinary_curves(epochs):
    assert judge(*epochs) == [False] * len(epochs)


@pytest.mark.parametrize(
    ("best", "now", "collapsed"),
    [
        ((0.2, 0.3), (0.11, 0.3), False),  # 9 points
        ((0.2, 0.3), (0.1, 0.3), True),  # 10 points, half of the best
        ((0.2, 0.3), (0.08, 0.3), True),  # 12 points
        ((0.2, 0.3), (0.08, 0.29), False),  # FGSM accuracy below that at the best
        ((0.16, 0.3), (0.07, 0.3), False),  # more than half of the best, but 9 points
        ((0.16, 0.3), (0.05, 0.3), True),  # 11 points
        ((0.5, 0.6), (0.26, 0.6), False),  # 24 points, less than half of the best
        ((0.5, 0.6), (0.25, 0.6), True),
        ((0.05, 0.1), (0.01, 0.8), False),  # never robust: a gap of 79 points
        ((0.05, 0.1), (0.0, 0.8), True),
    ],
)
def test_where_a_collapse_begins(best, now, collapsed):
    """Half of the best PGD accuracy and at least 10 points are lost, and FGSM accuracy is not."""
    assert judge(best, now) == [False, collapsed]


def test_a_model_that_has_learnt_nothing_is_no_best():
    """A new network names one class for everything, so no attack changes its answers; then it begins to learn."""
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    assert not monitor.update(ProbeResult(clean=0.12, fgsm=0.12, pgd10=0.12))
    assert not monitor.update(ProbeResult(clean=0.5, fgsm=0.15, pgd10=0.0))
    assert monitor.best == ProbeResult(clean=0.5, fgsm=0.15, pgd10=0.0)


def test_two_classes_can_be_learnt_too():
    monitor = Monitor(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]), atas.Linf(0.1))
    assert [monitor.update(probe) for probe in (HEALTHY, COLLAPSED)] == [False, True]


def test_a_training_that_was_never_robust_shows_by_the_gap():
    assert judge((0.02, 0.3), (0.05, 0.6), (0.0, 0.95)) == [False, False, True]


def test_a_recovery_is_seen():
    assert judge((0.5, 0.55), (0.02, 0.9), (0.48, 0.55)) == [False, True, False]


def test_a_training_that_broke_down_is_told_from_a_bad_epoch_and_from_one_that_has_not_begun():
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    found = []
    for clean in (0.1, 0.1, 0.66, 0.12, 0.6, 0.12, 0.15, 0.1):
        monitor.update(ProbeResult(clean=clean, fgsm=clean / 2, pgd10=clean / 2))
        found.append((monitor.epochs_at_chance, monitor.broken_down))
    assert [lost for lost, _ in found] == [0, 0, 0, 1, 0, 1, 2, 3]
    assert [down for _, down in found] == [False] * 6 + [True] * 2
    other = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    other.load_state_dict(monitor.state_dict())
    assert (other.epochs_at_chance, other.broken_down, other.breakdown_reported) == (3, True, False)


def test_to_forget_on_the_way_to_robustness_is_no_breakdown():
    """As ATTA does on the digits: at first a model learns what no attack leaves standing."""
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    for clean, pgd10 in ((0.36, 0.0), (0.88, 0.0), (0.82, 0.01), (0.42, 0.07), (0.15, 0.05), (0.1, 0.05), (0.3, 0.12)):
        monitor.update(ProbeResult(clean=clean, fgsm=pgd10, pgd10=pgd10))
        assert not monitor.epochs_at_chance


def test_the_state_comes_back():
    monitor = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    other = Monitor(torch.zeros(10, 1, 2, 2), torch.arange(10), atas.Linf(0.1))
    other.load_state_dict(monitor.state_dict())
    assert other.best is None
    for probe in (HEALTHY, COLLAPSED):
        monitor.update(probe)
    other.load_state_dict(monitor.state_dict())
    assert (other.best, other.collapsed, other.epochs_not_robust) == (HEALTHY, True, 1)


# Probing


class Spy(nn.Module):
    """A small network that notes the mode of every forward pass."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.modes = []

    def forward(self, x):
        self.modes.append([module.training for module in (self, self.bn, self.drop)])
        return self.fc(self.drop(torch.relu(self.bn(self.conv(x)))).mean((2, 3)))


def test_the_probe_is_in_eval_mode_and_leaves_no_trace(toy_data):
    spy = Spy().train()
    spy.bn.eval()  # as its owner wants it
    spy.conv.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in spy.state_dict().items()}
    monitor = Monitor(toy_data.train.images, toy_data.train.labels, atas.Linf(0.1))
    random = torch.get_rng_state()
    probe = monitor.probe(spy)
    assert spy.modes
    assert not any(itertools.chain(*spy.modes))
    assert (spy.training, spy.bn.training, spy.drop.training) == (True, False, True)
    for name, tensor in spy.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [name for name, weight in spy.named_parameters() if not weight.requires_grad] == ["conv.weight"]
    assert all(weight.grad is None for weight in spy.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert monitor.probe(spy) == probe


def test_the_probe_counts_what_the_attacks_of_the_library_find(toy_data, tiny_net):
    net = tiny_net().eval()
    threat = atas.Linf(0.05)
    x, y = toy_data.train.images.float() / 255, toy_data.train.labels
    probe = Monitor(toy_data.train.images, y, threat).probe(net)

    def accuracy(inputs):
        return (net(inputs).argmax(1) == y).float().mean().item()

    assert probe.clean == pytest.approx(accuracy(x))
    assert probe.fgsm == pytest.approx(accuracy(atas.attacks.fgsm(net, x, y, threat)))
    attacked = atas.attacks.pgd(net, x, y, threat, steps=10)
    assert probe.pgd10 == pytest.approx(accuracy(attacked))
    assert probe.pgd10_loss == pytest.approx(nn.functional.cross_entropy(net(attacked), y).item())
    x.requires_grad_(True)
    nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
    norms = x.grad.flatten(1).norm(dim=1).sort().values
    places = [round(share * (len(norms) - 1)) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]
    assert probe.gradient_norms == pytest.approx(norms[places].tolist(), rel=1e-4)


def test_the_probe_does_not_depend_on_its_batches(toy_data, tiny_net):
    monitor = Monitor(toy_data.train.images, toy_data.train.labels, atas.Linf(0.05))
    whole = monitor.probe(tiny_net())
    monitor.batch_size = 7
    again = monitor.probe(tiny_net())
    assert (again.clean, again.fgsm, again.pgd10) == (whole.clean, whole.fgsm, whole.pgd10)
    assert again.pgd10_loss == pytest.approx(whole.pgd10_loss)


# One's own loop


def test_a_check_measures_and_reports_as_data(toy_data, tiny_net):
    x, y = toy_data.train.images, toy_data.train.labels
    net = tiny_net().train()
    expected = Monitor(x, y, atas.Linf(0.05)).probe(net)
    monitor = atas.Monitor(x, y, atas.Linf(0.05))
    status = monitor.check(net)
    assert (status.clean, status.fgsm, status.pgd10) == (expected.clean, expected.fgsm, expected.pgd10)
    assert (status.epoch, status.collapsed, status.broken_down, status.events) == (0, False, False, ())
    assert net.training
    assert monitor.check(net).epoch == 1
    assert monitor.check(net, epoch=9).epoch == 9
    assert str(status) == f"clean {status.clean:.1%}, FGSM {status.fgsm:.1%}, PGD-10 {status.pgd10:.1%}"


def test_a_check_takes_images_as_people_have_them(toy_data, tiny_net):
    x, y = toy_data.train.images, toy_data.train.labels
    forms = [(x, y), (x.float() / 255, y.int()), (x.numpy(), y.numpy()), (x.float().numpy() / 255, y)]
    statuses = [atas.Monitor(*form, atas.Linf(0.05)).check(tiny_net()) for form in forms]
    assert len(set(statuses)) == 1


def script(monitor, monkeypatch, *probes):
    """Let the monitor's probes have these results."""
    left = iter(probes)
    monkeypatch.setattr(monitor, "probe", lambda model: next(left))


def test_a_check_reports_a_collapse_once_also_after_a_resume(toy_data, tiny_net, monkeypatch, tmp_path):
    x, y, net = toy_data.train.images, toy_data.train.labels, tiny_net()
    monitor = atas.Monitor(x, y, atas.Linf(0.05))
    script(monitor, monkeypatch, HEALTHY, COLLAPSED)
    assert monitor.check(net).healthy
    status = monitor.check(net)
    assert (status.collapsed, status.healthy) == (True, False)
    (event,) = status.events
    assert event.name == "collapse"
    assert event.message.startswith("Catastrophic overfitting in epoch 2: PGD-10 accuracy fell from 50.0% to 2.0%")
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    resumed = atas.Monitor(x, y, atas.Linf(0.05))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    script(resumed, monkeypatch, COLLAPSED)
    status = resumed.check(net)
    assert (status.epoch, status.collapsed, status.events) == (2, True, ())


def test_a_check_reports_a_breakdown(toy_data, tiny_net, monkeypatch):
    monitor = atas.Monitor(toy_data.train.images, toy_data.train.labels, atas.Linf(0.05))
    script(monitor, monkeypatch, HEALTHY, *[ProbeResult(clean=0.33, fgsm=0.33, pgd10=0.33)] * 2)
    statuses = [monitor.check(tiny_net()) for _ in range(3)]
    assert [status.broken_down for status in statuses] == [False, False, True]
    (event,) = statuses[-1].events
    assert (event.name, event.row["epoch"]) == ("breakdown", 1)


X, Y = torch.rand(6, 1, 8, 8), torch.arange(6) % 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((255 * X, Y, atas.Linf(0.1)), "leave"),
        ((X * float("nan"), Y, atas.Linf(0.1)), "NaN"),
        ((X[0], Y, atas.Linf(0.1)), "batch"),
        ((X, Y[:5], atas.Linf(0.1)), "labels must be one number an image"),
        ((X, Y.float(), atas.Linf(0.1)), "labels must be integers"),
        ((X[:0], Y[:0], atas.Linf(0.1)), "no images"),
        (([1, 2], Y, atas.Linf(0.1)), "tensors or arrays"),
        ((X, Y, 0.1), "atas.Linf"),
    ],
)
def test_a_monitor_refuses_what_it_cannot_measure(arguments, message):
    with pytest.raises(AtasError, match=message):
        atas.Monitor(*arguments)


def test_a_check_explains_a_model_that_does_not_fit(tiny_net):
    monitor = atas.Monitor(X, Y + 1, atas.Linf(0.1))
    for model, message in [
        ("net", "must be a torch.nn.Module"),
        (tiny_net(channels=3), "the model fails on the monitor's images"),
        (tiny_net(), "found 1 to 3"),
    ]:
        with pytest.raises(AtasError, match=message):
            monitor.check(model)
    with pytest.raises(AtasError, match="state_dict"):
        monitor.load_state_dict({"epoch": 1})


# The slice


def keys_of(images):
    return {image.numpy().tobytes() for image in images}


def make_trainer(folder, settings, data, net, observer):
    return Trainer(settings, RunFolder(folder), data, net, observer())


@pytest.mark.parametrize("on_collapse", ["warn", "stop", "rollback"])
def test_the_slice_is_of_the_training_set_and_held_out_where_it_decides(
    on_collapse, tmp_path, toy_recipe, toy_data, tiny_net, observer
):
    settings = toy_recipe("atas", {"training.on_collapse": on_collapse})
    trainer = make_trainer(tmp_path, settings, toy_data, tiny_net(), observer)
    everything, test = keys_of(toy_data.train.images), keys_of(toy_data.test.images)
    probed, trained = keys_of(trainer.monitor.images), keys_of(trainer.loader.images)
    assert len(everything) == 60
    assert len(probed) == 20
    assert not probed & test
    assert probed <= everything
    assert trained == (everything if on_collapse == "warn" else everything - probed)
    train = toy_data.train
    labels = {image.numpy().tobytes(): int(label) for image, label in zip(train.images, train.labels, strict=True)}
    for part in (trainer.monitor, trainer.loader):
        assert [labels[image.numpy().tobytes()] for image in part.images] == part.labels.tolist()


def test_probe_images_that_are_held_out_are_never_trained_on(
    tmp_path, train_toy, toy_data, monkeypatch, toy_recipe, tiny_net, observer
):
    """As the method sees it, over a whole run with a rollback in it."""
    from atas.methods import FGSMRS

    seen = set()
    training_step = FGSMRS.training_step

    def spy(self, model, update, batch):
        seen.update(keys_of((255 * batch.x).round().to(torch.uint8)))
        assert int(batch.index.max()) < 40
        return training_step(self, model, update, batch)

    monkeypatch.setattr(FGSMRS, "training_step", spy)
    values = {"training.on_collapse": "rollback", "data.pad": 0, "data.flip": False}
    trainer = make_trainer(tmp_path / "x", toy_recipe("fgsm-rs", values), toy_data, tiny_net(), observer)
    probed = keys_of(trainer.monitor.images)
    probe = scripted_probe(HEALTHY, COLLAPSED, HEALTHY, HEALTHY)
    train_toy(tmp_path / "run", "fgsm-rs", values, probe=probe)
    assert seen == keys_of(toy_data.train.images) - probed


def test_the_slice_is_the_same_in_every_run(tmp_path, toy_recipe, toy_data, tiny_net, observer):
    slices = [
        make_trainer(tmp_path, toy_recipe(method, values), toy_data, tiny_net(), observer).monitor.images
        for method, values in [
            ("atas", {}),
            ("fgsm", {"training.seed": 7, "training.batch_size": 5}),
            ("pgd", {"training.on_collapse": "stop"}),
        ]
    ]
    assert torch.equal(slices[0], slices[1])
    assert torch.equal(slices[0], slices[2])


def test_the_slice_never_changes():
    """Figures of earlier runs were measured on these images; curves of other images cannot be compared."""
    probed, left = split_probe(60, 20, held_out=True)
    assert probed.tolist() == [3, 6, 7, 8, 9, 12, 15, 17, 18, 21, 29, 34, 37, 39, 42, 43, 47, 49, 50, 58]
    assert sorted(probed.tolist() + left.tolist()) == list(range(60))
    assert torch.equal(split_probe(60, 20, held_out=False)[0], probed)
    training = resolve_probe(recipes.load("cifar10-preact-resnet18-atas"), 50_000).training
    cifar10 = split_probe(50_000, training.probe, held_out=False)[0]
    assert hashlib.sha256(cifar10.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "63cb97ae8754b2e1"


# What is done about a collapse


@pytest.fixture
def watched(observer):
    """A live view with the weights at every epoch's end and at every sentence, of a model to be trained."""

    def make(net):
        def state():
            return {name: tensor.clone() for name, tensor in net.state_dict().items()}

        live = observer(
            on_epoch=lambda row: live.at_epochs.append((row["epoch"], state())),
            on_say=lambda text: live.at_sentences.append((text, state())),
        )
        live.at_epochs, live.at_sentences = [], []
        return live

    return make


def assert_equal_states(one, other):
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def collapse_sentences(live):
    return [text for text in live.said if "Catastrophic overfitting" in text]


def test_warn_says_it_once_and_goes_on(tmp_path, train_toy, observer, rows_of):
    probe = scripted_probe(HEALTHY, COLLAPSED, COLLAPSED, COLLAPSED)
    live = observer()
    run = train_toy(tmp_path / "run", values={"training.epochs": 4}, live=live, probe=probe)
    (sentence,) = collapse_sentences(live)
    assert "in epoch 2: PGD-10 accuracy fell from 50.0% to 2.0% while FGSM accuracy is 95.0%" in sentence
    assert "atas" in sentence
    assert [row["collapsed"] for row in run.metrics] == [False, True, True, True]
    events = [row for row in rows_of(tmp_path / "run") if "event" in row]
    assert events == [{"event": "collapse", "epoch": 1, "pgd10": 0.02, "fgsm": 0.95}]
    assert not (tmp_path / "run" / "checkpoints" / "healthy.safetensors").exists()


def test_collapse_is_reported_once_across_a_resume(tmp_path, train_toy, observer, rows_of, interrupt_after):
    probe = scripted_probe(HEALTHY, COLLAPSED, COLLAPSED, COLLAPSED)
    values = {"training.epochs": 4}
    live = interrupt_after(10)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values=values, live=live, probe=probe)
    later = observer()
    train_toy(tmp_path / "run", values=values, live=later, resume=True, probe=probe)
    assert len(collapse_sentences(live)) == 1
    assert not collapse_sentences(later)
    assert len([row for row in rows_of(tmp_path / "run") if "event" in row]) == 1


def test_a_model_on_the_edge_is_not_spoken_of_in_every_epoch(tmp_path, train_toy, observer):
    """Once it was said, falling back and forth over the line is no news."""
    edge = ProbeResult(clean=0.9, fgsm=0.7, pgd10=0.26)
    probe = scripted_probe(HEALTHY, COLLAPSED, edge, COLLAPSED, edge, COLLAPSED)
    live = observer()
    train_toy(tmp_path / "run", values={"training.epochs": 6}, live=live, probe=probe)
    assert len(collapse_sentences(live)) == 1


def test_a_fallen_epoch_is_not_returned_to(tmp_path, train_toy, tiny_net, watched):
    """Whether it was a bad one or the beginning of a collapse shows later."""
    probe = scripted_probe(HEALTHY, ProbeResult(clean=0.6, fgsm=0.3, pgd10=0.1), COLLAPSED)
    net = tiny_net()
    live = watched(net)
    run = train_toy(
        tmp_path / "run",
        values={"training.epochs": 6, "training.on_collapse": "stop"},
        model=net,
        live=live,
        probe=probe,
    )
    assert [epoch for epoch, _ in live.at_epochs] == [0, 1, 2]
    assert_equal_states(run.model.state_dict(), live.at_epochs[0][1])


def test_stop_ends_with_the_healthy_weights(tmp_path, train_toy, tiny_net, watched, rows_of):
    probe = scripted_probe(HEALTHY, HEALTHY, COLLAPSED)
    net = tiny_net()
    live = watched(net)
    run = train_toy(
        tmp_path / "run",
        values={"training.epochs": 6, "training.on_collapse": "stop"},
        model=net,
        live=live,
        probe=probe,
    )
    assert [epoch for epoch, _ in live.at_epochs] == [0, 1, 2]
    assert_equal_states(run.model.state_dict(), live.at_epochs[1][1])
    assert not torch.equal(run.model.fc.weight, live.at_epochs[2][1]["fc.weight"])
    rows = rows_of(tmp_path / "run")
    assert [row.get("event", row["epoch"]) for row in rows] == [0, 1, 2, "collapse", "stop"]
    assert rows[-1] == {"event": "stop", "epoch": 2, "to_epoch": 2}
    assert len(collapse_sentences(live)) == 1
    assert any("the weights of epoch 2, the last healthy one" in text for text in live.said)
    assert_equal_states(Run.load(tmp_path / "run", model=tiny_net()).model.state_dict(), live.at_epochs[1][1])


def test_a_run_that_stopped_is_finished(tmp_path, train_toy, observer):
    probe = scripted_probe(HEALTHY, COLLAPSED)
    values = {"training.epochs": 6, "training.on_collapse": "stop"}
    run = train_toy(tmp_path / "run", values=values, probe=probe)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    live = observer()
    again = train_toy(tmp_path / "run", values=values, resume=True, live=live, probe=probe)
    assert live.batches == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    assert_equal_states(again.model.state_dict(), run.model.state_dict())


def test_stop_with_averaged_weights_ends_with_the_healthy_average(tmp_path, train_toy):
    probe = scripted_probe(HEALTHY, HEALTHY, COLLAPSED)
    run = train_toy(tmp_path / "run", values={"training.on_collapse": "stop", "training.ema": 0.9}, probe=probe)
    healthy, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "healthy.safetensors")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, healthy[f"ema.model.{name}"])


def test_a_training_that_broke_down_is_told_once(tmp_path, train_toy, observer, rows_of):
    robust = ProbeResult(clean=0.9, fgsm=0.8, pgd10=0.75)
    lost = ProbeResult(clean=1 / 3, fgsm=1 / 3, pgd10=1 / 3)  # of three classes
    probe = scripted_probe(robust, lost, lost, lost)
    live = observer()
    train_toy(tmp_path / "run", values={"training.epochs": 4, "training.on_collapse": "stop"}, live=live, probe=probe)
    (said,) = [text for text in live.said if "broke down" in text]
    assert "broke down in epoch 2: clean accuracy is 33.3%" in said
    assert "was 90.0%" in said
    assert [row.get("event", row["epoch"]) for row in rows_of(tmp_path / "run")] == [0, 1, 2, "breakdown", 3]
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "healthy.safetensors")
    assert state["epoch"] == 1


def test_healthy_checkpoint_is_not_replaced_in_a_breakdown(tmp_path, train_toy):
    """A breakdown shows in clean accuracy before half of the PGD accuracy is gone."""
    robust, lost = ProbeResult(clean=0.9, fgsm=0.7, pgd10=0.6), ProbeResult(clean=1 / 3, fgsm=1 / 3, pgd10=1 / 3)
    probe = scripted_probe(robust, lost, lost)
    train_toy(tmp_path / "run", values={"training.epochs": 3, "training.on_collapse": "rollback"}, probe=probe)
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "healthy.safetensors")
    assert state["epoch"] == 1


@pytest.mark.parametrize("method", ["atas", "fgsm-rs", "free", "trades"])
@pytest.mark.slow
def test_rollback_goes_on_from_health_with_smaller_steps(method, tmp_path, train_toy, tiny_net, watched, rows_of):
    probe = scripted_probe(HEALTHY, HEALTHY, COLLAPSED, HEALTHY, HEALTHY)
    net = tiny_net()
    live = watched(net)
    values = {"training.epochs": 4, "training.on_collapse": "rollback"}
    run = train_toy(tmp_path / "run", method, values, model=net, live=live, probe=probe)
    assert [epoch for epoch, _ in live.at_epochs] == [0, 1, 2, 2, 3]
    ((_, back),) = [(text, state) for text, state in live.at_sentences if text.startswith("Back to the end of epoch 2")]
    assert_equal_states(back, live.at_epochs[1][1])
    assert any("continuing with 0.750 of the step size" in text for text in live.said)
    rows = rows_of(tmp_path / "run")
    assert [row.get("event", row["epoch"]) for row in rows] == [0, 1, 2, "collapse", "rollback", 2, 3]
    assert rows[4] == {"event": "rollback", "epoch": 2, "to_epoch": 2, "step_scale": 0.75}
    assert rows[5]["updates"] == rows[2]["updates"]
    tensors, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert float(tensors["method.step_scale"]) == 0.75
    assert state["rollbacks"] == 1
    assert [row["epoch"] for row in run.metrics] == [0, 1, 2, 3]
    assert not any(row["collapsed"] for row in run.metrics)
    # The epoch was trained again, and otherwise than before.
    assert not torch.equal(live.at_epochs[2][1]["fc.weight"], live.at_epochs[3][1]["fc.weight"])


def test_rollback_really_takes_smaller_steps(tmp_path, train_toy):
    """In the warm-up every step of ATAS is eps."""
    probe = scripted_probe(HEALTHY, COLLAPSED, COLLAPSED, HEALTHY)
    values = {"training.epochs": 2, "training.on_collapse": "rollback", "method.warmup_epochs": 10}
    run = train_toy(tmp_path / "run", "atas", values, probe=probe)
    assert [row["step_size"] for row in run.metrics] == pytest.approx([0.1, 0.1 * 0.75**2], rel=1e-5)


@pytest.mark.slow
def test_a_collapse_after_a_rollback_is_said_again_and_shrinks_again(tmp_path, train_toy, observer, rows_of):
    probe = scripted_probe(HEALTHY, COLLAPSED, HEALTHY, COLLAPSED, HEALTHY)
    live = observer()
    train_toy(tmp_path / "run", values={"training.on_collapse": "rollback"}, live=live, probe=probe)
    rows = rows_of(tmp_path / "run")
    events = [(row["event"], row["epoch"], row.get("step_scale")) for row in rows if "event" in row]
    assert events == [("collapse", 1, None), ("rollback", 1, 0.75), ("collapse", 2, None), ("rollback", 2, 0.5625)]
    assert len(collapse_sentences(live)) == 2
    assert [row.get("event", row["epoch"]) for row in rows][-1] == 2


@pytest.mark.slow
def test_rollbacks_have_an_end(tmp_path, train_toy, tiny_net, watched, rows_of):
    probe = scripted_probe(HEALTHY, *[COLLAPSED] * 50)
    net = tiny_net()
    live = watched(net)
    run = train_toy(tmp_path / "run", values={"training.on_collapse": "rollback"}, model=net, live=live, probe=probe)
    events = [row["event"] for row in rows_of(tmp_path / "run") if "event" in row]
    assert events[-1] == "stop"
    assert 1 <= events.count("rollback") <= 10
    assert_equal_states(run.model.state_dict(), live.at_epochs[0][1])


@pytest.mark.parametrize("batches", [4, 7, 9, 10, 13])
@pytest.mark.slow
def test_resume_in_a_run_with_rollbacks(batches, tmp_path, train_toy, interrupt_after, assert_same_run, rows_of):
    """Held out are 20 of 60 images: three batches an epoch; collapses are found in the third and, again, the fourth."""
    probes = (HEALTHY, HEALTHY, COLLAPSED, HEALTHY, COLLAPSED, HEALTHY)
    values = {"training.epochs": 4, "training.on_collapse": "rollback", "training.ema": 0.9}
    probe = scripted_probe(*probes)
    train_toy(tmp_path / "whole", values=values, probe=probe)
    probe = scripted_probe(*probes)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", values=values, live=interrupt_after(batches), probe=probe)
    train_toy(tmp_path / "parts", values=values, resume=True, probe=probe)
    assert [row["event"] for row in rows_of(tmp_path / "parts") if "event" in row] == ["collapse", "rollback"] * 2
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_healthy_run_is_the_same_whether_it_would_stop_or_roll_back(tmp_path, train_toy, assert_same_run):
    for on_collapse in ("stop", "rollback"):
        probe = scripted_probe(HEALTHY, HEALTHY, HEALTHY)
        train_toy(tmp_path / on_collapse, values={"training.on_collapse": on_collapse}, probe=probe)
    assert_same_run(tmp_path / "stop", tmp_path / "rollback")


def test_events_are_left_out_of_the_metrics_of_a_run(tmp_path, train_toy):
    probe = scripted_probe(HEALTHY, COLLAPSED, HEALTHY, HEALTHY)
    run = train_toy(tmp_path / "run", values={"training.on_collapse": "rollback"}, probe=probe)
    assert [row["epoch"] for row in run.metrics] == [0, 1, 2]
    assert all("event" not in row for row in run.metrics)
    assert run.metrics[1]["pgd10"] == 0.5
