"""ATAS in a LightningModule.

    pip install lightning
    python examples/lightning_atas.py                # real 8 x 8 digits, about a minute on a CPU

The method is a module of buffers without parameters. As an attribute of the LightningModule it moves with it and is
part of its checkpoints, so `trainer.fit(..., ckpt_path=...)` goes on with the perturbations that were reached.
"""

from __future__ import annotations

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import atas


class Robust(lightning.LightningModule):
    def __init__(self, net: torch.nn.Module, method: atas.ATAS) -> None:
        super().__init__()
        self.net, self.method = net, method

    def on_train_epoch_start(self) -> None:
        self.method.start_epoch(self.current_epoch, epochs=self.trainer.max_epochs)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y, index = batch
        x, view = atas.random_view(x, pad=self.method.pad, flip=False)
        loss = F.cross_entropy(self.net(self.method.perturb(self.net, x, y, index, view)), y)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()

    lightning.seed_everything(0)
    digits, threat = atas.data.load("digits"), atas.Linf(0.2)
    loader = DataLoader(atas.indexed(digits.train), batch_size=128, shuffle=True)
    method = atas.ATAS(threat, len(digits.train), digits.shape, c=2.0, max_step=0.4, clip=None, warmup_epochs=0, pad=1)
    module = Robust(atas.models.create("small-cnn", num_classes=10, channels=1), method)
    # One process: how perturbations are kept with several is your sampler's matter, see docs/loop.md.
    trainer = lightning.Trainer(max_epochs=args.epochs, devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(module, loader)
    print(atas.evaluate(module.net, digits.test, threat=threat, attacks=("fgsm", "pgd50")))


if __name__ == "__main__":
    main()
