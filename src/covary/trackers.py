"""Trackers: what a run measures in each round, sent to TensorBoard, MLflow or Weights & Biases as it happens.

Each function opens one run there and returns a `Tracker`, which is what `simulate(log=...)` takes. None of the three
packages is imported before its function is called.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from covary.checks import path
from covary.errors import CovaryError, refused


class TrackerWarning(UserWarning):
    """A tracker failed while a run went on; the run does without it."""


class Tracker:
    """One run at a tracker, called as `log(round, metrics)`. `with`, or `close()`, ends it.

    A metric that is NaN was not measured in that round (see `eval_every`) and is left out. A tracker takes the rounds
    of one run: open another for the next. Where it fails, a `TrackerWarning` says so once, and training goes on.
    """

    def __init__(self, name: str, send: Callable[[int, dict[str, float]], None], end: Callable[[bool], None]):
        self.name, self._send, self._end = name, send, end
        self._round = 0
        self._open, self._lost = True, False

    def __call__(self, round: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            raise CovaryError("This tracker is closed. Train inside its `with` block, or open another.")
        if round <= self._round:
            fix = "A tracker takes one run: open another for the next."
            raise refused("round", f"more than {self._round}, which was sent before", round, fix)
        self._round = round
        measured = {name: float(value) for name, value in metrics.items() if not math.isnan(value)}
        if measured and not self._lost:
            with self._surviving(f"was not told of round {round}, and is told no more"):
                self._send(round, measured)

    def close(self, failed: bool = False) -> None:
        """Send what is left and end the run; `failed` marks it so, where the tracker knows of that."""
        if self._open:
            self._open = False
            with self._surviving("was not closed"):
                self._end(failed or self._lost)

    @contextlib.contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Around what goes to others: what fails there must not stop the training here."""
        try:
            yield
        except Exception as error:
            self._lost = True
            warnings.warn(f"{self.name} {what}: {_first_line(error)}.", TrackerWarning, stacklevel=4)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def tensorboard(folder: str | Path) -> Tracker:
    """Write event files for TensorBoard, which shows them with `tensorboard --logdir FOLDER`.

    Args:
        folder: where to; a folder for each run, so that TensorBoard draws each as a curve of its own.

    >>> import tempfile, covary as cv
    >>> with cv.trackers.tensorboard(tempfile.mkdtemp()) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    place = path("folder", folder)
    with _opening("tensorboard", "Give a folder that can be written to."):
        from tensorboardX import SummaryWriter

        # a file of its own: its usual name counts in seconds, and a second writer would take the first one's file
        writer = SummaryWriter(str(place), filename_suffix=f".{time.time_ns()}")
    flushed = time.monotonic()

    def send(round: int, metrics: dict[str, float]) -> None:
        nonlocal flushed
        for name, value in metrics.items():
            writer.add_scalar(name, value, round)
        if time.monotonic() - flushed > 1:
            writer.flush()
            flushed = time.monotonic()

    return Tracker("TensorBoard", send, lambda failed: writer.close())


def mlflow(
    experiment: str = "covary",
    params: Mapping[str, Any] | None = None,
    name: str | None = None,
    uri: str | None = None,
) -> Tracker:
    """Begin an MLflow run, which `mlflow ui` shows. MLflow's own active run is left alone.

    Args:
        experiment: the experiment it belongs to, made if there is none of that name.
        params: what to keep beside the metrics, such as {"algorithm": "scaffold", "eta_l": 0.1}.
        name: the run's name; by default MLflow invents one.
        uri: a server, or a local store as "sqlite:///FILE"; by default what MLflow is set to (MLFLOW_TRACKING_URI),
            else `mlflow.db` in this folder.

    >>> import tempfile, covary as cv
    >>> uri = f"sqlite:///{tempfile.mkdtemp()}/runs.db"
    >>> with cv.trackers.mlflow(params={"eta_l": 0.1}, uri=uri) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    settings = _settings(params)
    fix = "Look at uri, or at MLFLOW_TRACKING_URI."
    with _opening("mlflow", fix), _quiet("mlflow.store.db.utils"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(tracking_uri=uri)
        except MlflowException as error:
            local = "A local store is uri='sqlite:///FILE' and needs pip install 'covary[mlflow]'."
            raise CovaryError(f"MLflow cannot open its store. {local} MLflow says: {error}") from None
        found = client.get_experiment_by_name(experiment)
        within = client.create_experiment(experiment) if found is None else found.experiment_id
        run = client.create_run(within, run_name=name).info.run_id
        client.log_batch(run, params=[Param(key, str(value)) for key, value in settings.items()])

    waiting: list[Metric] = []
    flushed = 0.0

    def flush() -> None:
        nonlocal flushed
        while waiting:
            client.log_batch(run, metrics=waiting[:1000])  # the most it takes
            del waiting[:1000]
        flushed = time.monotonic()

    def send(round: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        waiting.extend(Metric(key, value, now, round) for key, value in metrics.items())
        if time.monotonic() - flushed > 1:  # a call takes as long as many a round: fast ones share it
            flush()

    def end(failed: bool) -> None:
        lost = True
        try:
            flush()
            lost = failed
        finally:
            client.set_terminated(run, "FAILED" if lost else "FINISHED")

    return Tracker("MLflow", send, end)


def wandb(project: str = "covary", params: Mapping[str, Any] | None = None, **options: Any) -> Tracker:
    """Begin a Weights & Biases run. It prints nothing, leaves the console alone, and is not `wandb.run`.

    Args:
        project: the project it belongs to.
        params: what to keep beside the metrics, such as {"algorithm": "scaffold", "eta_l": 0.1}.
        options: any others of `wandb.init`, such as name="first" or mode="offline".

    >>> import tempfile, covary as cv
    >>> with cv.trackers.wandb(params={"eta_l": 0.1}, mode="offline", dir=tempfile.mkdtemp()) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    settings = _settings(params)
    if "config" in options:
        raise CovaryError("config is what wandb.init calls params. Pass params instead.")
    with _opening("wandb", 'Run `wandb login`, or keep the run on this machine: mode="offline" or WANDB_MODE=offline.'):
        import wandb as package

        unheard = {"settings": package.Settings(silent=True, console="off"), "reinit": "create_new"}
        run = package.init(project=project, config=settings, **{**unheard, **options})

    def send(round: int, metrics: dict[str, float]) -> None:
        run.log(metrics, step=round)

    return Tracker("Weights & Biases", send, lambda failed: run.finish(exit_code=int(failed)))


def _settings(params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise refused("params", "a dict of names and values", repr(params), "Try {'eta_l': 0.1}.")
    return dict(params)


@contextlib.contextmanager
def _opening(extra: str, fix: str) -> Iterator[None]:
    """Around what a package does to begin a run: it may not be there, or not be able to."""
    try:
        yield
    except ImportError as error:
        raise CovaryError(f"trackers.{extra} needs a package: pip install 'covary[{extra}]' ({error}).") from error
    except CovaryError:
        raise
    except Exception as error:
        raise CovaryError(f"trackers.{extra} cannot begin a run: {_first_line(error)}. {fix}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0].rstrip(".") if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let a package open its store without a word on the tables it makes there or on what it is built with."""
    logger = logging.getLogger(name)
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)
