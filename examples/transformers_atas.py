"""ATAS in the Trainer of Hugging Face Transformers.

    pip install transformers accelerate
    python examples/transformers_atas.py             # real 8 x 8 digits, about a minute on a CPU
    python examples/transformers_atas.py --folder out   # keeps checkpoints, to continue from with --resume

Three things differ from an ordinary Trainer: the dataset has a column `index`, `compute_loss` perturbs the images, and
a callback starts the method's epochs, watches for catastrophic overfitting and keeps the state with the checkpoints.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback, TrainingArguments

import atas


class Logits(torch.nn.Module):
    """A network of Transformers as a module from images to logits, which attacks and evaluations need.

    Whatever an image processor does belongs in here: resizing to the network's size, and normalisation.
    """

    def __init__(self, net: torch.nn.Module, side: int) -> None:
        super().__init__()
        self.net, self.side = net, side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(pixel_values=F.interpolate(x, self.side, mode="bilinear")).logits


class WithIndex(torch.utils.data.Dataset):
    """Items as the Trainer collates them: dictionaries with the example's number."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = atas.indexed(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y, index = self.dataset[i]
        return {"x": x, "y": y, "index": index}


class RobustTrainer(Trainer):
    """Trains on images that the method perturbs."""

    def __init__(self, *args: Any, method: atas.ATAS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.method = method.to(self.args.device)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        x, y = inputs["x"], inputs["y"]
        if model.training:
            x, view = atas.random_view(x, pad=self.method.pad, flip=False)
            x = self.method.perturb(model, x, y, inputs["index"], view)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        return (loss, {"logits": logits}) if return_outputs else loss


class Watch(TrainerCallback):
    """Starts the epochs of the method, measures robust accuracy after each, and stops after a collapse."""

    def __init__(self, method: atas.ATAS, monitor: atas.Monitor) -> None:
        self.method, self.monitor = method, monitor

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:  # resumed from a checkpoint
            saved = torch.load(self._file(args, state), map_location=args.device)
            self.method.load_state_dict(saved["method"])
            self.monitor.load_state_dict(saved["monitor"])

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.method.start_epoch(round(state.epoch), epochs=round(args.num_train_epochs))

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **options: Any) -> None:
        status = self.monitor.check(options["model"], round(state.epoch) - 1)
        print(f"epoch {status.epoch + 1:2d}  {status}")
        for event in status.events:
            print(event.message)
        control.should_training_stop |= status.collapsed

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        saved = {"method": self.method.state_dict(), "monitor": self.monitor.state_dict()}
        torch.save(saved, self._file(args, state))

    @staticmethod
    def _file(args: TrainingArguments, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "atas.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", help="folder for checkpoints; by default they are removed at the end")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    args = parser.parse_args()

    torch.manual_seed(0)
    digits, threat = atas.data.load("digits"), atas.Linf(0.1)
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    model = Logits(ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes)), side=32)
    method = atas.ATAS(threat, len(digits.train), digits.shape, c=2.0, max_step=0.2, clip=None, warmup_epochs=0, pad=1)
    monitor = atas.Monitor(digits.train.images[:150], digits.train.labels[:150], threat)

    with tempfile.TemporaryDirectory() as temporary:
        arguments = TrainingArguments(
            output_dir=args.folder or temporary,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=64,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            remove_unused_columns=False,  # or the Trainer drops x, y and index
            label_names=["y"],
            save_strategy="epoch",
            save_total_limit=1,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = RobustTrainer(
            model, arguments, train_dataset=WithIndex(digits.train), method=method, callbacks=[Watch(method, monitor)]
        )
        trainer.train(resume_from_checkpoint=args.resume or None)
    print(atas.evaluate(model, digits.test, threat=threat, attacks=("fgsm", "pgd10")))


if __name__ == "__main__":
    main()
