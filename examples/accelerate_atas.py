"""ATAS with Hugging Face Accelerate.

    pip install accelerate
    python examples/accelerate_atas.py               # real 8 x 8 digits, about a minute on a CPU

`accelerator.prepare` takes model, optimiser and loader as ever; the method is created on the accelerator's device and
registered, so that `save_state` and `load_state` carry its perturbations.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import atas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--save", help="folder for the state at the end")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    digits, threat = atas.data.load("digits"), atas.Linf(0.2)
    model = atas.models.create("small-cnn", num_classes=10, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loader = DataLoader(atas.indexed(digits.train), batch_size=128, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    method = atas.ATAS(
        threat,
        len(digits.train),
        digits.shape,
        c=2.0,
        max_step=0.4,
        clip=None,
        warmup_epochs=0,
        pad=1,
        device=accelerator.device,
    )
    accelerator.register_for_checkpointing(method)

    for epoch in range(args.epochs):
        method.start_epoch(epoch, epochs=args.epochs)
        model.train()
        for x, y, index in loader:
            x, view = atas.random_view(x, pad=1, flip=False)
            x_adv = method.perturb(model, x, y, index, view)  # restores the mode that it found
            loss = F.cross_entropy(model(x_adv), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        scheduler.step()
        accelerator.print(f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  mean step {method.step_sizes.mean():.3f}")

    if args.save:
        accelerator.save_state(args.save)
    accelerator.print(
        atas.evaluate(accelerator.unwrap_model(model), digits.test, threat=threat, attacks=("fgsm", "pgd50"))
    )


if __name__ == "__main__":
    main()
