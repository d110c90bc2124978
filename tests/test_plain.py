"""The readable server: the compiled engine's numbers, and a breakpoint anywhere."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_logistic

import covary as cv

SIZES = [12, 8, 9, 15, 7]
RUNS = {
    "sampled, batches of so many examples": (cv.scaffold(0.1), {"clients_per_round": 3, "batch_size": 4}),
    "parts of the data, several epochs": (cv.fedavg(0.1), {"local_epochs": 2, "batch_size": 0.3}),
    "two exchanges": (cv.mime(0.1), {"clients_per_round": 2, "local_steps": 3, "batch_size": 5}),
    "clients weigh by examples": (cv.scaffold(0.1, option="I"), {"clients_per_round": 2, "weights": "examples"}),
    "a warm start": (cv.scaffold(0.1), {"clients_per_round": 2, "local_steps": 2, "warm_start": True}),
    "an average and pauses": (cv.feddyn(0.1, alpha=1.0), {"average": 0.1, "eval_every": 2, "local_steps": 2}),
    "a target": (cv.sgd(0.5), {"target": ("accuracy", 0.5)}),
}


@pytest.mark.parametrize("name", RUNS)
def test_debugging_gives_the_numbers_of_the_compiled_run(name):
    algorithm, settings = RUNS[name]
    problem = small_logistic(SIZES)
    settings = {"rounds": 5, "seed": 3, **settings}
    compiled, plain = (cv.simulate(algorithm, problem, **settings, debug=debug) for debug in (False, True))
    assert set(plain.history) == set(compiled.history)
    for column, values in compiled.history.items():
        rtol = 1e-6 if column == "accuracy" else 1e-9  # the model measures it in float32
        np.testing.assert_allclose(plain.history[column], values, rtol=rtol, atol=1e-12, err_msg=column)
    for field, own in zip(compiled.server._fields, plain.server, strict=True):
        np.testing.assert_allclose(own, getattr(compiled.server, field), rtol=1e-9, atol=1e-12)
    for field, own in zip(compiled.clients._fields, plain.clients, strict=True):
        np.testing.assert_allclose(own, getattr(compiled.clients, field), rtol=1e-9, atol=1e-12)
    assert (plain.reached, plain.diverged) == (compiled.reached, compiled.diverged)
    if compiled.average is not None:
        np.testing.assert_allclose(plain.average["w"], compiled.average["w"], rtol=1e-9)


def test_a_breakpoint_in_the_loss_sees_every_step_with_plain_numbers():
    seen = []

    class Looking:
        def init(self, key):
            return jnp.zeros(2)

        def loss(self, w, batch):
            value = jnp.mean((batch[0] @ w - batch[1]) ** 2)
            if not isinstance(value, jax.core.Tracer):
                seen.append((len(batch[1]), float(value)))
            return value

    rng = np.random.default_rng(0)
    data = cv.FederatedData.from_clients([(rng.normal(size=(n, 2)), rng.normal(size=n)) for n in (6, 8)])
    cv.simulate(cv.scaffold(0.1), cv.supervised(Looking(), data), 3, local_steps=5, batch_size=2, debug=True)
    assert sum(size == 2 for size, _ in seen) == 3 * 2 * 5  # rounds, clients, steps
    assert len({value for size, value in seen if size == 2}) == 3 * 2 * 5


def test_a_diverging_run_ends_at_its_last_good_state():
    problem = cv.lower_bound(G=1.0)
    with pytest.warns(cv.DivergenceWarning):
        compiled = cv.simulate(cv.fedavg(1e200), problem, 5, local_steps=2, x0=1.0)
    with pytest.warns(cv.DivergenceWarning):
        plain = cv.simulate(cv.fedavg(1e200), problem, 5, local_steps=2, x0=1.0, debug=True)
    assert plain.diverged == compiled.diverged
    np.testing.assert_array_equal(plain.x, compiled.x)


@pytest.mark.parametrize("option", [{"devices": 1}, {"store": "host"}, {"width": 1}, {"checkpoint": "here"}])
def test_options_that_the_plain_server_does_not_support_are_rejected(option):
    (name,) = option
    with pytest.raises(cv.CovaryError, match=f"{name} must be None with debug=True"):
        cv.simulate(cv.sgd(0.1), cv.lower_bound(G=1.0), 2, debug=True, **option)


def test_an_error_in_the_users_loss_is_raised_and_not_tried_again():
    """A TypeError of the model's own must not look like that of an algorithm that needs whole vectors."""

    class Fails:
        failed = False

        def init(self, key):
            return {"w": jnp.zeros(2)}

        def loss(self, params, batch):
            if not self.failed and any(frame.function == "work_of_client" for frame in inspect.stack()):
                self.failed = True
                raise TypeError("the model's own")
            return jnp.mean((batch @ params["w"]) ** 2)

    data = cv.FederatedData.from_clients([np.ones((3, 2)), np.ones((3, 2))])
    with pytest.raises(TypeError, match="the model's own"):
        cv.simulate(cv.scaffold(0.1), cv.supervised(Fails(), data), 2)


def test_a_run_that_diverges_at_once_has_an_empty_history():
    runs = []
    for debug in (True, False):
        with pytest.warns(cv.DivergenceWarning):
            runs.append(cv.simulate(cv.scaffold(1e200), cv.lower_bound(G=1.0), 3, local_steps=4, x0=1.0, debug=debug))
    for run in runs:
        assert (run.rounds, run.diverged, run.rounds_to("loss", 0.1)) == (0, 1, None)
        assert {name: (len(values), values.dtype) for name, values in run.history.items()} == {
            name: (0, values.dtype) for name, values in runs[1].history.items()
        }
