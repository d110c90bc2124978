"""JAX clients: a node's work by the same compiled functions as in simulation."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp

from covary._engine.devices import Place, on_devices
from covary._engine.evaluate import evaluation_of, measure
from covary._engine.local import LocalProgram, folded, work_of_client
from covary._engine.memory import fitted
from covary.algorithm import Algorithm, rebuild
from covary.client import Guard
from covary.errors import refused
from covary.flower.jax_model import form_of_params
from covary.flower.limits import Limits, smallest_batch_of
from covary.flower.nodes import FACTORIES, Node, Owner, Privacy, build_app, checked_privacy
from covary.flower.task import Which, Work
from covary.model_functions import by_path
from covary.problem import Problem
from covary.running.buffers import Down, exchanging
from covary.running.plan import Layout, LocalPlan, batches_of, plan_local_work
from covary.training import LocalWork


def client_app(
    problem: Problem | Callable[[Context], Problem],
    *,
    state: str | Path | None = None,
    clip: float | None = None,
    noise: float = 0.0,
    evaluate: bool | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    factories: Iterable[Callable[..., Algorithm]] = (),
) -> ClientApp:
    """A Flower ClientApp for a JAX model: any algorithm that the server names, on this node's own data.

    Args:
        problem: this node's data and model, with one client in it, or a function of Flower's `Context` that builds
            it; `context.node_config` has the node's configuration.
        state: the folder for this node's control variate; by default the node's setting `state`, as in
            `covary node --state /var/lib/covary`.
        clip: the largest norm of a change of the model (and of a gradient) that leaves this node.
        noise: Gaussian noise on top, as a multiple of `clip`, in every coordinate. Both are applied before anything
            is kept or sent, so that what this node keeps is what the server counted.
        evaluate: whether this node reports its loss and metrics at a model that the server sends. By default it does,
            unless it clips: from enough exact losses a server can work out exact gradients.
        limits: what the owner of this node allows a server to ask for: `covary.flower.Limits`.
        factories: algorithms of your own that the server may name, besides covary's.

    >>> import numpy as np, covary as cv
    >>> from covary.flower import client_app
    >>> def problem(context):  # this hospital's table
    ...     rng = np.random.default_rng(context.node_config["partition-id"])
    ...     x = rng.normal(size=(50, 3))
    ...     data = cv.FederatedData.from_clients([(x, (x[:, 0] > 0).astype(int))])
    ...     return cv.supervised(cv.models.logistic_regression(3, 2), data)
    >>> app = client_app(problem)
    """

    def node(context: Context) -> Node:
        return JaxNode(problem if isinstance(problem, Problem) else problem(context))

    return build_app(node, Owner(state, checked_privacy(clip, noise, evaluate), limits, (*FACTORIES, *factories)))


class JaxNode:
    """The one client of a `Problem`."""

    def __init__(self, problem: Problem):
        if not isinstance(problem, Problem):
            raise refused("problem", "a Problem", type(problem).__name__, "Build one with covary.supervised.")
        if problem.n_clients != 1:
            fix = "A node has its own data only: FederatedData.from_clients([(x, y)])."
            raise refused("problem", "of one client", f"{problem.n_clients} clients", fix)
        self.problem = problem
        self.size = int(problem.data.sizes[0])
        self.x, self.unravel = problem.start(None, 0)
        self.buffers: dict[str, np.ndarray] = by_path(problem.buffers_of(problem.buffers))
        self.form = form_of_params(jax.eval_shape(problem.init, jax.random.key(0)), problem.frozen, self.buffers)
        self.place = Place((jax.devices()[0],), width=1)

    def steps(self, training: dict[str, Any]) -> int:
        return self._plan(training)[0].max_steps

    def batches(self, batch_size: Any) -> tuple[int, int]:
        return smallest_batch_of(batch_size, self.size), int(batches_of(batch_size, np.array([self.size]))[2][0])

    def _plan(self, training: Mapping[str, Any]) -> tuple[LocalPlan, Layout]:
        plan, layout = plan_local_work(LocalWork(**training), self.problem.data.sizes)
        self.problem.refuse_other_losses(one_by_one=plan.ragged_batches)
        return plan, Layout(*(int(field[0]) for field in layout))

    def work(
        self, work: Work, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]:
        plan, layout = self._plan(work.training)
        program = fitted(LocalProgram(plan, self.problem.loss.holding(), self.unravel), self.problem)
        run = _compiled_work(program, work.algorithm.recipe or work.algorithm, layout, work.which, privacy)
        noise = np.array([secrets.randbits(32), secrets.randbits(32)], np.uint32)  # a secret of this node
        seed = np.asarray(jax.random.key_data(jax.random.key(work.draw.seed)))
        examples, _, frozen = on_devices(self.problem, self.place)
        if buffers:
            down = Down(down, self._vector(buffers))
        draw = (seed, *work.draw[1:])
        done = run(dict(work.algorithm.numbers), down, client, draw, noise, examples, frozen)
        up, client, drift = jax.tree.map(np.asarray, done)
        if buffers:
            up, vector = up
            buffers = by_path(self.problem.buffers_of(vector))
        return up, client, buffers, float(drift)

    def _vector(self, buffers: dict[str, np.ndarray]) -> np.ndarray:
        """Buffers in the order of the model's own, as a vector of the model's type."""
        return np.concatenate([np.ravel(buffers[name]) for name in self.buffers]).astype(self.x.dtype)

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]:
        problem = self.problem
        names = ("loss", *problem.metric_names)
        evaluation = evaluation_of(problem, names, self.unravel)
        examples, tested_on, frozen = on_devices(problem, self.place)
        held = frozen, self._vector(buffers) if buffers else None
        values = _compiled_measure(evaluation, self.place, x, examples, None, tested_on, held)
        tested = self.size if problem.test is None else len(jax.tree.leaves(problem.test)[0])
        return {name: float(value) for name, value in values.items()}, tested


_compiled_measure = jax.jit(measure, static_argnums=(0, 1))


@functools.lru_cache(maxsize=64)
def _compiled_work(
    program: LocalProgram, recipe: Any, layout: Layout, which: Which, privacy: Privacy
) -> Callable[..., tuple[Any, Any, Any]]:
    """`(numbers, down, client, draw, noise, examples, frozen) -> up, client, drift`: a node's work, compiled."""

    def work(numbers: Any, down: Any, client: Any, draw: Any, noise: Any, examples: Any, frozen: Any) -> Any:
        algorithm = rebuild(recipe, numbers)
        exchange = which.of(algorithm if program.loss.to_buffers is None else exchanging(algorithm))
        seed, r, number, i = draw
        guard = _guard(privacy, jax.random.wrap_key_data(noise)) if privacy.used else None

        def fetch(positions: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.at[positions].get(mode="promise_in_bounds"), examples)

        client_key = folded(jax.random.wrap_key_data(seed), r, number, i)
        return work_of_client(program.holding(frozen), exchange, down, client, fetch, layout, client_key, guard=guard)

    return jax.jit(work)


def _guard(privacy: Privacy, key: Any) -> Guard:
    clip, noise, _ = privacy
    assert clip is not None

    def guard(v: Any, which: int) -> Any:
        v = v * (clip / jnp.maximum(jnp.linalg.norm(v), clip))
        return v + noise * clip * jax.random.normal(jax.random.fold_in(key, which), v.shape, v.dtype)

    return guard
