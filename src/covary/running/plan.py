"""From settings to numbers: the cohort's size, and every client's steps and batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import InvalidInput, refused
from covary.training import LocalWork, Training, check_batch_size, check_clients_per_round


@dataclass(frozen=True)
class LocalPlan:
    """What a compiled program fixes of the clients' local work; hashable, so that equal plans share a program."""

    steps: int | None  # K where all clients take the same number of steps
    max_steps: int
    batching: str  # "full", "rows" (so many examples a batch) or "parts" (so many equal batches an epoch)
    max_batch: int
    max_size: int  # examples of the largest client
    epochs: int  # permutations of a client's data that its steps need
    ragged_batches: bool
    ragged_sizes: bool


class Layout(NamedTuple):
    """How a client's data is cut into steps: one number per client in each field, or the numbers of one client."""

    size: Any  # examples
    batch: Any  # examples a batch
    per_epoch: Any  # batches an epoch
    steps: Any  # K_i


@dataclass(frozen=True)
class Plan:
    """What a compiled program fixes of the rounds."""

    n_clients: int  # N
    cohort: int  # S
    local: LocalPlan
    flat_weights: bool  # every example weighs the same in f
    steps_on_wire: int | None  # K, if the server can compute from it what option II does not send


def plan_local_work(asked: LocalWork, sizes: np.ndarray) -> tuple[LocalPlan, Layout]:
    """Every client's batches and steps, from its number of examples."""
    batching, batch, per_epoch = batches_of(asked.batch_size, sizes)
    if asked.local_steps is not None:
        steps = np.full(len(sizes), whole("local_steps", asked.local_steps, 1))
    else:
        steps = per_epoch * whole("local_epochs", 1 if asked.local_epochs is None else asked.local_epochs, 1)
    uneven = bool((sizes != sizes[0]).any())
    leftover = bool((sizes % (batch if batching == "rows" else per_epoch)).any())
    plan = LocalPlan(
        steps=int(steps[0]) if (steps == steps[0]).all() else None,
        max_steps=int(steps.max()),
        batching=batching,
        max_batch=int(batch.max()),
        max_size=int(sizes.max()),
        epochs=int(np.max(-(-steps // per_epoch))),
        ragged_batches=leftover or (uneven and batching != "rows"),
        ragged_sizes=uneven,
    )
    return plan, Layout(sizes, batch, per_epoch, steps)


def plan_rounds(
    training: Training, algorithm: Algorithm, sizes: np.ndarray, local_work: tuple[LocalPlan, Layout] | None = None
) -> tuple[Plan, Layout, np.ndarray]:
    """The plan of a run, every client's batches and steps, and the weights p_i.

    The local work is planned from the settings, unless it is given, as for batches that are made elsewhere.
    """
    N = len(sizes)
    S = cohort_size(training.clients_per_round, N)
    local, layout = plan_local_work(training.local, sizes) if local_work is None else local_work
    p = client_weights(sizes, training.by_examples)
    if algorithm.lockstep and (S < N or local.steps is None):
        steps = layout.steps
        came = f"{S} of {N} clients a round" if S < N else f"from {steps.min()} to {steps.max()} steps a client"
        raise InvalidInput(
            f"{algorithm.name} needs every client in every round, all with the same number of local steps; got {came}. "
            f"Use clients_per_round={N} and local_steps, or scaffold, which needs neither."
        )
    plan = Plan(
        n_clients=N,
        cohort=S,
        local=local,
        flat_weights=bool(np.allclose(p / sizes, p[0] / sizes[0], rtol=1e-12)),
        steps_on_wire=local.steps if S == N or bool((p == p[0]).all()) else None,
    )
    return plan, layout, p


def cohort_size(clients_per_round: int | float | None, N: int) -> int:
    """S: how many of N clients take part in a round."""
    check_clients_per_round(clients_per_round)
    if clients_per_round is None:
        return N
    if isinstance(clients_per_round, float | np.floating):
        return max(1, round(clients_per_round * N))
    if clients_per_round > N:
        raise refused("clients_per_round", f"between 1 and {N}", clients_per_round, f"There are {N} clients.")
    return int(clients_per_round)


def client_weights(sizes: np.ndarray, by_examples: bool) -> np.ndarray:
    """p_i of every client, by its share of the examples or the same for all; they sum to one.

    >>> client_weights(np.array([10, 30]), True), client_weights(np.array([10, 30]), False)
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    return sizes / sizes.sum() if by_examples else np.ones(len(sizes)) / len(sizes)


def batches_of(batch_size: int | float | None, sizes: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    """How a client's epoch is cut into batches: the rule, the largest batch and the number of batches, per client."""
    check_batch_size(batch_size)
    if batch_size is None:
        return "full", sizes, np.ones_like(sizes)
    smallest = int(sizes.argmin())
    if isinstance(batch_size, float | np.floating):
        parts = math.ceil(min(1 / batch_size, 2**31) - 1e-9)  # 0.2 of the local data: 5 steps an epoch
        if parts > sizes[smallest]:
            raise InvalidInput(
                f"batch_size={batch_size} cuts each client's data into {parts} batches, but client {smallest} has only "
                f"{sizes[smallest]} examples. Use a fraction of at least {1 / sizes[smallest]:.3g}, or a whole number."
            )
        return "parts", -(-sizes // parts), np.full_like(sizes, parts)
    if batch_size > sizes[smallest]:
        raise InvalidInput(
            f"batch_size={batch_size} is larger than the data of client {smallest}, which has {sizes[smallest]} "
            f"examples. Use at most {sizes[smallest]}, a fraction such as 0.2 of each client's data, or None for all."
        )
    return "rows", np.full_like(sizes, batch_size), -(-sizes // int(batch_size))


def batch_bounds(rule: str, batch: Any, per_epoch: Any, size: Any, step: Any) -> tuple[Any, Any]:
    """Where the batch of a step begins and ends in its epoch's order of a client's data; numbers may be traced.

    >>> [batch_bounds("rows", 4, 3, 10, step) for step in range(3)]
    [(0, 4), (4, 8), (8, 10)]
    >>> [batch_bounds("parts", 4, 3, 10, step) for step in range(3, 6)]
    [(0, 3), (3, 6), (6, 10)]
    """
    j = step % per_epoch
    if rule == "rows":
        high = (j + 1) * batch
        return j * batch, high - (high > size) * (high - size)  # the smaller of the two
    return j * size // per_epoch, (j + 1) * size // per_epoch


def aggregation_weights(p: Any, fraction: float, together: bool, dtype: Any) -> Any:
    """The weights of a cohort's uploads, from the p_i of its clients and the fraction |S| / N.

    Each upload stands for N / |S| clients, so the expected sum is that of p_i u_i over all clients. With `together`,
    the weights sum to one.

    >>> aggregation_weights(np.array([0.2, 0.1]), 0.5, False, float)
    array([0.4, 0.2])
    >>> aggregation_weights(np.array([0.75, 0.25]), 0.5, True, float)
    array([0.75, 0.25])
    """
    w = (p / fraction).astype(dtype)
    return w / w.sum() if together else w
