"""What fits into memory: gradients, losses and metrics in parts, and the estimate of how large a part may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_logistic

import covary as cv
from covary._engine import memory, resident
from covary._engine.evaluate import evaluation_of
from covary._engine.local import in_parts
from covary.errors import InvalidInput

SIZES = [12, 8, 9, 15, 7]
ALGORITHMS = [cv.scaffold(0.1, option="I"), cv.scaffold(0.1), cv.mime(0.1), cv.dane(0.1)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("batch_size", [None, 0.3, 5])
def test_microbatches_give_the_numbers_of_whole_batches(algorithm, batch_size):
    runs = [
        cv.simulate(algorithm, small_logistic(SIZES), 3, local_steps=3, batch_size=batch_size, microbatch=microbatch)
        for microbatch in (None, 2)
    ]
    np.testing.assert_allclose(runs[1].x, runs[0].x, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 12, 13])
def test_a_mean_from_parts_is_the_mean(n):
    values, weights = np.random.default_rng(0).normal(size=(2, n))

    def of(rows, weights):
        return {"mean": rows.mean() if weights is None else weights @ rows}

    for at_once in range(1, n + 2):
        assert in_parts(of, values, None, at_once)["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert in_parts(of, values, weights, at_once)["mean"] == pytest.approx(weights @ values, rel=1e-12)


class Wide:
    """A network whose hidden layer takes 40 kB an example in float64, and metrics of every kind."""

    def init(self, key):
        return {"w": 0.1 * jax.random.normal(key, (3, 5_000)), "v": jnp.zeros(5_000)}

    def output(self, params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def loss(self, params, batch):
        return jnp.mean((self.output(params, batch[0]) - batch[1]) ** 2)

    def metrics(self, params, batch):
        output, y = self.output(params, batch[0]), batch[1]
        return {
            "absolute_error": jnp.abs(output - y),
            "positive": output > 0,
            "rmse": jnp.sqrt(self.loss(params, batch)),
            "median": jnp.median(output),
            "recall": jnp.sum((output > 0) & (y > 0)) / jnp.sum(y > 0),
            "one": jnp.ones(()),
        }


def wide(n=400):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (n // 4, 3)), rng.normal(size=n // 4)) for i in range(4)]
    return cv.supervised(Wide(), cv.FederatedData.from_clients(clients))


@pytest.mark.parametrize("devices", [1, 3])
def test_every_metric_is_right_with_little_memory(devices, monkeypatch):
    histories = []
    for available in (2**40, 2**23):
        monkeypatch.setattr(memory, "device_memory", lambda available=available: available)
        problem = wide()
        run = cv.simulate(cv.scaffold(1e-5, option="I"), problem, 2, local_steps=2, devices=devices)
        histories.append(run.history)
    evaluation = evaluation_of(problem, ("loss", *problem.metric_names), lambda x: x)
    assert max(evaluation.at_once, evaluation.tested_at_once) < 100
    for name in ("loss", *problem.metric_names):
        np.testing.assert_allclose(histories[1][name], histories[0][name], rtol=1e-9, err_msg=name)
    output = Wide().output(run.params, problem.data.examples[0])
    assert histories[1]["positive"][-1] == np.mean(output > 0)


def test_an_accuracy_of_one_is_one_from_many_parts(monkeypatch):
    class Right:
        def init(self, key):
            return jnp.ones(1, jnp.float32)

        def loss(self, w, batch):
            return jnp.mean(w**2) + 0 * batch.mean()

        def metrics(self, w, batch):
            return {"accuracy": jnp.tile(batch[:, None] * w, 50).sum(axis=1) >= 0}

    data = cv.FederatedData.from_clients([np.zeros(196_608, np.float32)])
    monkeypatch.setattr(memory, "device_memory", lambda: 2**16)
    run = cv.simulate(cv.sgd(0.1), cv.supervised(Right(), data), 3, target=("accuracy", 1.0))
    assert run.reached == 1


def test_with_little_memory_a_run_needs_little(monkeypatch):
    """XLA's own count of what a compiled gradient over all data needs beside its arguments and results."""
    problem, needed = wide(), {}
    params = problem.init(jax.random.key(0))
    for available in (2**40, 2**25):
        monkeypatch.setattr(memory, "device_memory", lambda available=available: available)
        at_once = memory.rows_that_fit(memory.gradient_of(problem.loss), problem, 400)

        def gradient(params, batch, at_once=at_once):
            return in_parts(lambda rows, _: jax.grad(problem.loss)(params, rows), batch, None, at_once)

        compiled = jax.jit(gradient).lower(params, problem.data.examples).compile()
        needed[available] = compiled.memory_analysis().temp_size_in_bytes
    assert needed[2**25] < 2**25 < 2**24 + needed[2**40]


