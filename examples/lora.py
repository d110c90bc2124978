"""LoRA: clients train small adapters on a frozen transformer; only the adapters travel and have control variates.

Run it: python examples/lora.py

The transformer reads a digit as eight rows of pixels, and is trained on images that everyone may see. The clients hold
others, mirrored, which it reads badly.
"""

import jax
import jax.numpy as jnp

import covary as cv

SHAPES = {"embed": (8, 32), "query": (32, 32), "key": (32, 32), "value": (32, 32), "up": (32, 64), "down": (64, 32)}
SHAPES |= {"head": (32, 10)}


class Transformer:
    pretrained = None

    def init(self, key):
        keys = jax.random.split(key, (len(SHAPES), 2))
        normal = {name: jax.random.normal(k[0], shape) for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)}
        base = self.pretrained or {name: value / len(value) ** 0.5 for name, value in normal.items()}
        a = {name: jax.random.normal(k[1], (len(w), 2)) for k, (name, w) in zip(keys, base.items(), strict=True)}
        lora = {name: {"a": a[name] / len(w) ** 0.5, "b": jnp.zeros((2, w.shape[1]))} for name, w in base.items()}
        return {"base": base, "lora": lora}

    def scores(self, params, x):
        w = {name: params["base"][name] + adapter["a"] @ adapter["b"] for name, adapter in params["lora"].items()}
        h = x.reshape(-1, 8, 8) @ w["embed"] + jnp.sin(jnp.arange(8.0)[:, None] * jnp.arange(32) / 32)
        h = h + jax.nn.softmax(h @ w["query"] @ (h @ w["key"]).mT / 32**0.5) @ (h @ w["value"])
        return (h + jax.nn.gelu(h @ w["up"]) @ w["down"]).mean(axis=1) @ w["head"]

    def loss(self, params, batch):
        x, y = batch
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(self.scores(params, x)), y[:, None], axis=1))

    def metrics(self, params, batch):
        return {"accuracy": jnp.mean(self.scores(params, batch[0]).argmax(axis=1) == batch[1])}


def main():
    (x, y), test = cv.datasets.digits()
    model, half, mirrored = Transformer(), len(y) // 2, lambda x: x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)
    public = cv.supervised(model, cv.FederatedData.from_clients([(x[:half], y[:half])]))
    model.pretrained = cv.simulate(cv.fedavg(0.05), public, rounds=40, local_epochs=1, batch_size=32).params["base"]
    data = cv.partition.by_similarity(mirrored(x[half:]), y[half:], n_clients=10, similarity=0.0)
    problem = cv.supervised(model, data, (mirrored(test[0]), test[1]), trainable=lambda path: path.startswith("lora/"))
    runs = {}
    for algorithm in (cv.fedavg(0.05), cv.scaffold(0.05)):
        run = cv.simulate(algorithm, problem, 100, clients_per_round=5, local_epochs=2, batch_size=0.2)
        print(f"{algorithm.name}: accuracy {run.history['accuracy'][-1]:.3f}, with {run.x.size} numbers a client")
        runs[algorithm.name] = run
    return runs


if __name__ == "__main__":
    main()
