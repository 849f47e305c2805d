"""Probes for `atas.train(probe=...)` that measure nothing: a collapse without an attack."""

import json

from atas.training import ProbeResult

HEALTHY = ProbeResult(clean=0.9, fgsm=0.6, pgd10=0.5)
COLLAPSED = ProbeResult(clean=0.9, fgsm=0.9, pgd10=0.0)


def scripted_probe(*results):
    """Return these results, one an epoch; more epochs are an error."""
    left = iter(results)
    return lambda model: next(left)


def one_collapse(folder, epoch):
    """Show a collapse after this epoch of the run in the folder, unless the run has had one: also after a resume."""

    def probe(model):
        path = folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        events = [json.loads(line).get("event") for line in lines]
        return COLLAPSED if events.count(None) == epoch and "collapse" not in events else HEALTHY

    return probe
