"""Who does a cohort's work: one worker after the other, one per core, or several clients at once."""

from __future__ import annotations

import contextlib
import queue
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from covary import trees
from covary.algorithm import Exchange
from covary.checks import whole
from covary.draws import Draw
from covary.errors import EagerWarning, refused
from covary.running.plan import Layout, Plan
from covary.runs import machine
from covary.torch.examples import Cut, Examples, Rows, moved
from covary.torch.graphs import Recorder
from covary.torch.module import any_kernels, uncompiled, unwrapped
from covary.torch.problem import Problem
from covary.torch.seeds import seeded
from covary.torch.together import Together
from covary.torch.work import Slope, Worker

# Below these numbers of floating-point operations, the overhead of a call dominates a local step.
SMALL_STEP, SMALL_ON_GPU = 2e6, 2e9
LARGE_STEP = 1e8  # on a CPU, what keeps all cores busy
HUGE_STEP = 5e9  # on a CPU, what all cores share as well as a cohort, in less memory


class Way(NamedTuple):
    """How a cohort's work is done."""

    workers: tuple[Worker, ...]  # one per thread
    threads: int  # of PyTorch in each
    width: int  # clients at once; 1 is one after the other
    recorded: bool  # steps are CUDA graphs


class Part(NamedTuple):
    """What one or several clients return, with a leading axis over them."""

    up: Any
    client: Any
    drift: torch.Tensor


