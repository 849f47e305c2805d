"""What `atas evaluate` was told to evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atas._files import check_target
from atas.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What the command was given, as it was given."""

    weights: Path | None = None
    model: str | None = None
    data: str | None = None
    root: str | None = None
    size: int | None = None
    norm: str | None = None
    eps: str | None = None
    mean: str | None = None
    std: str | None = None
    examples: int | None = None
    out: Path | None = None
    attacks: str | None = None

    def attacks_or(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The attacks that were asked for, or the usual ones."""
        return usual if self.attacks is None else tuple(name.strip() for name in self.attacks.split(","))

    def check(self, run: Path | None) -> None:
        """An error where something is missing or does not go together; nothing is loaded for that."""
        if self.out is not None:
            check_target(self.out, "--out", ".json")
        if run is not None:
            for name in ("weights", "model", "data", "mean", "std", "size"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"--{name} does not go with the folder of a run, which has its own; leave one of them out"
                    )
            return
        if self.weights is None and self.model is None:
            raise UsageError(
                "give the folder of a run, or --weights FILE or --model package.module:function, with --data"
            )
        if self.data is None or self.eps is None:
            missing = "--data (cifar10, ...)" if self.data is None else "--eps (8/255, ...)"
            raise UsageError(
                f"{missing} is missing; without a run's folder the command needs a model, data and a budget"
            )
        if self.weights is None and self.model is not None and ":" not in self.model:
            raise UsageError(f"a fresh '{self.model}' knows nothing: give its weights with --weights FILE.safetensors")
