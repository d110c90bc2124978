"""The one local loop of the package, in its two forms: compiled (JAX) and plain (any framework).

Both drive the same `Exchange` functions. Nothing else in covary loops over local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from covary.algorithm import Exchange, Gradient

Guard = Callable[[Any, int], Any]
"""(vector, which) -> the vector that may leave the client instead, for example clipped and with noise. `which` is 0 for
a change of the model and 1 for a gradient. The same call gives the same vector."""


def client_work(
    exchange: Exchange,
    down: Any,
    client: Any,
    full_grad: Gradient,
    grad_of_step: Callable[[Any], Gradient],
    K: Any,
    max_steps: int,
    *,
    measured: bool = True,
    guard: Guard | None = None,
) -> tuple[Any, Any, Any]:
    """What one client does in one exchange, as a traceable function.

    `grad_of_step(k)` is the gradient bound to the minibatch of step k. K is the number of steps this client takes: the
    int `max_steps`, or a traced number up to it where clients differ. Returns the upload, the client's new state and
    its drift, the mean over k = 1..K of ‖y_{i,k} - x‖² (the paper's E_r, of this client); 0 where it is not measured.
    """
    import jax  # here, because the plain loop needs none
    import jax.numpy as jnp

    local = exchange.start(down, client, full_grad)
    step = exchange.step
    zero = jnp.zeros((), jax.tree.leaves(down.x)[0].dtype)

    def distance(local: Any) -> Any:
        return (local.y - down.x) @ (local.y - down.x) if measured and hasattr(local, "y") else zero

    if step is None:
        drift = distance(local)
    else:

        def body(carry: Any, k: Any) -> tuple[Any, None]:
            local, drift = carry
            moved = step(local, down, client, grad_of_step(k))
            total = drift + distance(moved)
            if isinstance(K, int):
                return (moved, total), None
            return jax.tree.map(lambda new, old: jnp.where(k < K, new, old), (moved, total), carry), None

        (local, total), _ = jax.lax.scan(body, (local, zero), jnp.arange(max_steps))
        drift = total / K
    local, full_grad = _outgoing(local, down, full_grad, guard)
    up, client = exchange.finish(local, down, client, full_grad, K)
    return up, client, drift


def client_loop(
    exchange: Exchange,
    down: Any,
    client: Any,
    full_grad: Gradient,
    grads: Iterable[Gradient],
    guard: Guard | None = None,
    *,
    measured: bool = True,
) -> tuple[Any, Any, Any]:
    """The same work as a plain loop over the steps' gradient functions: for NumPy, PyTorch, or a debugger.

    Vectors may have leading axes, over clients that take their steps at the same time.

    >>> import numpy as np, covary as cv
    >>> algorithm, x = cv.scaffold(eta_l=0.5), np.array([4.0])
    >>> server, client = algorithm.init_server(x), algorithm.init_client(x)
    >>> (exchange,) = algorithm.exchanges
    >>> up, client, drift = client_loop(exchange, exchange.broadcast(server), client, lambda y: y, [lambda y: y] * 2)
    >>> up.dy, client.c_i  # y: 4, 2, 1; the mean of the gradients 4 and 2 is 3
    (array([-3.]), array([3.]))
    >>> float(drift)  # the mean of (2 - 4)² and (1 - 4)²
    6.5
    """

    def distance(local: Any) -> Any:
        if not measured or not hasattr(local, "y"):
            return 0.0
        moved = local.y - down.x
        return (moved * moved).sum(-1)

    local = exchange.start(down, client, full_grad)
    K, total = 0, 0.0
    if exchange.step is None:
        total = distance(local)
    else:
        for grad in grads:
            local = exchange.step(local, down, client, grad)
            K, total = K + 1, total + distance(local)
    local, full_grad = _outgoing(local, down, full_grad, guard)
    up, client = exchange.finish(local, down, client, full_grad, K)
    return up, client, total / max(K, 1)


def dry_run(exchange: Exchange, server: Any, client: Any) -> tuple[Any, Any, Any]:
    """An exchange's download and upload, and the client's new state, with two steps along a made-up gradient.

    They show the form of the messages and what an algorithm computes. States may be traced.

    >>> import numpy as np, covary as cv
    >>> algorithm, x = cv.scaffold(eta_l=0.5), np.zeros(3)
    >>> down, up, client = dry_run(algorithm.exchanges[0], algorithm.init_server(x), algorithm.init_client(x))
    >>> down._fields, up._fields, client._fields
    (('x', 'c'), ('dy', 'dc'), ('c_i',))
    """
    down = exchange.broadcast(server)
    return down, *dry_work(exchange, down, client)


def dry_work(exchange: Exchange, down: Any, client: Any) -> tuple[Any, Any]:
    """A client's upload and new state, with two steps along a made-up gradient."""

    def grad(y: Any) -> Any:
        return 3 * y

    return client_loop(exchange, down, client, grad, [grad, grad], measured=False)[:2]


def _outgoing(local: Any, down: Any, full_grad: Gradient, guard: Guard | None) -> tuple[Any, Gradient]:
    """The local state and the gradient that `finish` gets, after the guard."""
    if guard is None:
        return local, full_grad
    if hasattr(local, "y"):
        local = local._replace(y=down.x + guard(local.y - down.x, 0))
    return local, lambda y: guard(full_grad(y), 1)
