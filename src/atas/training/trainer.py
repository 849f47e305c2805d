"""The trainer: epochs of steps, a look at the model after each, and checkpoints that make a crash harmless."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atas._text import in_shell
from atas.data import Dataset
from atas.errors import DataError, UsageError
from atas.processes import ALONE, Processes, Wishes
from atas.training import recipe
from atas.training._clock import Clock
from atas.training._signals import Interrupted, StopRequest
from atas.training.assembly import assemble
from atas.training.live import Live
from atas.training.loggers import Logger, open_loggers
from atas.training.logs import Metrics
from atas.training.monitor import Probe
from atas.training.observe import Moment, Observer
from atas.training.rows import epoch_row, examples_per_second, too_long
from atas.training.run import DIVERGED, Folder, calmer
from atas.training.saving import Checkpoints

_SHRINK = 0.75  # of the step size, at each rollback
_MOST_ROLLBACKS = 8


class Trainer:
    """One run, in one process or as one of several, each with its part of the examples.

    It learns from all training images or from those in `rows`; the monitor's are of all.
    """

    def __init__(
        self,
        settings: recipe.Recipe,
        place: Folder,
        data: Dataset,
        model: nn.Module,
        live: Live,
        loggers: Sequence[Logger] = (),
        observers: Sequence[Observer] = (),
        rows: Tensor | None = None,
        peers: Processes = ALONE,
    ) -> None:
        self.settings, self.place, self.live, self.peers = settings, place, live, peers
        if observers and not peers.alone:
            raise UsageError("what observes a training sees one process; start it without torchrun")
        self._observers = observers
        self._loggers = open_loggers(settings, place, loggers, live.say, peers)
        assembly = assemble(settings, data, model, live.say, rows, peers)
        self.engine, self.monitor = assembly.engine, assembly.monitor
        self.batches, self.device = self.engine.batches, self.engine.device
        self._checkpoints = Checkpoints(place.path, self.engine, assembly.images)
        self._guards = settings.training.on_collapse != "warn"
        self.epoch = self.batch = self.rollbacks = 0
        self.seconds = 0.0  # spent in training steps alone
        self._metrics_bytes = 0  # of the file, to be kept when training begins
        self._stop = StopRequest(patient=not peers.alone)
        self._wishes = Wishes(peers)

    @property
    def _done(self) -> int:
        return self.epoch * len(self.batches) + self.batch

    def resume(self) -> bool:
        """Take up the last checkpoint; False where there is none yet."""
        if not self.peers.by_first(self.place.last.exists):
            return False
        self._metrics_bytes = self._restore(self.place.last)["metrics_bytes"]
        return True

    def note(self, row: dict[str, Any]) -> None:
        """A line in the metrics for something that happened between the epochs."""
        Metrics(self.place.metrics, self._metrics_bytes).write(row)
        self._metrics_bytes = self.place.metrics.stat().st_size

    def fit(self) -> None:
        """Train to the end. What was reached is saved when a signal asks to stop."""
        epochs = self.settings.training.epochs
        self._metrics = Metrics(self.place.metrics if self.peers.first else None, self._metrics_bytes)
        self._loggers.start(self.epoch)
        self._saved_at = time.monotonic()
        self._clock = Clock(self.device)
        self._probe: Probe | None = None
        self._said_too_long = False
        self.engine.prepare(self.epoch)
        self.live.begin(self.settings.name, epochs * len(self.batches), self._done)
        try:
            with self._stop:
                while self.epoch < epochs:
                    self._run_epoch(epochs)
        finally:
            self.batches.close()
            self._loggers.close()

    def _run_epoch(self, epochs: int) -> None:
        engine = self.engine
        engine.prepare(self.epoch)  # where images get larger, before the clock starts
        self._clock.start()
        engine.begin(self.epoch, self.batch)
        while self.batch < len(self.batches):
            engine.step()
            self.batch += 1
            self._observe()
            if self.live.due():
                self._show()
            due = time.monotonic() - self._saved_at >= self.settings.training.checkpoint_every
            stop, save = self._wishes(self._stop.asked, due and self.peers.first)
            if stop or save:
                self.seconds += self._clock.stop()
                self._save()
                if stop:
                    raise Interrupted(
                        f"stopped after batch {self.batch} of epoch {self.epoch + 1}; all is saved, go on with: "
                        f"atas train --resume --out {in_shell(self.place.path)}"
                    )
                self._clock.start()
        self.seconds += self._clock.stop()
        self._end_epoch(epochs)

    def _observe(self) -> None:
        moment = Moment(self.epoch, self.batch, len(self.batches), self.monitor.collapsed)
        due = [observer for observer in self._observers if observer.due(moment)]
        if due:
            self.seconds += self._clock.stop()
            for observer in due:
                observer.look(moment, self.engine)
            self._clock.start()

    def _show(self) -> None:
        self.engine.method.guard.raise_if_set()
        loss, _, step_size = self.engine.totals.read()
        status = {"loss": loss, "step_size": step_size}
        if self._probe is not None:
            status |= {"clean": self._probe.clean, "pgd10": self._probe.pgd10}
        seconds = self.seconds + self._clock.so_far()
        status["examples_per_second"] = examples_per_second(self.engine, self.epoch, self.batch, seconds)
        self.live.update(self._done, self.epoch, self.settings.training.epochs, **status)

    def _end_epoch(self, epochs: int) -> None:
        engine = self.engine
        engine.method.guard.raise_if_set()
        means = self._check_loss()
        self.live.look()
        self._probe = probe = self.monitor.probe(engine.watched, engine.ask)
        collapsed = self.monitor.judge(probe)
        row, histograms = epoch_row(self.epoch, engine, means, probe, collapsed, self.seconds)
        self._metrics.write(row)
        if self._loggers:
            self._loggers.log(row, {name: values.cpu() for name, values in histograms.items()})
        self.epoch, self.batch = self.epoch + 1, 0
        self.live.epoch(self._done, row, epochs)
        engine.totals.sums.zero_()
        if collapsed and not self.monitor.said:
            self._say_collapse(probe)
        if not self._said_too_long and (sentence := too_long(row, self.settings.threat.eps)):
            self._said_too_long = True
            self.live.say(sentence)
        if self.monitor.broken_down and not self.monitor.said_broken_down:
            self._say_broken_down(probe)
        if collapsed and self._guards and self.peers.by_first(self.place.healthy.exists):
            self._return_to_health(epochs)
        elif self._guards and not collapsed and not self.monitor.fallen and not self.monitor.lost:
            self._write(self.place.healthy)
        if self.epoch == epochs:
            self._save()

    def _check_loss(self) -> tuple[float, float, float]:
        loss, *_ = means = self.engine.totals.read(self.peers)
        if not math.isfinite(loss):
            self._metrics.write({"event": DIVERGED, "epoch": self.epoch})
            raise DataError(
                f"the loss is {loss} in epoch {self.epoch + 1}: training has diverged; begin anew with --overwrite and "
                f"{calmer(self.settings)}"
            )
        return means

    def _say_collapse(self, probe: Probe) -> None:
        epoch, self.monitor.said = self.epoch - 1, True
        self._metrics.write({"event": "collapse", "epoch": epoch, "pgd10": probe.pgd10, "fgsm": probe.fgsm})
        self.live.say(self.monitor.sentence(epoch, probe), style="bold red")

    def _say_broken_down(self, probe: Probe) -> None:
        self.monitor.said_broken_down = True
        began = self.epoch - self.monitor.lost
        self._metrics.write({"event": "breakdown", "epoch": began, "clean": probe.clean})
        self.live.say(self.monitor.broken_sentence(began, probe), style="bold red")

    def _return_to_health(self, epochs: int) -> None:
        """Go back to the last healthy checkpoint, to end there or to go on with smaller steps."""
        method, collapsed_in = self.engine.method, self.epoch - 1
        scale, rollbacks, seconds = method.step_scale.clone(), self.rollbacks + 1, self.seconds
        self._restore(self.place.healthy)
        self.rollbacks, self.seconds = rollbacks, seconds
        where = {"epoch": collapsed_in, "to_epoch": self.epoch}
        if self.settings.training.on_collapse == "stop" or rollbacks > _MOST_ROLLBACKS:
            self._metrics.write({"event": "stop", **where})
            self._loggers.start(self.epoch)
            self.live.say(f"Stopped; the run ends with the weights of epoch {self.epoch}, the last healthy one.")
            self.epoch = epochs
            return
        method.step_scale.copy_(scale)
        method.shrink_steps(_SHRINK)
        factor = float(method.step_scale)
        self._metrics.write({"event": "rollback", **where, "step_scale": factor})
        self._loggers.start(self.epoch)
        self.live.say(f"Back to the end of epoch {self.epoch}; going on with {factor:.3f} of the step size.")
        self._save()

    def _save(self) -> None:
        """The checkpoint to resume from; never of a training that has diverged."""
        self._check_loss()
        self._write(self.place.last)
        self._saved_at = time.monotonic()

    def _write(self, path: Path) -> None:
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "rollbacks": self.rollbacks,
            "seconds": self.seconds,
            "metrics_bytes": self._metrics.size,
            "monitor": self.monitor.state(),
        }
        self._checkpoints.write(path, state)

    def _restore(self, path: Path) -> dict[str, Any]:
        state = self._checkpoints.restore(path)
        self.epoch, self.batch, self.rollbacks = state["epoch"], state["batch"], state["rollbacks"]
        self.seconds = state["seconds"]
        self.monitor.load_state(state["monitor"])
        return state