def test_what_a_loss_draws_is_counted():
    class Noisy(Wide):
        def loss(self, params, batch, *, key):
            w = params["w"] if key is None else params["w"] * jax.random.normal(key, (3, 5_000))
            return Wide().loss({**params, "w": w}, batch)

        metrics = None

    data = wide().data
    plain, noisy = (
        memory.rows_that_fit(memory.gradient_of(problem.loss), problem, 10**9)
        for problem in (wide(), cv.supervised(Noisy(), data))
    )
    assert noisy < plain / 2


def test_more_clients_at_once_leave_less_room_for_each():
    problem = wide()
    one, ten = (memory.rows_that_fit(memory.value_of(problem.loss), problem, 10**9, copies) for copies in (1, 10))
    assert one // 32 <= ten <= one // 8


def test_a_batch_that_cannot_be_divided_is_refused():
    class Centred:
        def init(self, key):
            return jnp.ones(3)

        def loss(self, w, batch):
            z = batch[0] @ w
            return jnp.mean(((z - z.mean()) - batch[1]) ** 2)

    rng = np.random.default_rng(0)
    data = cv.FederatedData.from_clients([(rng.normal(size=(6, 3)), rng.normal(size=6)) for _ in range(2)])
    problem = cv.supervised(Centred(), data)
    with pytest.raises(InvalidInput, match="microbatch must be None; got 2"):
        cv.simulate(cv.fedavg(0.1), problem, 1, microbatch=2)
    for wrong in (0, 1.5, "2"):
        with pytest.raises(InvalidInput, match="microbatch must be"):
            cv.simulate(cv.fedavg(0.1), small_logistic(SIZES), 1, microbatch=wrong)


def test_a_run_out_of_memory_goes_on_with_fewer_examples_at_once(monkeypatch):
    problem, tried = wide(), []
    whole = cv.simulate(cv.scaffold(1e-5, option="I"), problem, 3, local_steps=2)

    def compiled(program):
        def rounds(*given):
            tried.append((program.local.at_once, program.evaluation.at_once))
            if tried[-1][0] is None or tried[-1][0] > 20:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return rounds_of(program)(*given)

        return rounds

    rounds_of = resident.compiled
    monkeypatch.setattr(resident, "compiled", compiled)
    run = cv.simulate(cv.scaffold(1e-5, option="I"), problem, 3, local_steps=2)
    assert tried[:4] == [(None, 400), (50, 200), (25, 100), (12, 50)]
    np.testing.assert_allclose(run.x, whole.x, rtol=1e-9, atol=1e-14)
    for name in ("loss", *problem.metric_names):
        np.testing.assert_allclose(run.history[name], whole.history[name], rtol=1e-9, err_msg=name)


def test_a_step_that_does_not_fit_at_all_says_what_to_change(monkeypatch):
    def compiled(program):
        def rounds(*given):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        return rounds

    monkeypatch.setattr(resident, "compiled", compiled)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as error:
        cv.simulate(cv.fedavg(0.1), small_logistic(SIZES), 1)
    assert "microbatch=1" in "".join(error.value.__notes__)
