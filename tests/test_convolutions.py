"""Convolutions in the order in which a CPU is fast are the same convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import covary as cv
from covary._engine.convolutions import fast_on_cpu

FORMS = {
    "2-D, channels last": (("NHWC", "HWIO", "NHWC"), (2, 6, 5, 4), (3, 2, 4, 3), {}),
    "2-D, channels first": (("NCHW", "OIHW", "NCHW"), (2, 4, 6, 5), (3, 4, 3, 2), {}),
    "1-D": (("NCH", "OIH", "NHC"), (2, 4, 6), (3, 4, 3), {}),
    "3-D": (("NDHWC", "DHWIO", "NCDHW"), (2, 4, 3, 5, 2), (2, 2, 2, 2, 3), {}),
    "strides": (("NHWC", "HWIO", "NHWC"), (2, 6, 5, 4), (3, 2, 4, 3), {"window_strides": (2, 3)}),
    "dilation": (
        ("NHWC", "HWIO", "NHWC"),
        (2, 6, 5, 4),
        (3, 2, 4, 3),
        {"rhs_dilation": (2, 1), "lhs_dilation": (1, 2), "padding": [(1, 2), (0, 1)]},
    ),
    "groups": (("NHWC", "HWIO", "NHWC"), (2, 6, 5, 4), (3, 2, 2, 6), {"feature_group_count": 2}),
    "batch groups": (("NHWC", "HWIO", "NHWC"), (4, 6, 5, 4), (3, 2, 4, 6), {"batch_group_count": 2}),
    "valid": (("NHWC", "HWIO", "CHWN"), (2, 6, 5, 4), (3, 2, 4, 3), {"padding": "VALID"}),
}


def orders(jaxpr):
    """The outer axes of every convolution's image, wherever it is in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn.params["dimension_numbers"].lhs_spec[:2]
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(value, "eqns"):
                yield from orders(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", ["nothing", "scan", "cond", "custom_jvp", "checkpoint", "vmap", "jit", "solve"])
def test_gradients_are_the_same_wherever_the_convolution_is(form, inside):
    axes, image_shape, kernel_shape, more = FORMS[form]
    rng = np.random.default_rng(0)
    image, kernel, table = (rng.normal(size=shape) for shape in (image_shape, kernel_shape, image_shape))
    settings = {"window_strides": (1,) * (len(image_shape) - 2), "padding": "SAME", **more}

    def convolved(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, dimension_numbers=axes, **settings)

    def of(image, kernel):
        if inside == "scan":
            start = jnp.zeros(jax.eval_shape(convolved, image, kernel).shape)
            return jax.lax.scan(lambda h, _: (jnp.tanh(h + convolved(image, kernel)), None), start, None, length=2)[0]
        if inside == "cond":
            return jax.lax.cond(kernel.sum() > -1e9, convolved, lambda *args: 0 * convolved(*args), image, kernel)
        if inside == "custom_jvp":
            return jax.nn.relu(convolved(image, kernel))
        if inside == "checkpoint":  # around a function with a constant
            constant = jnp.asarray(table)
            return jax.checkpoint(jax.jit(lambda image, kernel: convolved(image + constant, kernel)))(image, kernel)
        if inside == "jit":
            return jax.jit(convolved)(image, kernel)
        if inside == "solve":  # beside a solver, and inside one
            size = kernel.size

            def matrix(v):
                return 50 * v + jnp.sum(convolved(image, v.reshape(kernel.shape))) / size

            solved, _ = jax.scipy.sparse.linalg.cg(matrix, kernel.reshape(-1), maxiter=3)
            return convolved(image, kernel) * jnp.linalg.solve(3 * jnp.eye(size), solved).sum()
        if inside == "vmap":
            return jax.vmap(convolved)(jnp.stack([image, 2 * image]), jnp.stack([kernel, kernel + 1]))
        return convolved(image, kernel)

    slope = jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(of(*args))), argnums=(0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10),
        jax.jit(fast_on_cpu(slope))(image, kernel),
        slope(image, kernel),
    )
    found = set(orders(jax.make_jaxpr(fast_on_cpu(slope))(image, kernel).jaxpr))
    assert found == {(0, len(image_shape) - 1)}


class Images:
    """A network on images with channels first, as in PyTorch, and a metric of its own."""

    def init(self, key):
        return {"kernel": jax.random.normal(key, (3, 1, 3, 3)), "head": jnp.ones(3)}

    def output(self, params, x):
        return jax.nn.relu(jax.lax.conv(x, params["kernel"], (1, 1), "SAME")).mean(axis=(2, 3)) @ params["head"]

    def loss(self, params, batch):
        return jnp.mean((self.output(params, batch[0]) - batch[1]) ** 2)

    def metrics(self, params, batch):
        return {"error": jnp.abs(self.output(params, batch[0]) - batch[1])}


def test_a_run_is_that_of_the_plain_server():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 1, 5, 4)), rng.normal(size=n)) for n in (6, 9, 7)]
    problem = cv.supervised(Images(), cv.FederatedData.from_clients(clients))
    settings = {"rounds": 3, "clients_per_round": 2, "local_steps": 3, "batch_size": 4}
    run, plain = (cv.simulate(cv.scaffold(0.01), problem, **settings, debug=debug) for debug in (False, True))
    np.testing.assert_allclose(run.x, plain.x, rtol=1e-10)
    np.testing.assert_allclose(run.history["error"], plain.history["error"], rtol=1e-10)
