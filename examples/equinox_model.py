"""An Equinox network: `init` filters its arrays, `loss` and `metrics` combine them with the rest.

Run it: python examples/equinox_model.py

Filter by `eqx.is_inexact_array`, not `eqx.is_array`: whole numbers are not parameters, and covary rejects them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import covary as cv


def network(key):
    return eqx.nn.MLP(in_size=64, out_size=10, width_size=32, depth=1, key=key)


class Digits:
    def __init__(self):
        _, self.static = eqx.partition(network(jax.random.key(0)), eqx.is_inexact_array)

    def init(self, key):
        return eqx.filter(network(key), eqx.is_inexact_array)

    def scores(self, params, x):
        return jax.vmap(eqx.combine(params, self.static))(x)

    def loss(self, params, batch):
        x, y = batch
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(self.scores(params, x)), y[:, None], axis=1))

    def metrics(self, params, batch):
        x, y = batch
        return {"accuracy": jnp.mean(self.scores(params, x).argmax(axis=1) == y)}


def main():
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)  # each client has one or two digits
    model = Digits()
    problem = cv.supervised(model, data, test)
    algorithm = cv.scaffold(eta_l=0.3)
    run = cv.simulate(algorithm, problem, rounds=80, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
    print(f"Test accuracy {run.history['accuracy'][-1]:.3f} after {run.rounds} rounds")
    trained = eqx.combine(run.params, model.static)  # an ordinary Equinox network
    print("The first test image is a", trained(test[0][0]).argmax())
    return {"scaffold": run}


if __name__ == "__main__":
    main()
