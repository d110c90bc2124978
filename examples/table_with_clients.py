"""A table with a client column and missing values: each hospital is a client.

Run it: python examples/table_with_clients.py

The table is synthetic; read yours with `pd.read_csv("visits.csv")`.
"""

import io

import numpy as np
import pandas as pd

import covary as cv


def synthetic_csv():
    rng = np.random.default_rng(0)
    parts = []
    for name, visits, age in [("Aarau", 300, 45), ("Bern", 120, 60), ("Chur", 60, 75), ("Davos", 30, 80)]:
        part = pd.DataFrame({"hospital": name, "age": rng.normal(age, 8, visits)})
        part["pressure"] = rng.normal(100 + part["age"] / 2, 10)
        part["cholesterol"] = rng.normal(220, 40, visits)
        risk = 0.1 * (part["age"] - age) + 0.05 * (part["pressure"] - 130) + 0.01 * (part["cholesterol"] - 220)
        part["ill"] = rng.random(visits) < 1 / (1 + np.exp(-risk))
        part.loc[rng.random(visits) < 0.2, "cholesterol"] = np.nan  # not measured at every visit
        parts.append(part)
    return pd.concat(parts).sample(frac=1, random_state=0).to_csv(index=False)


def main():
    table = pd.read_csv(io.StringIO(synthetic_csv()))
    features = table[["age", "pressure", "cholesterol"]]
    features = (features - features.mean()) / features.std()
    features["unknown"] = table["cholesterol"].isna()
    features = features.fillna(0.0)  # 0 is the mean after standardising; "unknown" marks the filled values
    x, y = features.to_numpy(float), table["ill"].to_numpy(int)

    data = cv.partition.by_group(x, y, table["hospital"])
    problem = cv.supervised(cv.models.logistic_regression(x.shape[1], 2), data)
    print(data)
    runs = {}
    for algorithm in (cv.fedavg(eta_l=0.5), cv.scaffold(eta_l=0.5)):
        run = cv.simulate(algorithm, problem, rounds=60, local_epochs=5, batch_size=0.2)
        print(f"{algorithm.name:8}  mean loss of the hospitals {run.history['loss'][-1]:.4f}")
        runs[algorithm.name] = run
    return runs


if __name__ == "__main__":
    main()
