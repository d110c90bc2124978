"""A job: a request that has passed every check. Here is what a job of any runtime has, and the checks they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from covary.algorithm import Algorithm
from covary.data.federated import FederatedData, StreamedData
from covary.errors import InvalidInput, refused
from covary.running.plan import Layout, Plan
from covary.targets import Target, target_of
from covary.training import Training

# Of every history, besides the metrics, which are named differently
COLUMNS = ("round", "loss", "cohort", "drift", "control_error", "control_change", "bytes_up", "bytes_down")


class AnyProblem(Protocol):
    """What a problem of any runtime has. `covary.problem.Problem` is the one of JAX."""

    engine: ClassVar[str]  # the module that is its runtime, as `covary.running.engine.Engine` describes it

    @property
    def data(self) -> FederatedData: ...

    @property
    def n_clients(self) -> int: ...

    @property
    def test(self) -> Any: ...  # a batch for the metrics, or None

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    @property
    def frozen(self) -> Mapping[str, Any] | None: ...  # the parameters that are not trained, by path

    @property
    def buffers(self) -> np.ndarray | None: ...  # the model's at the start, as a vector

    def start(self, x0: Any, seed: int) -> tuple[np.ndarray, Any]: ...  # the flat start, and the way back from it

    def without_metrics(self) -> AnyProblem: ...  # of which only the loss is measured


class Job(Protocol):
    """A request that has passed every check, ready for its runtime, which adds what it needs itself."""

    @property
    def algorithm(self) -> Algorithm: ...  # with the model's buffers

    @property
    def problem(self) -> AnyProblem: ...

    @property
    def training(self) -> Training: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def layout(self) -> Layout: ...  # (N,) in each field

    @property
    def p(self) -> np.ndarray: ...  # (N,): the clients' weights

    @property
    def starts(self) -> list[np.ndarray]: ...  # x^0, one per seed

    @property
    def visits(self) -> list[np.ndarray]: ...  # the cohorts of the warm start

    @property
    def store(self) -> str: ...  # "device", "host", "disk" or a folder

    @property
    def target(self) -> Target | None: ...

    @property
    def names(self) -> tuple[str, ...]: ...  # of what every round measures: "loss" and the metrics


class Measured(NamedTuple):
    """What a run measures, and what ends it."""

    names: tuple[str, ...]  # in rounds
    passes: bool  # the loss is measured by the host, in passes over streamed data
    target: Target | None


def measured_by(problem: AnyProblem, training: Training, measure_loss: bool) -> Measured:
    """What a run measures: the metrics, and the loss if it is asked for, needed, or the only one."""
    names = ("loss", *problem.metric_names)
    target = target_of(training.target, names)
    wants_loss = len(names) == 1 or (target is not None and target.metric == "loss")
    measured = names if wants_loss or (measure_loss and not problem.data.streamed) else names[1:]
    passes = isinstance(problem.data, StreamedData) and "loss" in measured
    return Measured(tuple(name for name in measured if name != "loss") if passes else measured, passes, target)


def warm_start_cohorts(algorithm: Algorithm, plan: Plan, training: Training) -> list[np.ndarray]:
    """The cohorts of the warm start, which visits every client once; none without one."""
    if not training.warm_start:
        return []
    if algorithm.warm_start is None:
        raise InvalidInput(
            f"warm_start=True needs control variates to set, and {algorithm.name} has none that a gradient can set. "
            "Use warm_start=False, or scaffold."
        )
    cohorts = np.split(np.arange(plan.n_clients), range(plan.cohort, plan.n_clients, plan.cohort))
    if training.rounds <= len(cohorts):
        raise InvalidInput(
            f"rounds={training.rounds} leaves no round to train in: the warm start visits {plan.n_clients} clients, "
            f"{plan.cohort} at a time, which takes {len(cohorts)} rounds. Use more rounds or warm_start=False."
        )
    return cohorts


def reject_numbers_beyond(algorithm: Algorithm, dtype: np.dtype[Any]) -> None:
    """Reject numbers of an algorithm that the model's precision turns into 0 or infinity."""
    for name, value in algorithm.numbers.items():
        with np.errstate(over="ignore"):
            cast = float(dtype.type(value))
        if (abs(cast) < float(finfo(dtype).tiny) and value != 0) or not np.isfinite(cast):
            raise refused(name, f"a number that {dtype} can hold", f"{value:g}", "Choose a less extreme one.")


def finfo(dtype: np.dtype[Any]) -> Any:
    """`np.finfo`, also of the types that NumPy does not know itself, such as bfloat16.

    >>> float(finfo(np.dtype(np.float32)).eps)
    1.1920928955078125e-07
    """
    if dtype.kind == "f":
        return np.finfo(dtype)
    import ml_dtypes  # it has made the type, and is there

    return ml_dtypes.finfo(dtype)


def grouped(n_points: int, at_once: int) -> list[list[int]]:
    """The points of a sweep in groups of about one size.

    >>> grouped(5, at_once=2)
    [[0, 1], [2, 3], [4]]
    """
    return [part.tolist() for part in np.array_split(np.arange(n_points), -(-n_points // at_once))]
