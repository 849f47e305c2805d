"""ATAS in a LightningModule, with a callback that watches for catastrophic overfitting.

    pip install lightning
    python examples/lightning_atas.py                # real 8 x 8 digits, about a minute on a CPU
    python examples/lightning_atas.py --folder out   # keeps a checkpoint, to continue from with --resume

The method is a module of buffers without parameters. As an attribute of the LightningModule it moves with it and is
part of its checkpoints. So is the callback's state: `trainer.fit(..., ckpt_path=...)` continues with both.
"""

from __future__ import annotations

import argparse

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import atas


class Robust(lightning.LightningModule):
    def __init__(self, net: torch.nn.Module, method: atas.ATAS) -> None:
        super().__init__()
        self.net, self.method = net, method

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y, index = batch
        x, view = atas.random_view(x, pad=self.method.pad, flip=False)
        loss = F.cross_entropy(self.net(self.method.perturb(self.net, x, y, index, view)), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs),
        }


class Watch(lightning.Callback):
    """Starts the epochs of the module's method, measures robust accuracy after each, and stops after a collapse."""

    def __init__(self, monitor: atas.Monitor) -> None:
        self.monitor = monitor

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: Robust) -> None:
        module.method.start_epoch(trainer.current_epoch, epochs=trainer.max_epochs)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: Robust) -> None:
        status = self.monitor.check(module.net, trainer.current_epoch)
        module.log_dict({"clean": status.clean, "fgsm": status.fgsm, "pgd10": status.pgd10})
        print(f"epoch {status.epoch + 1:2d}  {status}")
        for event in status.events:
            print(event.message)
        trainer.should_stop |= status.collapsed

    def state_dict(self) -> dict[str, object]:
        return self.monitor.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.monitor.load_state_dict(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", help="folder for a checkpoint after every epoch; by default there is none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the folder")
    args = parser.parse_args()

    lightning.seed_everything(0)
    digits, threat = atas.data.load("digits"), atas.Linf(0.2)
    loader = DataLoader(atas.indexed(digits.train), batch_size=128, shuffle=True)
    method = atas.ATAS(threat, len(digits.train), digits.shape, c=2.0, max_step=0.4, clip=None, warmup_epochs=0, pad=1)
    module = Robust(atas.models.create("small-cnn", num_classes=10, channels=1), method)
    watch = Watch(atas.Monitor(digits.train.images[:150], digits.train.labels[:150], threat))
    checkpoints = [ModelCheckpoint(args.folder, save_last=True, save_top_k=0)] if args.folder else []
    # One process: with several, your sampler must give each process the same examples in every epoch, see docs/loop.md.
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=bool(checkpoints),
        enable_progress_bar=False,
        callbacks=[watch, *checkpoints],
    )
    trainer.fit(module, loader, ckpt_path="last" if args.resume else None)
    print(atas.evaluate(module.net, digits.test, threat=threat, attacks=("fgsm", "pgd50")))


if __name__ == "__main__":
    main()
