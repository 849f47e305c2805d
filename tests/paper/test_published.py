"""The paper's figures as package data."""

import pytest

from atas import methods
from atas.paper import published

TABLES = {  # networks, budgets in 255ths, methods
    "cifar10": (("preact-resnet18", "wrn-28-10"), (8, 12, 16), 8),
    "cifar100": (("preact-resnet18", "wrn-28-10"), (4, 8, 12), 8),
    "imagenet": (("resnet18", "resnet50"), (2, 4), 6),
}


@pytest.mark.parametrize(
    ("cell", "figures"),
    [
        (("cifar10", "preact-resnet18", 8, "atas"), (81.22, 50.03, 48.18, 45.38, 0.30)),
        (("cifar10", "preact-resnet18", 8, "pgd"), (80.13, 50.59, 48.94, 45.97, 1.23)),
        (("cifar10", "wrn-28-10", 8, "fgsm-rs"), (80.21, 0.01, 0.00, 0.00, 1.67)),
        (("cifar10", "wrn-28-10", 16, "fgsm-ga"), (16.08, 13.38, 13.29, 11.44, 3.77)),
        (("cifar100", "preact-resnet18", 4, "atta"), (64.28, 39.55, 39.20, 36.03, 0.29)),
        (("cifar100", "wrn-28-10", 12, "ssat"), (75.50, 0.00, 0.00, 0.00, 3.56)),
        (("imagenet", "resnet50", 2, "atas"), (69.10, 49.05, 48.05, 46.01, 120.4)),
        (("imagenet", "resnet18", 4, "yopo"), (33.72, 13.36, 13.01, 10.30, 48.33)),
    ],
)
def test_rows_as_they_are_printed(cell, figures):
    data, network, eps, method = cell
    found = published.lookup(data, network, eps / 255, method)
    assert (found.clean, found.pgd10, found.pgd50, found.autoattack, found.hours) == figures
    assert [found.accuracy(attack) for attack in published.ATTACKS] == list(figures[:4])


@pytest.mark.parametrize("data", TABLES)
def test_every_table_is_whole(data):
    networks, budgets, count = TABLES[data]
    assert [round(255 * eps) for eps in published.budgets(data)] == list(budgets)
    for eps in published.budgets(data):
        for network in networks:
            rows = {name: published.lookup(data, network, eps, name) for name in methods.names()}
            rows = {name: row for name, row in rows.items() if row is not None}
            assert len(rows) == count - (network == "resnet50")  # FGSM-GA did not fit
            for method, found in rows.items():
                assert found.clean >= found.pgd10 >= found.pgd50 >= found.autoattack >= 0, (network, eps, method)
                assert found.hours > 0
                assert found.hardware == f"{2 if data == 'imagenet' else 1} NVIDIA Tesla V100"


def test_a_misprint_is_named():
    assert "misprint" in published.lookup("cifar100", "wrn-28-10", 4 / 255, "fgsm-ga").doubt
    assert published.lookup("cifar100", "wrn-28-10", 4 / 255, "atas").doubt is None


@pytest.mark.parametrize(
    "cell",
    [
        ("digits", "small-cnn", 0.39, "atas"),
        ("cifar10", "preact-resnet18", 4 / 255, "atas"),
        ("cifar10", "resnet18", 8 / 255, "atas"),
        ("cifar10", "preact-resnet18", 8 / 255, "trades"),
        ("imagenet", "resnet50", 2 / 255, "fgsm-ga"),
    ],
)
def test_no_such_row(cell):
    assert published.lookup(*cell) is None


def test_the_ablation_meets_the_table_where_they_are_the_same_run():
    for eps in published.budgets("cifar10"):
        same = published.lookup("cifar10", "preact-resnet18", eps, "atas").autoattack
        assert published.ablation("max_step", 16 / 255, eps) == published.ablation("c", 0.01, eps) == same
    assert [round(255 * step) for step in published.ablation_values("max_step")] == [12, 14, 16, 18, 20]
    assert published.ablation("c", 0.04, 12 / 255) == 30.52
    assert published.ablation("c", 0.03, 12 / 255) is None


def test_published_figures_are_those_of_the_paper():
    assert published.convergence_gap(12 / 255) == {"ratio": 1.5, "gap": 0.1, "loss_ratio": 1.11}
    assert published.convergence_gap(4 / 255) is None
    assert published.mean_step("fgsm-rs-adaptive") == pytest.approx(10.8 / 255)
    assert published.mean_step("atta") is None
    assert published.class_share_of_subsets() == (8.98, 10.86)
