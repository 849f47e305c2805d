"""ATAS in your own loop, from data to a robust accuracy, in plain PyTorch.

    python examples/minimal.py                 # real 8 x 8 digits, about half a minute on a CPU
    python examples/minimal.py --epochs 5      # shorter

ATAS needs three calls: create the method, tell it when an epoch starts, and perturb each batch. `atas.indexed` and
`atas.random_view` prepare the data for it. The rest is the training loop that you have already.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import atas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--eps", type=float, default=0.2, help="how much every pixel may change, in [0, 1]")
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = atas.data.load("digits")
    threat = atas.Linf(args.eps)
    model = atas.models.create("small-cnn", num_classes=10, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    # Any dataset of (image in [0, 1], label) will do; `indexed` adds each example's number, by which ATAS remembers it.
    loader = DataLoader(atas.indexed(digits.train), batch_size=128, shuffle=True)

    method = atas.ATAS(threat, examples=len(digits.train), shape=digits.shape, c="auto", pad=1)

    for epoch in range(args.epochs):
        method.start_epoch(epoch, epochs=args.epochs)
        total = 0.0
        for x, y, index in loader:
            x, view = atas.random_view(x, pad=1, flip=False)  # crop, remembered so that the perturbation follows
            x_adv = method.perturb(model, x, y, index, view)  # one extra forward and backward pass
            model.train()
            loss = F.cross_entropy(model(x_adv), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        scheduler.step()
        sizes = method.step_sizes
        print(
            f"epoch {epoch + 1:2d}  loss {total / len(digits.train):.3f}  "
            f"steps {sizes.min():.3f} to {sizes.max():.3f}, mean {sizes.mean():.3f}"
        )

    print(atas.evaluate(model, digits.test, threat=threat, attacks=("fgsm", "pgd50")))


if __name__ == "__main__":
    main()
