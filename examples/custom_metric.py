"""Your own metric as a target: balanced accuracy for a disease that one person in ten has.

Run it: python examples/custom_metric.py

A model that classifies everyone as healthy has an accuracy of 0.9 and a balanced accuracy of 0.5.
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
        return jnp.mean(jnp.where(y == 1, 9.0, 1.0) * wrong)  # an ill person has the weight of nine healthy ones

    def metrics(self, params, batch):
        x, y = batch
        said = x @ params["w"] + params["b"] > 0
        found = jnp.sum(said & (y == 1)) / jnp.sum(y == 1)
        spared = jnp.sum(~said & (y == 0)) / jnp.sum(y == 0)
        return {"accuracy": jnp.mean(said == y), "balanced_accuracy": (found + spared) / 2}


def people(rng, count, ill):
    y = (rng.random(count) < ill).astype(int)
    signs = np.arange(10) < 5  # half of the features differ in ill people
    return rng.normal(0, 1, (count, 10)) + y[:, None] * signs, y


def main():
    rng = np.random.default_rng(0)
    clients = [people(rng, 100, ill=0.02 if i % 5 else 0.4) for i in range(20)]  # every fifth client is a clinic
    problem = cv.supervised(Screening(), cv.FederatedData.from_clients(clients), people(rng, 2000, ill=0.1))
    run = cv.simulate(
        cv.scaffold(eta_l=0.03),
        problem,
        rounds=200,
        clients_per_round=4,
        local_epochs=5,
        batch_size=20,
        target=("balanced_accuracy", ">=", 0.86),  # also "<="; without it, the metric's name determines the direction
    )
    for round in range(run.rounds):
        accuracy, balanced = run.history["accuracy"][round], run.history["balanced_accuracy"][round]
        print(f"round {round + 1}  accuracy {accuracy:.3f}  balanced accuracy {balanced:.3f}")
    print("Reached in round", run.reached)
    return {"scaffold": run}


if __name__ == "__main__":
    main()
