"""A Flax NNX network: `init` splits off its parameters, `loss` and `metrics` merge them with its graph.

Run it: python examples/flax_nnx.py

BatchNorm and dropout need buffers and a key: examples/flax_batch_norm.py. Anything that is not a Param, such as
dropout's counters, does not belong in `init`: covary rejects whole numbers there.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import covary as cv


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


class Digits:
    def __init__(self):
        self.graph, _ = nnx.split(Network(nnx.Rngs(0)))

    def init(self, key):
        return nnx.state(Network(nnx.Rngs(key)), nnx.Param)

    def loss(self, params, batch):
        x, y = batch
        scores = jax.nn.log_softmax(nnx.merge(self.graph, params)(x))
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    def metrics(self, params, batch):
        x, y = batch
        return {"accuracy": jnp.mean(nnx.merge(self.graph, params)(x).argmax(axis=1) == y)}


def main():
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)  # each client has one or two digits
    model = Digits()
    problem = cv.supervised(model, data, test)
    algorithm = cv.scaffold(eta_l=0.1)
    run = cv.simulate(algorithm, problem, rounds=80, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
    print(f"Test accuracy {run.history['accuracy'][-1]:.3f} after {run.rounds} rounds")
    network = nnx.merge(model.graph, run.params)  # the trained network, an ordinary Flax network
    print("The first test image is a", network(test[0][:1]).argmax())
    return {"scaffold": run}


if __name__ == "__main__":
    main()
