"""What is known of each piece of an evaluation: one stage of one attack on one portion of the examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Record:
    """What a stage has found so far: enough to go on from."""

    broken: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Whether each example is wrong, by this stage or before; of those that were looked at."""
    seconds: float = 0.0
    queries: int = 0
    complete: bool = False
    finished: Tensor | None = None
    """Of a search under way: which jobs came to their end (N, jobs)."""
    evaluations: Tensor | None = None
    """Of a search under way: how often the model was evaluated (N,)."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {
            "broken": digits(self.broken),
            "seconds": self.seconds,
            "queries": self.queries,
            "complete": self.complete,
        }
        if not self.complete and self.finished is not None and self.evaluations is not None:
            found["finished"] = [digits(column) for column in self.finished.T]
            found["evaluations"] = self.evaluations.tolist()
        return found

    @staticmethod
    def from_json(found: dict[str, Any]) -> Record:
        """What `to_json` wrote."""
        record = Record(flags(found["broken"]), float(found["seconds"]), int(found["queries"]), found["complete"])
        if "finished" in found:
            record.finished = torch.stack([flags(column) for column in found["finished"]], 1)
            record.evaluations = torch.tensor(found["evaluations"], dtype=torch.int64)
            if not len(record.finished) == len(record.evaluations) == len(record.broken):
                raise ValueError("a search's columns are not of one length")
        return record


def digits(values: Tensor) -> str:
    """Flags as a string of 0 and 1.

    >>> digits(torch.tensor([True, False, True]))
    '101'
    """
    return bytes(values.to(torch.uint8).add(ord("0")).tolist()).decode("ascii")


def flags(text: str) -> Tensor:
    """A string of 0 and 1 as flags."""
    if set(text) - {"0", "1"}:
        raise ValueError("verdicts are not digits of 0 and 1")
    return torch.tensor([digit == "1" for digit in text], dtype=torch.bool)
