"""From a request to a job: every check that needs the problem, and all that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from covary import trees
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import InvalidInput, refused
from covary.running.buffers import with_model
from covary.running.job import measured_by, reject_numbers_beyond, warm_start_cohorts
from covary.running.plan import Layout, LocalPlan, Plan, plan_local_work, plan_rounds
from covary.running.store import chosen_store, store_folder
from covary.runs import machine
from covary.targets import Target
from covary.torch.crew import Way, choose_way
from covary.torch.examples import Examples, Loaders, Rows
from covary.torch.problem import Problem
from covary.training import Training


class Job(NamedTuple):
    """A request that has passed every check."""

    algorithm: Algorithm  # with the module's buffers
    problem: Problem
    training: Training
    plan: Plan
    layout: Layout  # (N,) in each field
    p: np.ndarray  # (N,): the clients' weights
    starts: list[np.ndarray]  # x^0, one per seed
    visits: list[np.ndarray]  # the cohorts of the warm start
    store: str  # "device", "host", "disk" or a folder
    target: Target | None
    names: tuple[str, ...]  # of what every round measures
    examples: Examples  # on the module's device, if they fit there
    way: Way  # how a cohort's work is done


def prepare(
    algorithm: Algorithm,
    problem: Problem,
    training: Training,
    *,
    seeds: Sequence[int],
    x0: Any,
    measure_loss: bool = True,
    store: str | Path | None = None,
    resumable: bool = False,
    devices: int | None = None,
    width: int | None = None,
    microbatch: int | None = None,
    members: int = 1,
) -> Job:
    """Check a request against its problem, and lay out what a run needs."""
    algorithm = with_model(algorithm, problem)
    plan, layout, p = plan_rounds(training, algorithm, problem.examples.sizes, _local_work(problem, training))
    _reject_batches_of_one(problem, plan, layout)
    visits = warm_start_cohorts(algorithm, plan, training)
    measured = measured_by(problem, training, measure_loss)
    starts = [problem.start(x0, seed)[0] for seed in seeds]
    reject_numbers_beyond(algorithm, starts[0].dtype)
    device = problem.network.device
    if training.precision is not None and device.type == "cpu":
        fix = 'Leave precision out, or use a GPU: module.to("cuda").'
        raise refused("precision", "None for a module on a CPU", repr(training.precision), fix)
    if microbatch is not None:
        whole("microbatch", microbatch, 1)
        if problem.network.averaged:
            fix = "A batch can only be divided if its loss is the mean of its examples' own losses, without buffers."
            raise refused("microbatch", "None", microbatch, fix)
    examples = problem.examples
    if isinstance(examples, Rows):
        examples = _near(examples, problem, device)
    return Job(
        algorithm=algorithm,
        problem=problem,
        training=training,
        plan=plan,
        layout=layout,
        p=p,
        starts=starts,
        visits=visits,
        store=_store(store, algorithm, plan, starts[0], problem, resumable, members * len(seeds)),
        target=measured.target,
        names=("loss", *measured.names) if measured.passes else measured.names,
        examples=examples,
        way=choose_way(problem, examples, plan, layout, training.precision, devices, width, microbatch),
    )


def _local_work(problem: Problem, training: Training) -> tuple[LocalPlan, Layout]:
    """Every client's batches and steps. A loader has batches of its own."""
    examples = problem.examples
    if not isinstance(examples, Loaders):
        return plan_local_work(training.local, examples.sizes)
    if training.batch_size is not None:
        fix = "Leave it out, or pass the loaders' data sets instead of the loaders."
        raise refused("batch_size", "None for loaders, which have batches of their own", training.batch_size, fix)
    per_epoch = examples.per_epoch
    plan, layout = plan_local_work(training.local, examples.sizes)
    if training.local_steps is None:
        steps = per_epoch * (1 if training.local_epochs is None else training.local_epochs)
    else:
        steps = layout.steps
    same = int(steps[0]) if (steps == steps[0]).all() else None
    batch = -(-examples.sizes // per_epoch)
    plan = replace(
        plan, batching="loader", steps=same, max_steps=int(steps.max()), max_batch=int(batch.max()), ragged_batches=True
    )
    return plan, Layout(examples.sizes, batch, per_epoch, steps)


def _reject_batches_of_one(problem: Problem, plan: Plan, layout: Layout) -> None:
    """Reject batches of one example for BatchNorm, which cannot normalise them."""
    norms = [part for part in problem.network.own.modules() if isinstance(part, _BatchNorm) and part.training]
    if not norms or plan.local.batching == "loader":
        return
    smallest = layout.batch if plan.local.batching == "full" else layout.size // layout.per_epoch
    if plan.local.batching == "rows":
        rest = layout.size % layout.batch
        smallest = np.where(rest > 0, rest, layout.batch)
    i = int(np.argmin(smallest))
    if smallest[i] == 1:
        raise InvalidInput(
            f"Client {i} has {layout.size[i]} examples, so one batch has one, which "
            "BatchNorm cannot normalise. Choose another batch_size, or use GroupNorm or LayerNorm."
        )


def _near(rows: Rows, problem: Problem, device: torch.device) -> Rows:
    """The examples on a GPU, if they take at most a quarter of its memory."""
    if device.type == "cpu" or problem.data.streamed or rows.nbytes > torch.cuda.mem_get_info(device)[1] / 4:
        return rows
    return rows.to(device)


def _store(
    store: str | Path | None,
    algorithm: Algorithm,
    plan: Plan,
    x: np.ndarray,
    problem: Problem,
    resumable: bool,
    members: int,
) -> str:
    """Where client states live: the user's choice, else the first place with enough room."""
    rows = members * plan.n_clients * len(trees.leaves(algorithm.init_client(x))) * x.nbytes
    room = machine.host_memory() / 4
    if problem.network.device.type == "cuda":
        room = torch.cuda.mem_get_info(problem.network.device)[1] / 4
    return store_folder(chosen_store(store, rows, room, problem.data.streamed), resumable)


def reject_debugging(problem: Problem) -> None:
    """PyTorch's runtime is plain Python itself."""
    raise InvalidInput(
        "debug=True is for JAX models. A PyTorch module already runs in plain Python: set a breakpoint in its loss, "
        "and devices=1 keeps all clients in one thread."
    )
