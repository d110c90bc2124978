"""Convolutions: with their axes in the order in which XLA's CPU compiler is fast, and how many kernels they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def fast_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its convolutions in that order, if it runs on a CPU. It must not be differentiated any more.

    Inside a loop, XLA gives a convolution to the CPU's fast kernels only if batch and channels are its outer axes. A
    gradient's convolutions have other orders, whatever the model's own is, and would take twenty times as long.

    >>> def convolved(image, kernel):
    ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
    >>> image, kernel = jnp.arange(16.0).reshape(1, 1, 4, 4), jnp.arange(9.0).reshape(1, 1, 3, 3)
    >>> bool((fast_on_cpu(convolved)(image, kernel) == convolved(image, kernel)).all())
    True
    """

    def rewritten(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        call = _evaluated if _convolves(program.jaxpr) else core.jaxpr_as_fun
        return jax.tree.unflatten(jax.tree.structure(shapes), call(program)(*jax.tree.leaves(args)))

    return rewritten if jax.default_backend() == "cpu" else function


def _evaluated(program: Any) -> Callable[..., list[Any]]:
    """A program, operation by operation, with its convolutions reordered."""

    def evaluate(*args: Any) -> list[Any]:
        jaxpr = program.jaxpr
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            values = [v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
            known |= zip(eqn.outvars, _result(eqn, values), strict=True)
        return [v.val if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars]

    return evaluate


def _result(eqn: Any, values: list[Any]) -> Any:
    primitive, params = eqn.primitive, eqn.params
    if primitive.name == "conv_general_dilated":
        return [_convolution(*values, **params)]
    if any(map(_convolves, programs_in(params))):
        if primitive.name in ("custom_jvp_call", "custom_vjp_call"):  # the derivative has been taken
            return _evaluated(params["call_jaxpr"])(*values)
        if "prevent_cse" in params:  # jax.checkpoint: computed anew, not taken from the forward pass
            if params["differentiated"] and params["prevent_cse"]:
                values = jax.lax.optimization_barrier(values)
            return _evaluated(core.ClosedJaxpr(params["jaxpr"], ()))(*values)
        params = {name: _reordered(value) for name, value in params.items()}
    given = primitive.get_bind_params(params)  # before JAX 0.10, functions and params
    functions, params = given if isinstance(given, tuple) else ((), given)
    with eqn.ctx.manager:
        result = primitive.bind(*functions, *values, **params)
    return result if primitive.multiple_results else [result]


def _reordered(parameter: Any) -> Any:
    """A parameter of an operation; the programs in it, such as a loop's body, with their convolutions reordered."""
    if isinstance(parameter, core.ClosedJaxpr) and _convolves(parameter.jaxpr):
        return jax.make_jaxpr(_evaluated(parameter))(*parameter.in_avals)
    if isinstance(parameter, tuple) and any(isinstance(part, core.ClosedJaxpr) for part in parameter):
        parts = map(_reordered, parameter)
        return type(parameter)(*parts) if hasattr(parameter, "_fields") else tuple(parts)
    return parameter


def _convolution(
    image: Any, kernel: Any, *, dimension_numbers: Any, lhs_dilation: Any, rhs_dilation: Any, **params: Any
) -> Any:
    of_image, of_kernel, of_result = dimension_numbers
    n = len(of_image) - 2  # spatial axes
    outer = (0, n + 1, *range(1, n + 1))
    result = jax.lax.conv_general_dilated(
        jnp.transpose(image, (of_image[0], *of_image[2:], of_image[1])),
        jnp.transpose(kernel, (*of_kernel[2:], of_kernel[1], of_kernel[0])),
        dimension_numbers=jax.lax.ConvDimensionNumbers(outer, (n + 1, n, *range(n)), outer),
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        **params,
    )
    return jnp.transpose(result, tuple(np.argsort((of_result[0], *of_result[2:], of_result[1]))))


def _convolves(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "conv_general_dilated" or any(map(_convolves, programs_in(eqn.params)))
        for eqn in jaxpr.eqns
    )


def kernels(jaxpr: Any) -> int:
    """The number of separate kernels in a program's convolutions, which grows if clients with kernels of their own are
    computed at once.

    >>> image, kernel = jnp.ones((1, 1, 8)), jnp.ones((1, 1, 3))
    >>> def convolved(image, kernel):
    ...     return jax.lax.conv(image, kernel, (1,), "SAME")
    >>> kernels(jax.make_jaxpr(convolved)(image, kernel).jaxpr)
    1
    >>> kernels(jax.make_jaxpr(jax.vmap(convolved, (0, None)))(image[None].repeat(2, 0), kernel).jaxpr)
    1
    >>> kernels(jax.make_jaxpr(jax.vmap(convolved))(image[None].repeat(2, 0), kernel[None].repeat(2, 0)).jaxpr)
    2
    """
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            found += eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        found += sum(kernels(inner) for inner in programs_in(eqn.params))
    return found


def programs_in(parameters: dict[str, Any]) -> list[Any]:
    """The programs that an operation consists of: a loop's body, the branches of a condition."""
    found = jax.tree.leaves(list(parameters.values()), is_leaf=lambda value: hasattr(value, "eqns"))
    return [getattr(value, "jaxpr", value) for value in found if hasattr(value, "eqns")]
