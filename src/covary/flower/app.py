"""The server's app: a Flower ServerApp around an algorithm and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from covary import algorithms
from covary.algorithm import Algorithm
from covary.errors import InvalidInput, refused
from covary.flower.server import serve
from covary.flower.settings import checked_settings, overridden


def server_app(
    algorithm: Algorithm,
    model: Any,
    *,
    rounds: int,
    evaluate: Callable[[np.ndarray], Mapping[str, float]] | None = None,
    **settings: Any,
) -> ServerApp:
    """A Flower ServerApp that runs an algorithm among the nodes that are connected.

    `flwr run . here --run-config 'rounds=20 eta-l=0.05'` overrides these arguments. It can set every setting below
    and every number of the algorithm, under its name with dashes, if the app's `pyproject.toml` lists it.

    Args:
        algorithm: from `covary.scaffold(...)` and its like.
        model: where to start: a covary model (its `init`), a PyTorch module, parameters, or a function without
            arguments that builds one of these (PyTorch's generator is seeded with `seed` for it).
        rounds: communication rounds, those of the warm start included.
        evaluate: `evaluate(x) -> dict of numbers`, measured by the server itself at the flat vector x.
        settings: `clients_per_round local_steps local_epochs batch_size seed warm_start weights eval_every` as in
            `covary.simulate`; `target` as a text, "accuracy >= 0.9"; and, with their defaults, `min_clients` (nodes to
            wait for before the first round, 2), `min_replies` (a round with fewer is abandoned and tried again, 1),
            `round_timeout` (seconds, 600), `patience` (seconds without progress before the server gives up, 600),
            `forget_after` (rounds of absence after which a node counts as gone for good, never), `largest` (uploads
            with larger numbers are rejected, 1e6), `screen` (uploads with more than so many times the median norm are
            not counted, 5; None for no such bound), `checkpoint` (a folder), `resume` (continue from it, False).

    >>> import covary as cv
    >>> from covary.flower import server_app
    >>> model = cv.models.logistic_regression(64, 10)
    >>> app = server_app(cv.scaffold(eta_l=0.3), model, rounds=20, local_steps=10, checkpoint="digits")
    """
    chosen = checked_settings(rounds, settings)
    if not isinstance(algorithm, Algorithm):
        raise refused("algorithm", "an Algorithm", type(algorithm).__name__, "Try covary.scaffold(eta_l=0.1).")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        wanted = {str(name).replace("-", "_"): value for name, value in context.run_config.items()}
        serve(grid, _with_numbers(algorithm, wanted), model, overridden(chosen, wanted), evaluate)

    return app


def _with_numbers(algorithm: Algorithm, wanted: Mapping[str, Any]) -> Algorithm:
    changed = {name: float(wanted[name]) for name in algorithm.numbers if name in wanted}
    if not changed or algorithm.recipe is None:
        return algorithm
    factory = getattr(algorithms, algorithm.recipe[0].__name__, None)
    if getattr(factory, "__wrapped__", None) is not algorithm.recipe[0]:
        raise InvalidInput(
            f"{', '.join(changed)} cannot be set from the run configuration: the algorithm is your own. Set it in code."
        )
    assert factory is not None
    return factory(**{**algorithm.numbers, **changed}, **dict(algorithm.recipe[1]))
