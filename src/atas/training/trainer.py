"""The trainer: epochs of steps, a look at the model after each, and checkpoints that make a crash harmless."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas import methods
from atas.data import Dataset
from atas.data._team import processors
from atas.data.loading import open_batches
from atas.errors import AtasError, CheckpointError, DataError, UsageError
from atas.methods import Adaptive, Free, Method
from atas.processes import ALONE, Processes, Wishes
from atas.training import checkpoint, recipe
from atas.training._checks import any_without_rows, check_alike, check_model, part_of, split_probe
from atas.training._clock import Clock
from atas.training._signals import StopRequest
from atas.training.batchnorm import synchronise
from atas.training.engine import Engine, choose_device
from atas.training.gathering import gather, of_all, scatter, share_weights
from atas.training.live import Live
from atas.training.loggers import Logger, Loggers, create
from atas.training.logs import Metrics
from atas.training.monitor import Monitor, Probe
from atas.training.observe import Moment, Observer
from atas.training.run import Folder
from atas.training.spread import by_tenth, quantiles
from atas.training.views import as_tested

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
        named = [create(name, place, settings) for name in settings.training.loggers] if peers.first else []
        all_loggers = [logger for logger in (*named, *loggers) if logger is not None] if peers.first else []
        self._loggers = Loggers(all_loggers, live.say)
        self.device = peers.device(choose_device(settings.engine.device))
        training, threat = settings.training, settings.threat
        seen = as_tested(data, settings.data)
        check_model(model, seen)
        self._data = _fingerprint(data, rows)
        check_alike(settings, self._data, peers)
        self._guards = training.on_collapse != "warn"
        probe, rest = split_probe(len(data.train), training.probe, held_out=self._guards)
        if rows is not None:
            rest = rows if rest is None else rows[torch.isin(rows, rest)]
        examples = data.train if rest is None else data.train.part(rest)
        self.part = part = part_of(settings, len(examples), peers)
        if any_without_rows(part, training.batch_size, peers):
            check_model(model, seen, images=0)
        self.batches = open_batches(
            examples if part.whole else examples.part(part.numbers(torch.arange(len(part)))),
            settings.data.loading,
            batch_size=part.share(training.batch_size),
            pad=settings.data.pad,
            flip=settings.data.flip,
            seed=training.seed,
            device=self.device,
            workers=settings.data.workers or max(1, processors() // peers.here),
            say=live.say,
        )
        self.batches.own(part)
        own = dict(settings.method.settings)
        if methods.get(settings.method.name) is Free:
            own["batch_size"] = part.share(own.get("batch_size", training.batch_size))
        method = methods.create(
            settings.method.name,
            threat,
            len(self.batches.labels),
            seen.shape,
            pad=settings.data.pad,
            device=self.device,
            seed=training.seed,
            **own,
        )
        if not part.whole:
            method.own(part)
        if settings.engine.sync_batchnorm and not peers.alone:
            synchronise(model)
        share_weights(list(model.state_dict().values()), peers)
        self.engine = self._engine(model.to(self.device), method)
        watched = seen.train.images[probe].to(self.device), seen.train.labels[probe].to(self.device)
        self.monitor = Monitor(*watched, threat, batch=self.engine.look_size, peers=peers)
        self.epoch = self.batch = self.rollbacks = 0
        self.seconds = 0.0  # spent in training steps alone
        self._metrics_bytes = 0
        self._stop = StopRequest(patient=not peers.alone)
        self._wishes = Wishes(peers)

    def _engine(self, model: nn.Module, method: Method) -> Engine:
        kind, on_gpu = self.settings.engine.kind, self.device.type == "cuda"
        if kind == "captured" and not on_gpu:
            raise UsageError("the captured engine needs a CUDA device; set engine.kind=eager or auto")
        if kind == "eager" or not on_gpu or (kind == "auto" and not self.peers.alone):
            return Engine(self.settings, model, method, self.batches, self.peers)
        from atas.training.captured import Captured

        return Captured(self.settings, model, method, self.batches, self.live.say, self.peers)

    @property
    def _done(self) -> int:
        return self.epoch * len(self.batches) + self.batch

    def resume(self) -> bool:
        """Take up the last checkpoint; False where there is none yet."""
        if not self.peers.by_first(self.place.last.exists):
            return False
        self._restore(self.place.last)
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
                        f"atas train --resume --out {self.place.path}"
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

    def _end_epoch(self, epochs: int) -> None:
        engine = self.engine
        engine.method.guard.raise_if_set()
        loss, right, step_size = self._check_loss()
        self._probe = probe = self.monitor.probe(engine.watched, engine.ask)
        collapsed = self.monitor.judge(probe)
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "updates": engine.updates,
            "rate": engine.rate(),
            "loss": loss,
            "train_accuracy": right,
            "clean": probe.clean,
            "fgsm": probe.fgsm,
            "pgd10": probe.pgd10,
            "pgd10_loss": probe.pgd10_loss,
            "collapsed": collapsed,
            "probe_gradient_norms": list(probe.gradient_norms),
            "seconds": self.seconds,
            "examples_per_second": self._examples_per_second(),
        }
        histograms: dict[str, Tensor] = {}
        if isinstance(engine.method, Adaptive):
            remembered = engine.method.step_sizes, engine.method.gradient_norms
            sizes, norms = (of_all(rows, self.part, self.peers) for rows in remembered)
            row |= {
                "step_size": step_size,
                "gradient_norm": float(norms.mean()),
                "step_sizes": quantiles(sizes),
                "gradient_norms": quantiles(norms),
                "step_size_by_tenth": by_tenth(norms, sizes),
                "gradient_norm_by_tenth": by_tenth(norms, norms),
            }
            histograms = {"step_sizes": sizes, "gradient_norms": norms}
        if engine.shown is not None:
            row["shown"] = engine.shown
        self._metrics.write(row)
        if self._loggers:
            self._loggers.log(row, {name: values.cpu() for name, values in histograms.items()})
        self.epoch, self.batch = self.epoch + 1, 0
        self.live.epoch(self._done, row, epochs)
        engine.totals.sums.zero_()
        if collapsed and not self.monitor.said:
            self._say_collapse(row)
        if collapsed and self._guards and self.peers.by_first(self.place.healthy.exists):
            self._return_to_health(epochs)
        elif self._guards and not collapsed:
            self._write(self.place.healthy)
        if self.epoch == epochs:
            self._save()

    def _check_loss(self) -> tuple[float, float, float]:
        loss, right, step_size = self.engine.totals.read(self.peers)
        if not math.isfinite(loss):
            raise DataError(
                f"the loss is {loss} in epoch {self.epoch + 1}: training has diverged; begin anew with --overwrite and "
                f"a smaller schedule.peak"
            )
        return loss, right, step_size

    def _say_collapse(self, row: dict[str, Any]) -> None:
        best, self.monitor.said = self.monitor.best, True
        fell = "is" if best is None or best.pgd10 <= row["pgd10"] else f"fell from {100 * best.pgd10:.1f}% to"
        self._metrics.write({"event": "collapse", "epoch": row["epoch"], "pgd10": row["pgd10"], "fgsm": row["fgsm"]})
        self.live.say(
            f"Catastrophic overfitting in epoch {row['epoch'] + 1}: PGD-10 accuracy {fell} {100 * row['pgd10']:.1f}% "
            f"while FGSM accuracy is {100 * row['fgsm']:.1f}%. The model withstands the attack that it is trained with "
            f"and no other; a smaller step, or method atas, avoids this.",
            style="bold red",
        )

    def _return_to_health(self, epochs: int) -> None:
        """Go back to the last healthy checkpoint, to end there or to go on with smaller steps."""
        scale = self.engine.method.step_scale.clone()
        found_in, written = self.epoch, self._metrics.size
        rollbacks, seconds = self.rollbacks + 1, self.seconds
        self._restore(self.place.healthy)
        self._metrics_bytes, self.rollbacks, self.seconds = written, rollbacks, seconds
        if self.settings.training.on_collapse == "stop" or rollbacks > _MOST_ROLLBACKS:
            self._metrics.write({"event": "stop", "epoch": found_in - 1, "to_epoch": self.epoch})
            self._loggers.start(self.epoch)
            self.live.say(f"Stopped; the run ends with the weights of epoch {self.epoch}, the last healthy one.")
            self.epoch = epochs
            return
        self.engine.method.step_scale.copy_(scale)
        self.engine.method.shrink_steps(_SHRINK)
        factor = float(self.engine.method.step_scale)
        self._metrics.write({"event": "rollback", "epoch": found_in - 1, "to_epoch": self.epoch, "step_scale": factor})
        self._loggers.start(self.epoch)
        self.live.say(f"Back to the end of epoch {self.epoch}; going on with {factor:.3f} of the step size.")
        self._save()

    def _show(self) -> None:
        self.engine.method.guard.raise_if_set()
        loss, _, step_size = self.engine.totals.read()
        status = {"loss": loss, "step_size": step_size}
        if self._probe is not None:
            status |= {"clean": self._probe.clean, "pgd10": self._probe.pgd10}
        status["examples_per_second"] = self._examples_per_second(running=self._clock.so_far())
        self.live.update(self._done, self.epoch, self.settings.training.epochs, **status)

    def _examples_per_second(self, running: float = 0.0) -> float:
        examples = min(self.batch * self.settings.training.batch_size, self.part.examples)
        return (self.epoch * self.part.examples + examples) / max(self.seconds + running, 1e-9)

    def _save(self) -> None:
        """The checkpoint to resume from; never of a training that has diverged."""
        self._check_loss()
        self._write(self.place.last)
        self._saved_at = time.monotonic()

    def _write(self, path: Path) -> None:
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "updates": self.engine.updates,
            "rollbacks": self.rollbacks,
            "recipe": recipe.fingerprint(self.settings),
            "data": self._data,
            "seconds": self.seconds,
            "metrics_bytes": self._metrics.size,
            "monitor": self.monitor.state(),
        }
        tensors = gather(self.engine.tensors(), self.part, self.peers)
        self.peers.by_first(lambda: checkpoint.save(path, tensors, state))

    def _restore(self, path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}

        def read() -> dict[str, Any]:
            found, state = checkpoint.load(path)
            tensors.update(found)
            return state

        state = self.peers.by_first(read)
        if state["data"] != self._data:
            raise CheckpointError(
                f"the checkpoint in {self.place.path} was made with other training images; resume with the same data"
            )
        if state["recipe"] != recipe.fingerprint(self.settings):
            raise CheckpointError(
                f"the checkpoint in {self.place.path} belongs to another run or model; put back what this run wrote"
            )
        mine = scatter(tensors, self.part, self.peers)
        try:
            self.engine.load_tensors(mine, state["updates"])
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.place.path} belongs to another run or model "
                f"({str(error).splitlines()[-1].strip()}); resume with the recipe that made it"
            ) from error
        self.epoch, self.batch, self.rollbacks = state["epoch"], state["batch"], state["rollbacks"]
        self.seconds, self._metrics_bytes = state["seconds"], state["metrics_bytes"]
        self.monitor.load_state(state["monitor"])


def _fingerprint(data: Dataset, rows: Tensor | None) -> str:
    """Of the images that a run learns from."""
    whole = data.train.fingerprint()
    return (whole if rows is None else hashlib.sha256(whole.encode() + rows.numpy().tobytes()).hexdigest())[:16]


class Interrupted(AtasError):  # noqa: N818  (nothing went wrong)
    """A signal ended the run; everything is saved."""

    everywhere = True