def choose_way(
    problem: Problem,
    examples: Examples,
    plan: Plan,
    layout: Layout,
    precision: str | None,
    devices: int | None,
    width: int | None,
    microbatch: int | None,
) -> Way:
    """The way that the user asked for, else the fastest by rules.

    On a CPU, every core has a copy of the module and takes clients one after the other, because small products gain
    little from several cores. On a GPU, steps are recorded as CUDA graphs. Modules with small steps take all clients
    of the cohort at once, if these take the same steps and nothing in the module is random or has averaged buffers.
    """
    network, on_gpu = problem.network, problem.network.device.type == "cuda"
    compiled = uncompiled(problem.module) is not problem.module or unwrapped(problem.loss) is not problem.loss
    seeds_steps = problem.draws or not isinstance(examples, Rows)
    worker = Worker(network.copied(), problem.loss, precision, microbatch, seeds_steps)
    if devices is not None and whole("devices", devices, 1) > 1 and on_gpu:
        fix = "A cohort of a PyTorch module runs on the GPU that the module is on."
        raise refused("devices", "1 for a module on a GPU", devices, fix)
    asked = None if width is None else min(whole("width", width, 1), plan.cohort)
    flops = operations(problem, examples, plan, layout)
    convolves = any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in network.own.modules())
    small = flops < (SMALL_ON_GPU if on_gpu and not convolves else SMALL_STEP)
    if plan.cohort > 1 and (small if asked is None else asked > 1):
        other = compiled or seeds_steps or problem.data.streamed or microbatch is not None
        obstacle = _obstacle(problem, examples, plan, worker, other)
        if obstacle and asked is not None:
            raise refused("width", f"1 here, because {obstacle}", width, "Leave it out.")
        if not obstacle:
            together = asked or plan.cohort
            return Way((worker,), _threads(flops * together), together, on_gpu)
    if on_gpu and problem.draws:
        reason = "it draws random numbers, as dropout does"
        warnings.warn(EagerWarning(f"The module's steps are not recorded as CUDA graphs: {reason}."), stacklevel=4)
    if on_gpu or compiled or seeds_steps or (devices is None and flops >= HUGE_STEP):
        return Way((worker,), _threads(flops), 1, on_gpu and not problem.draws)
    most = min(machine.cores() if devices is None else devices, plan.cohort)
    others = [Worker(network.copied(), problem.loss, precision, microbatch, seeds_steps) for _ in range(most - 1)]
    return Way((worker, *others), max(1, _threads(flops) // most), 1, False)


def _threads(flops: float) -> int:
    """Of PyTorch in one worker. For small steps one: several would wait for each other longer than they compute."""
    return torch.get_num_threads() if flops >= LARGE_STEP else 1


def operations(problem: Problem, examples: Examples, plan: Plan, layout: Layout) -> float:
    """Floating-point operations of one local step, those of products and convolutions alone."""
    counter, i = FlopCounterMode(display=False), int(np.argmax(layout.batch))
    cut = Cut(plan.local.batching, int(layout.batch[i]), int(layout.per_epoch[i]), 1)
    network = problem.network.copied()
    with seeded(0, network.device), any_kernels(), counter:
        batch = next(iter(examples.batches(i, cut, Draw(0, 0, 0, i))))
        unwrapped(problem.loss)(network.own, moved(batch, network.device))  # not all gradients can be counted
    return 3.0 * counter.get_total_flops()  # with the gradients by the parameters and by each layer's input


def _obstacle(problem: Problem, examples: Examples, plan: Plan, worker: Worker, other: bool) -> str:
    """Why several clients cannot be computed at once; empty if they can."""
    local = plan.local
    if other:
        return "the module is compiled or draws at random, its data is read as it is needed, or batches are divided"
    if problem.network.averaged:
        return "the module has buffers that are averaged"
    if local.steps is None or local.ragged_batches or local.ragged_sizes:
        return "clients differ in size, or batches do"
    assert isinstance(examples, Rows)
    try:
        few = examples.at(np.arange(2))
        together = Together(worker, examples)
        x = worker.network.x
        pairs = trees.map(lambda leaf: torch.stack([leaf, leaf]), moved(few, worker.network.device))
        with any_kernels(), warnings.catch_warnings():  # what vmap takes apart is not faster
            warnings.filterwarnings("error", "There is a performance drop")
            both = torch.vmap(lambda y, batch: together.slope(lambda: batch)(y))(torch.stack([x, x]), pairs)
            alone = worker.gradient([few])
        if not torch.allclose(both[0], alone, rtol=0, atol=0.01 * float(alone.abs().max())):
            return "the module has its parameters in another place too, where torch.func does not replace them"
    except Exception as error:  # whatever the module does that vmap cannot follow
        return f"torch.vmap cannot follow the module or its loss ({str(error).strip().splitlines()[0]})"
    return ""


class Crew:
    """The workers of a run."""

    def __init__(self, way: Way, examples: Examples, plan: Plan, layout: Layout):
        self.way, self.examples, self.plan, self.layout = way, examples, plan, layout
        # by the number of clients and the exchange's identity: a run has the same exchanges all along
        self.recorders: dict[tuple[int, int], Recorder] = {}
        self.kept: list[Exchange] = []  # so that no other exchange gets the identity of one of these
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in way.workers:
            self._idle.put(worker)
        # each thread of the pool has so many threads for PyTorch's operations
        self._pool = ThreadPoolExecutor(len(way.workers), "covary", torch.set_num_threads, (way.threads,))

    def exchange(
        self, exchange: Exchange, down: Any, clients: Any, draws: Sequence[Draw], measured: bool
    ) -> Iterator[Part]:
        """What a cohort does in one exchange, in its order. The clients' states are rows."""
        if self.way.width > 1:
            with threads_of_pytorch(self.way.threads):
                yield from self._together(exchange, down, clients, draws, measured)
            return

        def work(worker: Worker, k: int) -> Part:
            return self._one(worker, exchange, down, trees.map(lambda rows: rows[k], clients), draws[k], measured)

        yield from self.map(work, range(len(draws)))

    def _cut(self, i: int) -> Cut:
        layout = self.layout
        return Cut(self.plan.local.batching, int(layout.batch[i]), int(layout.per_epoch[i]), int(layout.steps[i]))

    def _one(self, worker: Worker, exchange: Exchange, down: Any, client: Any, draw: Draw, measured: bool) -> Part:
        run, recorder = exchange, None
        if self.way.recorded and exchange.step is not None:
            step = exchange.step

            def on_batch(local: Any, down: Any, client: Any, batch: Any) -> Any:
                return step(local, down, client, Slope(worker, lambda: [batch], None))

            recorder = self._recorder(1, exchange, on_batch)
            run = replace(exchange, step=_replayed(recorder, worker))
        done = worker.work(
            run, down, client, self.examples, draw.client, self._cut(draw.client), draw, measured=measured
        )
        copy = recorder is not None  # what a replay has written is overwritten by the next client
        dtype, device = worker.network.dtype, worker.network.device

        def row(leaf: Any) -> torch.Tensor:  # a field may be a plain number
            whole = torch.as_tensor(leaf, dtype=dtype, device=device)[None]
            return whole.clone() if copy else whole

        return Part(*(trees.map(row, part) for part in done))

    def _together(
        self, exchange: Exchange, down: Any, clients: Any, draws: Sequence[Draw], measured: bool
    ) -> Iterator[Part]:
        (worker,), width = self.way.workers, self.way.width
        assert isinstance(self.examples, Rows)
        together = Together(worker, self.examples)
        for low in range(0, len(draws), width):
            some = draws[low : low + width]
            rows = trees.map(lambda rows, low=low: rows[low : low + width], clients)
            cut, ids = self._cut(some[0].client), [draw.client for draw in some]
            steps_by = partial(self._recorder, len(some)) if self.way.recorded else None
            up, new, drift = together.work(exchange, down, rows, ids, cut, some, measured=measured, steps_by=steps_by)
            if steps_by is not None:  # what a replay has written is overwritten by the next one
                up, new, drift = trees.map(lambda leaf: torch.as_tensor(leaf).clone(), (up, new, drift))
            yield Part(up, new, drift if isinstance(drift, torch.Tensor) and drift.ndim else torch.zeros(len(some)))

    def map(self, work: Callable[[Worker, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """`work(worker, item)` for each item, in their order, on all workers."""
        with threads_of_pytorch(self.way.threads):
            if len(self.way.workers) == 1:
                yield from (work(self.way.workers[0], item) for item in items)
                return

            def by_next(item: Any) -> Any:
                worker = self._idle.get()
                try:
                    return work(worker, item)
                finally:
                    self._idle.put(worker)

            waiting = [self._pool.submit(by_next, item) for item in items]
            try:
                for each in waiting:
                    yield each.result()
            finally:  # an error or Ctrl-C: what has begun ends before the workers are used again
                for each in waiting:
                    each.cancel()
                wait(waiting)

    def _recorder(self, clients: int, exchange: Exchange, step: Callable[[Any, Any, Any, Any], Any]) -> Recorder:
        """The recorder of an exchange's steps, of so many clients at once; its first step is the one it records."""
        if (clients, id(exchange)) not in self.recorders:
            self.kept.append(exchange)
            self.recorders[clients, id(exchange)] = Recorder(step)
        return self.recorders[clients, id(exchange)]


def _replayed(recorder: Recorder, worker: Worker) -> Any:
    """A step that the recorder computes, on the batch of its slope."""

    def step(local: Any, down: Any, client: Any, slope: Slope) -> Any:
        (batch,) = slope.batches()
        return recorder(local, down, client, moved(batch, worker.network.device), slope.seed)

    return step


@contextlib.contextmanager
def threads_of_pytorch(count: int) -> Iterator[None]:
    """So many threads for PyTorch's operations inside. The libraries it calls have one number for all threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
