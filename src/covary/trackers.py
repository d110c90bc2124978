"""Trackers send the metrics of each round to TensorBoard, MLflow or Weights & Biases during a run.

Each function opens one run there and returns a `Tracker`, which `simulate(log=...)` takes. A package is imported only
when its function is called.
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
from covary.errors import CovaryError, InvalidInput, refused


class TrackerWarning(UserWarning):
    """A tracker failed during a run. The run continues without it."""


class Tracker:
    """One run at a tracker, called as `log(round, metrics)`. `with`, or `close()`, ends it.

    A metric that is NaN was not measured in that round (see `eval_every`) and is not sent. A tracker takes the rounds
    of one run; open another for the next run. If it fails, it warns once with `TrackerWarning`, and training continues.
    """

    def __init__(self, name: str, send: Callable[[int, dict[str, float]], None], end: Callable[[bool], None]):
        self.name, self._send, self._end = name, send, end
        self._round = 0
        self._open, self._lost = True, False

    def __call__(self, round: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            raise InvalidInput("This tracker is closed. Train inside its `with` block, or open another one.")
        if round <= self._round:
            fix = "A tracker takes the rounds of one run. Open another one for the next run."
            raise refused("round", f"above {self._round}, the last round sent", round, fix)
        self._round = round
        measured = {name: float(value) for name, value in metrics.items() if not math.isnan(value)}
        if measured and not self._lost:
            with self._warning(f"failed in round {round} and gets no more rounds"):
                self._send(round, measured)

    def close(self, failed: bool = False) -> None:
        """Send the remaining metrics and end the run; `failed` marks it as failed if the tracker supports that."""
        if self._open:
            self._open = False
            with self._warning("could not be closed"):
                self._end(failed or self._lost)

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Turn an error of the tracker into a warning: it must not stop the training."""
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
        folder: the folder for the files. Use one per run, so that TensorBoard draws one curve per run.

    >>> import tempfile, covary as cv
    >>> with cv.trackers.tensorboard(tempfile.mkdtemp()) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    place = path("folder", folder)
    with _opening("tensorboard", "Choose a folder that can be written to."):
        from tensorboardX import SummaryWriter

        # the default file name has a resolution of seconds, and two writers would then share one file
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
    """Start an MLflow run, which `mlflow ui` shows. MLflow's own active run does not change.

    Args:
        experiment: the experiment of the run; it is created if it does not exist.
        params: parameters to save with the run, such as {"algorithm": "scaffold", "eta_l": 0.1}.
        name: the run's name; by default MLflow chooses one.
        uri: a server, or a local store as "sqlite:///FILE"; by default MLflow's own setting (MLFLOW_TRACKING_URI), or
            else `mlflow.db` in the current folder.

    >>> import tempfile, covary as cv
    >>> uri = f"sqlite:///{tempfile.mkdtemp()}/runs.db"
    >>> with cv.trackers.mlflow(params={"eta_l": 0.1}, uri=uri) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    settings = _settings(params)
    fix = "Check uri and MLFLOW_TRACKING_URI."
    with _opening("mlflow", fix), _quiet("mlflow.store.db.utils"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(tracking_uri=uri)
        except MlflowException as error:
            local = "A local store is uri='sqlite:///FILE' and needs pip install 'covary[mlflow]'."
            raise InvalidInput(f"MLflow cannot open its store. {local} MLflow says: {error}") from None
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
        if time.monotonic() - flushed > 1:  # a call can take longer than a round, so several rounds share one
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
    """Start a Weights & Biases run. It prints nothing, does not capture the console, and is not `wandb.run`.

    Args:
        project: the project of the run.
        params: parameters to save with the run, such as {"algorithm": "scaffold", "eta_l": 0.1}.
        options: other arguments of `wandb.init`, such as name="first" or mode="offline".

    >>> import tempfile, covary as cv
    >>> with cv.trackers.wandb(params={"eta_l": 0.1}, mode="offline", dir=tempfile.mkdtemp()) as log:
    ...     run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=1), rounds=5, local_steps=5, log=log)
    """
    settings = _settings(params)
    if "config" in options:
        raise InvalidInput("trackers.wandb has no config. Pass params instead.")
    with _opening("wandb", 'Run `wandb login`, or keep the run on this machine: mode="offline" or WANDB_MODE=offline.'):
        import wandb as package

        silent = {"settings": package.Settings(silent=True, console="off"), "reinit": "create_new"}
        run = package.init(project=project, config=settings, **{**silent, **options})

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
    """Turn an error of a package that starts a run, or is not installed, into a CovaryError."""
    try:
        yield
    except ImportError as error:
        raise InvalidInput(f"trackers.{extra} needs a package: pip install 'covary[{extra}]' ({error}).") from error
    except CovaryError:
        raise
    except Exception as error:
        raise InvalidInput(f"trackers.{extra} cannot start a run: {_first_line(error)}. {fix}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0].rstrip(".") if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Hide the messages of a package that opens its store."""
    logger = logging.getLogger(name)
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)
