"""A Flax NNX network with BatchNorm and dropout: statistics are buffers, and dropout draws from a key.

Run it: python examples/flax_batch_norm.py

Buffers are averaged over the cohort, and control variates never correct them. All batches must have the same size.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import covary as cv


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x, key=None):
        h = nnx.relu(self.norm(self.hidden(x)))
        return self.out(h if key is None else self.dropout(h, rngs=key))


class Digits:
    def __init__(self):
        self.graph, _, _ = nnx.split(Network(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def init(self, key):
        return nnx.state(Network(nnx.Rngs(key)), nnx.Param)

    def init_buffers(self, key):
        return nnx.state(Network(nnx.Rngs(key)), nnx.BatchStat)

    def loss(self, params, batch, *, key, buffers):
        network = nnx.merge(self.graph, params, buffers, copy=True)  # a copy, as a call changes the statistics
        scores = jax.nn.log_softmax(network(batch[0], key))
        return -jnp.mean(jnp.take_along_axis(scores, batch[1][:, None], axis=1)), nnx.state(network, nnx.BatchStat)

    def metrics(self, params, batch, *, buffers):
        network = nnx.merge(self.graph, params, buffers)
        network.eval()
        return {"accuracy": jnp.mean(network(batch[0]).argmax(axis=1) == batch[1])}


def main():
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x[:1400], y[:1400], n_clients=20, similarity=0.2)
    problem = cv.supervised(Digits(), data, test)
    settings = {"clients_per_round": 0.2, "local_epochs": 5, "batch_size": 0.2}
    run = cv.simulate(cv.scaffold(eta_l=0.05), problem, rounds=80, **settings)
    print(f"Test accuracy {run.history['accuracy'][-1]:.3f} after {run.rounds} rounds")
    return {"scaffold": run}


if __name__ == "__main__":
    main()
