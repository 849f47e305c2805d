"""The trainer: epochs of steps, a probe of the model after each epoch, timed checkpoints, rollback, stop signals.

After a signal (Ctrl-C, termination, a lost terminal) the run stops between two steps. The time of a run is the time of
its training steps only, including the work of the device.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.formatting import shell_quote
from atas.core.autograd import freeze, set_mode
from atas.data import Dataset
from atas.distributed.world import SINGLE, AnyFlag, World
from atas.errors import AtasError, DataError, UsageError
from atas.recipes import Recipe
from atas.threat import format_pixels
from atas.training.build import build
from atas.training.callbacks import Callback, Logger, StepInfo
from atas.training.checkpoint import CheckpointManager
from atas.training.loggers import open_loggers
from atas.training.metrics import MetricsFile, epoch_row, examples_per_second
from atas.training.monitor import ProbeResult
from atas.training.progress import TrainingProgress
from atas.training.reestimation import reestimate_batchnorm
from atas.training.run import DIVERGED, RunFolder, divergence_advice

_ROLLBACK_STEP_FACTOR = 0.75  # of the step size, at each rollback
_MAX_ROLLBACKS = 8
_SMALL_EPS = 0.05  # is read in grey levels, even if it is not a whole number of them


class Trainer:
    """Trains one run, in a single process or as one of several ranks.

    The model is trained on all training images or on those in `rows`; the monitor's images are chosen from all.
    `probe` replaces the monitor's measurement after each epoch.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_folder: RunFolder,
        data: Dataset,
        model: nn.Module,
        progress: TrainingProgress,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback] = (),
        rows: Tensor | None = None,
        probe: Callable[[nn.Module], ProbeResult] | None = None,
        world: World = SINGLE,
    ) -> None:
        self.recipe, self.run_folder, self.progress, self.world = recipe, run_folder, progress, world
        if callbacks and world.size > 1:
            raise UsageError("observers see the examples of one process only; start the training without torchrun")
        self._callbacks = callbacks
        self._custom_probe = probe
        self._loggers = open_loggers(recipe, run_folder, loggers, progress.log, world)
        parts = build(recipe, data, model, progress.log, rows, world)
        self.engine, self.monitor = parts.engine, parts.monitor
        self.loader, self.device = self.engine.loader, self.engine.device
        self._checkpoints = CheckpointManager(run_folder.path, self.engine, parts.data_fingerprints)
        self._keeps_healthy = recipe.training.on_collapse != "warn"
        self.epoch = self.batch = self.rollbacks = 0
        self.seconds = 0.0  # spent in training steps
        self._metrics_bytes = 0  # the part of the metrics file that stays when training starts
        self._stop = StopSignal(ignore_repeats=world.size > 1)
        self._any_flag = AnyFlag(world)

    @property
    def _global_step(self) -> int:
        return self.epoch * len(self.loader) + self.batch

    def resume(self) -> bool:
        """Restore the last checkpoint; return False if there is none."""
        if not self.world.on_rank0(self.run_folder.last_checkpoint.exists):
            return False
        self._metrics_bytes = self._restore(self.run_folder.last_checkpoint)["metrics_bytes"]
        return True

    def log_event(self, row: dict[str, Any]) -> None:
        """Write a row for an event before the training starts."""
        self._open_metrics().write(row)
        self._metrics_bytes = self.run_folder.metrics.stat().st_size

    def fit(self) -> None:
        """Train to the end; after a stop signal, save a checkpoint and raise `Interrupted`."""
        epochs = self.recipe.training.epochs
        self._metrics = self._open_metrics()
        self._loggers.start(self.epoch)
        self._saved_at = time.monotonic()
        self._timer = DeviceTimer(self.device)
        self._probe: ProbeResult | None = None
        seconds_before = self.seconds
        if self.epoch < epochs:  # a finished run needs no engine
            with self.progress.timing("preparing"):
                self.engine.prepare(self.epoch)
        eps = self.recipe.threat.eps
        in_levels = eps < _SMALL_EPS or "/255" in format_pixels(eps)  # as the budget is written
        self.progress.start(self.recipe.name, epochs * len(self.loader), self._global_step, in_levels=in_levels)
        try:
            with self._stop:
                while self.epoch < epochs:
                    self._run_epoch(epochs)
        finally:
            self.loader.close()
            self._loggers.close()
            self.progress.add_time("training", self.seconds - seconds_before)

    def _open_metrics(self) -> MetricsFile:
        """Open the metrics file, cut back to the checkpoint."""
        metrics = MetricsFile(self.run_folder.metrics if self.world.is_main else None, self._metrics_bytes)
        if metrics.lost_rows:
            self.progress.log(
                f"{self.run_folder.metrics} is shorter than it was at the checkpoint; the rows of some epochs are lost"
            )
        return metrics

    def _run_epoch(self, epochs: int) -> None:
        engine = self.engine
        engine.prepare(self.epoch)  # outside of the measured time: a new resolution is compiled here
        self._timer.start()
        engine.start_epoch(self.epoch, self.batch)
        while self.batch < len(self.loader):
            engine.step()
            self.batch += 1
            self._run_callbacks()
            if self.progress.due():
                self._show()
            due = time.monotonic() - self._saved_at >= self.recipe.training.checkpoint_every
            stop, save = self._any_flag(self._stop.received, due and self.world.is_main)
            if stop or save:
                self.seconds += self._timer.stop()
                self._save()
                if stop:
                    raise Interrupted(
                        f"stopped after batch {self.batch} of epoch {self.epoch + 1}; the run is saved, continue with: "
                        f"atas train --resume --out {shell_quote(self.run_folder.path)}{self.recipe.trust_option}"
                    )
                self._timer.start()
        self.seconds += self._timer.stop()
        self._end_epoch(epochs)

    def _run_callbacks(self) -> None:
        info = StepInfo(self.epoch, self.batch, len(self.loader), self.monitor.collapsed)
        due = [callback for callback in self._callbacks if callback.due(info)]
        if due:
            self.seconds += self._timer.stop()
            for callback in due:
                callback.on_step_end(info, self.engine)
            self._timer.start()

    def _show(self) -> None:
        self.engine.method.checks.raise_if_set()
        loss, _, step_size = self.engine.epoch_sums.read()
        status = {"loss": loss, "step_size": step_size}
        if self._probe is not None:
            status |= {"clean": self._probe.clean, "pgd10": self._probe.pgd10}
        seconds = self.seconds + self._timer.elapsed()
        status["examples_per_second"] = examples_per_second(self.engine, self.epoch, self.batch, seconds)
        self.progress.update(self._global_step, self.epoch, self.recipe.training.epochs, **status)

    def _end_epoch(self, epochs: int) -> None:
        engine = self.engine
        engine.method.checks.raise_if_set()
        means = self._check_loss()
        if self.epoch + 1 == epochs:
            self._reestimate_batchnorm()
        probe = self._measure() if self.monitor.due(self.epoch, epochs) else None
        collapsed = self.monitor.collapsed if probe is None else self.monitor.update(probe)
        self._probe = probe or self._probe
        row, histograms = epoch_row(self.epoch, engine, means, probe, collapsed, self.seconds)
        self._metrics.write(row)
        if self._loggers:
            self._loggers.log(row, {name: values.cpu() for name, values in histograms.items()})
        self.epoch, self.batch = self.epoch + 1, 0
        self.progress.end_epoch(self._global_step, row, epochs)
        engine.epoch_sums.sums.zero_()
        for event in self.monitor.events(row):
            if event.row is not None:
                self._metrics.write(event.row)
            self.progress.log(event.message, style=event.style)
        if probe is not None and self._keeps_healthy:
            self._keep_healthy(epochs)
        if self.epoch == epochs:
            self._save()

    def _keep_healthy(self, epochs: int) -> None:
        """After a probe: return from a collapse to the last healthy checkpoint, or write it."""
        if self.monitor.collapsed and self.world.on_rank0(self.run_folder.healthy_checkpoint.exists):
            self._roll_back(epochs)
        elif self.monitor.healthy:
            self._write(self.run_folder.healthy_checkpoint)

    def _measure(self) -> ProbeResult:
        """Measure the model after an epoch, with the monitor's probe or the caller's."""
        with self.progress.timing("monitor"):
            return self._run_probe()

    def _run_probe(self) -> ProbeResult:
        probe, model = self._custom_probe, self.engine.model
        if probe is None:
            return self.monitor.probe(self.engine.eval_model, self.engine.run)
        with set_mode(model, training=False), freeze(model):
            result = self.world.on_rank0(lambda: probe(model))
        if not isinstance(result, ProbeResult):
            raise UsageError(f"probe must return an atas.training.ProbeResult; got {type(result).__name__}")
        return result

    def _check_loss(self) -> tuple[float, float, float]:
        loss, *_ = means = self.engine.epoch_sums.read(self.world)
        if not math.isfinite(loss):
            self._metrics.write({"event": DIVERGED, "epoch": self.epoch})
            raise DataError(
                f"the loss is {loss} in epoch {self.epoch + 1}: training has diverged; start again with --overwrite "
                f"and {divergence_advice(self.recipe)}"
            )
        return means

    def _roll_back(self, epochs: int) -> None:
        """Restore the last healthy checkpoint, to end the run there or to continue with smaller steps."""
        method, collapsed_in = self.engine.method, self.epoch - 1
        scale, rollbacks, seconds = method.step_scale.clone(), self.rollbacks + 1, self.seconds
        self._restore(self.run_folder.healthy_checkpoint)
        self.rollbacks, self.seconds = rollbacks, seconds
        epochs_of_event = {"epoch": collapsed_in, "to_epoch": self.epoch}
        if self.recipe.training.on_collapse == "stop" or rollbacks > _MAX_ROLLBACKS:
            self._metrics.write({"event": "stop", **epochs_of_event})
            self._loggers.start(self.epoch)
            self.progress.log(f"Stopped; the run ends with the weights of epoch {self.epoch}, the last healthy one.")
            self.epoch = epochs
            self._reestimate_batchnorm()
            return
        method.step_scale.copy_(scale)
        method.shrink_steps(_ROLLBACK_STEP_FACTOR)
        factor = float(method.step_scale)
        self._metrics.write({"event": "rollback", **epochs_of_event, "step_scale": factor})
        self._loggers.start(self.epoch)
        self.progress.log(f"Back to the end of epoch {self.epoch}; continuing with {factor:.3f} of the step size.")
        self._save()

    def _reestimate_batchnorm(self) -> None:
        """Re-estimate the statistics of the final averages, if the recipe says so, as part of the training's time."""
        if self.recipe.training.ema_batchnorm == "re-estimate":
            self._timer.start()
            reestimate_batchnorm(self.engine)
            self.seconds += self._timer.stop()

    def _save(self) -> None:
        """Write the checkpoint to resume from, unless the training has diverged."""
        self._check_loss()
        self._write(self.run_folder.last_checkpoint)
        self._saved_at = time.monotonic()

    def _write(self, path: Path) -> None:
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "rollbacks": self.rollbacks,
            "seconds": self.seconds,
            "metrics_bytes": self._metrics.size,
            "monitor": self.monitor.state_dict(),
        }
        with self.progress.timing("saving"):
            self._checkpoints.save(path, state)

    def _restore(self, path: Path) -> dict[str, Any]:
        state = self._checkpoints.restore(path)
        self.epoch, self.batch, self.rollbacks = state["epoch"], state["batch"], state["rollbacks"]
        self.seconds = state["seconds"]
        self.monitor.load_state_dict(state["monitor"])
        return state


class Interrupted(AtasError):  # noqa: N818  (nothing went wrong)
    """A signal stopped the run, whose state is saved."""

    on_all_ranks = True


class StopSignal:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag, `received`, that the trainer checks between steps.

    A second SIGINT or SIGTERM gets its previous handler. SIGHUP may repeat, and stays ignored if it was ignored before
    (nohup). With `ignore_repeats`, used under torchrun, repeated signals are ignored, also after an error, so that each
    rank can print its message before torchrun kills it after 30 s.
    """

    def __init__(self, ignore_repeats: bool = False) -> None:
        self.received = False
        self._ignore_repeats = ignore_repeats
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python handles signals there only
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ignore_repeats and error is not None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = True
        if not self._ignore_repeats and number != signal.SIGHUP:
            signal.signal(number, self._previous[number])


class DeviceTimer:
    """Seconds spent in training steps, with the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: float | None = None

    def start(self) -> None:
        """Start, after the device has finished earlier work."""
        self._wait()
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Wait for the device, and return the seconds since the start."""
        self._wait()
        seconds, self._started = self.elapsed(), None
        return seconds

    def elapsed(self) -> float:
        """Return the seconds since the start, without waiting for the device."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
