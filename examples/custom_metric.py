"""A metric of your own, and a run that stops when it is good enough: balanced accuracy where one case in ten is ill.

Run it: python examples/custom_metric.py

A model that calls everyone well is right nine times in ten, and its balanced accuracy is 0.5.
"""

import jax
import jax.numpy as jnp
import numpy as np

import covary as cv


class Screening:
    def init(self, key):
        return {"w": jnp.zeros(10), "b": jnp.zeros(())}

    def loss(self, params, batch):
        x, y = batch
        wrong = jax.nn.softplus((1 - 2 * y) * (x @ params["w"] + params["b"]))
        return jnp.mean(jnp.where(y == 1, 9.0, 1.0) * wrong)  # one who is ill counts as much as nine who are well

    def metrics(self, params, batch):
        x, y = batch
        said = x @ params["w"] + params["b"] > 0
        found = jnp.sum(said & (y == 1)) / jnp.sum(y == 1)
        spared = jnp.sum(~said & (y == 0)) / jnp.sum(y == 0)
        return {"accuracy": jnp.mean(said == y), "balanced_accuracy": (found + spared) / 2}


def people(rng, count, ill):
    y = (rng.random(count) < ill).astype(int)
    signs = np.arange(10) < 5  # half of what is measured differs in the ill
    return rng.normal(0, 1, (count, 10)) + y[:, None] * signs, y


def main():
    rng = np.random.default_rng(0)
    clients = [people(rng, 100, ill=0.02 if i % 5 else 0.4) for i in range(20)]  # every fifth is a clinic
    problem = cv.supervised(Screening(), cv.FederatedData.from_clients(clients), people(rng, 2000, ill=0.1))
    run = cv.simulate(
        cv.scaffold(eta_l=0.03),
        problem,
        rounds=200,
        clients_per_round=4,
        local_epochs=5,
        batch_size=20,
        target=("balanced_accuracy", ">=", 0.86),  # also "<="; without it the name decides: an error is to fall
    )
    for round in range(run.rounds):
        accuracy, balanced = run.history["accuracy"][round], run.history["balanced_accuracy"][round]
        print(f"round {round + 1}  accuracy {accuracy:.3f}  balanced accuracy {balanced:.3f}")
    print("Reached in round", run.reached)
    return {"scaffold": run}


if __name__ == "__main__":
    main()
