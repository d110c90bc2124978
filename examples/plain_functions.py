"""A model without a library: plain functions, and a list of layers as parameters.

Run it: python examples/plain_functions.py

Eight stations measure one curve, each on its own interval. Together they learn the whole curve.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import covary as cv


def init(key):
    def layer(key, inputs, outputs):
        return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}

    first, second, third = jax.random.split(key, 3)
    return [layer(first, 1, 32), layer(second, 32, 32), layer(third, 32, 1)]


def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def loss(params, batch):
    x, y = batch
    return jnp.mean((predict(params, x) - y) ** 2)


def metrics(params, batch):
    return {"rmse": jnp.sqrt(loss(params, batch))}


def curve(x):
    return np.sin(2 * x[:, 0])


def main():
    rng = np.random.default_rng(0)
    places = [rng.uniform(low, low + 0.75, (40, 1)) for low in np.arange(-3, 3, 0.75)]
    data = cv.FederatedData.from_clients([(x, curve(x) + rng.normal(0, 0.1, len(x))) for x in places])
    everywhere = np.linspace(-3, 3, 200)[:, None]
    model, runs = SimpleNamespace(init=init, loss=loss, metrics=metrics), {}
    problem = cv.supervised(model, data, test=(everywhere, curve(everywhere)))
    for algorithm in (cv.fedavg(eta_l=0.03), cv.scaffold(eta_l=0.03)):
        run = cv.simulate(algorithm, problem, rounds=1000, clients_per_round=4, local_steps=10, batch_size=10)
        print(f"{algorithm.name:8}  error on the whole curve {run.history['rmse'][-1]:.3f}")
        runs[algorithm.name] = run
    return runs


if __name__ == "__main__":
    main()
