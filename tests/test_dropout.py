"""A loss with a key: the same draws in every mode, independent ones everywhere else."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import covary as cv
from covary.errors import InvalidInput

SIZES = [12, 8, 9, 15, 7]


class Dropout:
    """A regression with half of its features left out at random, for each example anew."""

    def init(self, key):
        return jnp.zeros(6)

    def loss(self, w, batch, *, key):
        x, y = batch
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
        return jnp.mean((x @ w - y) ** 2)


def problem(model=None, sizes=SIZES):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (n, 6)), rng.normal(i, 1, n)) for i, n in enumerate(sizes)]
    return cv.supervised(model or Dropout(), cv.FederatedData.from_clients(clients))


@pytest.mark.parametrize(
    ("algorithm", "batch_size"),
    [(cv.scaffold(0.01), 0.3), (cv.scaffold(0.01, option="I"), None), (cv.mime(0.01), 4)],
    ids=str,
)
def test_every_mode_draws_the_same(algorithm, batch_size, tmp_path):
    settings = {"rounds": 3, "clients_per_round": 2, "local_epochs": 2, "batch_size": batch_size}
    run = cv.simulate(algorithm, problem(), **settings, seed=5)
    for mode in ({"debug": True}, {"microbatch": 3}, {"width": 1}, {"devices": 1}, {"store": tmp_path / "states"}):
        other = cv.simulate(algorithm, problem(), **settings, **mode, seed=5)
        np.testing.assert_allclose(other.x, run.x, rtol=1e-10, err_msg=str(mode))
    swept = cv.sweep(lambda eta_l: algorithm, problem(), {"eta_l": [0.01]}, seeds=[5], measure_loss=True, **settings)
    np.testing.assert_allclose(swept.curves["loss"][0, 0], run.history["loss"], rtol=1e-10)
    another = cv.simulate(algorithm, problem(), **settings, seed=6)
    assert np.abs(another.x - run.x).max() > 1e-6


def test_draws_differ_between_examples_steps_clients_and_rounds():
    seen = []

    class Looking(Dropout):
        def loss(self, w, batch, *, key):
            if key is None:
                return 0.0 * w.sum()
            draw = jax.random.uniform(key)
            jax.debug.callback(lambda value: seen.append(float(value)), draw)
            return draw * w.sum()

    cv.simulate(cv.fedavg(0.01), problem(Looking(), [4, 4, 4]), 2, local_steps=3, batch_size=2, eval_every=2)
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 2 * 3 * 3 * 2  # rounds, clients, steps, examples


def test_what_is_measured_has_no_noise():
    run = cv.simulate(cv.scaffold(0.01), problem(), 3, local_steps=2)
    f = np.mean([np.mean((x @ run.x - y) ** 2) for x, y in map(problem().data.client, range(len(SIZES)))])
    assert run.history["loss"][-1] == pytest.approx(f, rel=1e-10)


def test_a_loss_that_cannot_do_without_its_key_is_told_so():
    class Always(Dropout):
        def loss(self, w, batch, *, key):
            return jax.random.uniform(key) * w.sum()

    with pytest.raises(TypeError) as error:
        problem(Always())
    assert "key is None where the loss is measured" in "".join(error.value.__notes__)


def test_dropout_without_a_key_is_explained():
    class Flaxen(Dropout):
        def loss(self, w, batch):
            raise ValueError('Dropout needs PRNG for "dropout"')

    with pytest.raises(ValueError, match="PRNG") as error:
        problem(Flaxen())
    assert "loss(params, batch, *, key)" in "".join(error.value.__notes__)


def test_a_loss_with_a_key_may_not_mix_examples():
    class Centred(Dropout):
        def loss(self, w, batch, *, key):
            x, y = batch
            return jnp.mean(((x - x.mean(axis=0)) @ w - y) ** 2)

    with pytest.raises(InvalidInput, match="takes a key"):
        cv.simulate(cv.fedavg(0.1), problem(Centred(), [6, 6]), 1)


def test_a_key_with_another_meaning_is_not_taken():
    class Column(Dropout):
        def loss(self, w, batch, *, key=0):
            return jnp.mean((batch[key] @ w - batch[1]) ** 2)

    run = cv.simulate(cv.fedavg(0.01), problem(Column()), 2)
    assert run.history["loss"][-1] < run.history["loss"][0]

    def scaled(w, batch, *, key):
        return jax.random.uniform(key) * Column().loss(w, batch)

    model = SimpleNamespace(init=Dropout().init, loss=functools.partial(scaled, key=jax.random.key(0)))
    slow = cv.simulate(cv.fedavg(0.01), problem(model), 2)
    np.testing.assert_allclose(slow.x, cv.simulate(cv.fedavg(0.01), problem(model), 2, seed=1).x, rtol=1e-12)
