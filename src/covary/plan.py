"""From what the user asked for to what the engine runs: cohort size, steps and batches of every client."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import CovaryError, refused
from covary.problem import Problem


@dataclass(frozen=True)
class Plan:
    """All that is fixed when the program is compiled; hashable, so that equal plans share one program."""

    n_clients: int  # N
    cohort: int  # S
    steps: int | None  # K where all clients take the same number of steps
    max_steps: int
    batching: str  # "full", "rows" (so many examples a batch) or "parts" (so many equal batches an epoch)
    max_batch: int
    max_size: int  # examples of the largest client
    epochs: int  # permutations of a client's data that its steps need
    ragged_batches: bool
    ragged_sizes: bool
    flat_weights: bool  # every example weighs the same in f
    steps_on_wire: int | None  # `steps`, where the server can form what option II leaves unsent from it


class Layout(NamedTuple):
    """What differs from client to client, as arrays over the N clients."""

    offset: Any
    size: Any
    batch: Any  # examples a batch
    per_epoch: Any  # batches an epoch
    steps: Any  # K_i
    p: Any  # weights, summing to 1


def make_plan(
    problem: Problem,
    algorithm: Algorithm,
    clients_per_round: int | float | None,
    local_steps: int | None,
    local_epochs: int | None,
    batch_size: int | float | None,
    weights: str,
) -> tuple[Plan, Layout]:
    """Check the request and work out every client's batches and steps."""
    sizes, N = problem.data.sizes, problem.n_clients
    S = cohort_size(clients_per_round, N)
    batching, batch, per_epoch = batches_of(batch_size, sizes)

    if local_steps is not None and local_epochs is not None:
        raise CovaryError(
            f"local_steps={local_steps} and local_epochs={local_epochs} exclude each other: one fixes K, the other the "
            "passes over the local data. Give one of them."
        )
    if local_steps is not None:
        steps = np.full(N, whole("local_steps", local_steps, 1))
    else:
        steps = per_epoch * whole("local_epochs", 1 if local_epochs is None else local_epochs, 1)

    if not isinstance(weights, str) or weights not in ("uniform", "examples"):
        raise refused("weights", '"uniform" or "examples"', repr(weights), "The paper's f is the uniform mean.")
    p = np.full(N, 1 / N) if weights == "uniform" else sizes / sizes.sum()

    equal = bool((steps == steps[0]).all())
    if algorithm.lockstep and (S < N or not equal):
        came = f"{S} of {N} clients a round" if S < N else f"from {steps.min()} to {steps.max()} steps a client"
        raise CovaryError(
            f"{algorithm.name} needs every client in every round, all with the same number of local steps; got {came}. "
            f"Use clients_per_round={N} and local_steps, or scaffold, which needs neither."
        )
    uneven = bool((sizes != sizes[0]).any())
    leftover = bool((sizes % (batch if batching == "rows" else per_epoch)).any())
    plan = Plan(
        n_clients=N,
        cohort=S,
        steps=int(steps[0]) if equal else None,
        max_steps=int(steps.max()),
        batching=batching,
        max_batch=int(batch.max()),
        max_size=int(sizes.max()),
        epochs=int(np.max(-(-steps // per_epoch))),
        ragged_batches=leftover or (uneven and batching != "rows"),
        ragged_sizes=uneven,
        steps_on_wire=int(steps[0]) if equal and (S == N or bool((p == p[0]).all())) else None,
        flat_weights=bool(np.allclose(p / sizes, p[0] / sizes[0], rtol=1e-12)),
    )
    return plan, Layout(problem.data.offsets, sizes, batch, per_epoch, steps, p)


def cohort_size(clients_per_round: int | float | None, N: int) -> int:
    if clients_per_round is None:
        return N
    if isinstance(clients_per_round, float | np.floating) and 0 < clients_per_round < 1:
        return max(1, round(clients_per_round * N))
    if isinstance(clients_per_round, bool) or not isinstance(clients_per_round, int | np.integer):
        allowed = "a number of clients, a fraction in (0, 1), or None for all"
        raise refused("clients_per_round", allowed, repr(clients_per_round), f"There are {N} clients.")
    if not 1 <= clients_per_round <= N:
        raise refused("clients_per_round", f"between 1 and {N}", clients_per_round, f"There are {N} clients.")
    return int(clients_per_round)


def batches_of(batch_size: int | float | None, sizes: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    """How a client's epoch is cut into batches: the rule, the largest batch and the number of batches, per client."""
    if batch_size is None:
        return "full", sizes, np.ones_like(sizes)
    smallest = int(sizes.argmin())
    if isinstance(batch_size, float | np.floating) and 0 < batch_size < 1:
        parts = math.ceil(min(1 / batch_size, 2**31) - 1e-9)  # 0.2 of the local data: 5 steps an epoch
        if parts > sizes[smallest]:
            raise CovaryError(
                f"batch_size={batch_size} cuts each client's data into {parts} batches, but client {smallest} has only "
                f"{sizes[smallest]} examples. Use a fraction of at least {1 / sizes[smallest]:.3g}, or a whole number."
            )
        return "parts", -(-sizes // parts), np.full_like(sizes, parts)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        allowed = "a number of examples, a fraction in (0, 1), or None for full batches"
        raise refused("batch_size", allowed, repr(batch_size), "The paper uses 0.2 of the local data.")
    if batch_size > sizes[smallest]:
        raise CovaryError(
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


def aggregation_weights(
    p: Any, fraction: float, together: bool, dtype: Any, part: Callable[[Any], Any] = lambda w: w
) -> Any:
    """What the uploads of a cohort count, given the p_i of its clients and the fraction |S| / N that they are.

    Each stands for N / |S| clients, so that the sum of p_i u_i over all clients is met in expectation. In an exchange
    that goes together the weights sum to one. `part` picks the weights that are returned, such as one device's.

    >>> aggregation_weights(np.array([0.2, 0.1]), 0.5, False, float)
    array([0.4, 0.2])
    >>> aggregation_weights(np.array([0.75, 0.25]), 0.5, True, float)
    array([0.75, 0.25])
    """
    w = (p / fraction).astype(dtype)
    return part(w) / w.sum() if together else part(w)
