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


class Tracker:
    """One run at a tracker, called as `log(round, metrics)`. `with`, or `close()`, ends it.

    A metric that is NaN was not measured in that round (see `eval_every`) and is left out. A tracker takes the rounds
    of one run: open another for the next.
    """

    def __init__(self, send: Callable[[int, dict[str, float]], None], end: Callable[[bool], None]):
        self._send, self._end = send, end
        self._round = 0
        self._open = True

    def __call__(self, round: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            raise CovaryError("This tracker is closed. Train inside its `with` block, or open another.")
        if round <= self._round:
            fix = "A tracker takes one run: open another for the next."
            raise refused("round", f"more than {self._round}, which was sent before", round, fix)
        self._round = round
        measured = {name: float(value) for name, value in metrics.items() if not math.isnan(value)}
        if measured:
            self._send(round, measured)

    def close(self, failed: bool = False) -> None:
        """Send what is left and end the run; `failed` marks it so, where the tracker knows of that."""
        if self._open:
            self._open = False
            self._end(failed)

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
    with _needed("tensorboard"):
        from tensorboardX import SummaryWriter
    try:
        # a file of its own: its usual name counts in seconds, and a second writer would take the first one's file
        writer = SummaryWriter(str(path("folder", folder)), filename_suffix=f".{time.time_ns()}")
    except OSError as error:
        raise refused("folder", "one that can be written to", str(error), "Give another.") from None

    def send(round: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, round)

    return Tracker(send, lambda failed: writer.close())


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
    with _needed("mlflow"), _quiet("mlflow.store.db.utils"):
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
        flush()
        client.set_terminated(run, "FAILED" if failed else "FINISHED")

    return Tracker(send, end)


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
    with _needed("wandb"):
        import wandb as package
    unheard = {"settings": package.Settings(silent=True, console="off"), "reinit": "create_new"}
    run = package.init(project=project, config=settings, **{**unheard, **options})

    def send(round: int, metrics: dict[str, float]) -> None:
        run.log(metrics, step=round)

    return Tracker(send, lambda failed: run.finish(exit_code=int(failed)))


def _settings(params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise refused("params", "a dict of names and values", repr(params), "Try {'eta_l': 0.1}.")
    return dict(params)


@contextlib.contextmanager
def _needed(extra: str) -> Iterator[None]:
    """Turn a package that is not there into a word on how to get it."""
    try:
        yield
    except ImportError as error:
        raise CovaryError(f"trackers.{extra} needs a package: pip install 'covary[{extra}]' ({error}).") from error


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
