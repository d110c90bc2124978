"""What the runtimes share runs in a process that cannot import JAX."""

import os
import subprocess
import sys

CODE = """
import sys
sys.modules["jax"] = None  # every import of it fails

import importlib, pkgutil, tempfile
import numpy as np
import covary as cv
from covary import client, draws, running, runs, trees

for room in (running, runs):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
for name in ("algorithm", "checks", "errors", "plain", "simulate", "sweep", "targets", "trackers", "training"):
    importlib.import_module(f"covary.{name}")
assert draws.cohort(0, 1, 10, 3).tolist() == [3, 4, 5]

# The algorithms, and the plain loop
x = np.array([4.0, 1.0])
for factory in (cv.sgd, cv.fedavg, cv.fedprox, cv.scaffold, cv.dane, cv.vrl_sgd, cv.feddyn, cv.mime):
    algorithm = factory(0.1)
    server, state = algorithm.init_server(x), algorithm.init_client(x)
    for exchange in algorithm.trips(2):
        down, up, state = client.dry_run(exchange, server, state)
        client.client_loop(exchange, down, state, lambda y: y, [lambda y: y] * 2)
        server = exchange.aggregate(server, up, 0.5)
    assert np.isfinite(server.x).all(), algorithm.name
clients = [cv.plain.full_batch(lambda y, a=a: y - a, K=5) for a in (0.0, 4.0)]
server, _ = cv.plain.train(cv.scaffold(eta_l=0.1), clients, np.zeros(1), cohorts=[[0, 1]] * 50)
assert abs(server.x[0] - 2) < 1e-6

# The data
(x, y), test = cv.datasets.digits()
data = cv.partition.by_similarity(x, y, n_clients=4, similarity=0.1)
assert data.label_counts().shape == (4, 10)
again = cv.FederatedData.from_clients([{"x": data.client(i)[0], "y": [1] * len(data.client(i)[1])} for i in range(4)])
assert (again.examples["x"] == data.examples[0]).all()
folder = tempfile.mkdtemp() + "/digits"
cv.FederatedData.write(folder, (data.client(i) for i in range(4)))
for stream in (None, True, False):
    opened = cv.FederatedData.open(folder, stream)
    assert trees.structure(opened.examples) == trees.structure(data.examples)
    assert (opened.client(2)[0] == data.client(2)[0]).all()
assert cv.FederatedData.open(folder, True).gather(np.array([1]), 5 + int(data.sizes.max()), 0)[1].shape[0] == 1

# The public functions, which reject what is no problem before they import a runtime
for call in (lambda: cv.simulate(cv.sgd(0.1), 5, 1), lambda: cv.sweep(cv.sgd, 5, {"eta_l": [1.0]}, rounds=1)):
    try:
        call()
    except cv.CovaryError as error:
        assert str(error).startswith("problem must be a Problem; got int. Build one"), error
    else:
        raise AssertionError("not rejected")

# A PyTorch module, diagnosed
import torch
import covary.torch as cvt

torch.set_num_threads(1)
clients = [(torch.full((4, 1), 1.0 + i), torch.full((4, 1), float(i))) for i in range(3)]
problem = cvt.supervised(torch.nn.Linear(1, 1), lambda m, batch: ((m(batch[0]) - batch[1]) ** 2).mean(), clients)
found = cv.diagnose(problem, trial_rounds=3, local_steps=2, trial_seeds=1, algorithms=())
assert found.algorithm in ("scaffold", "fedavg") and found.beta > found.delta > 0
try:
    cv.quadratics([[[1.0]]], [[1.0]])
except ImportError as error:
    print(error)
assert sys.modules["jax"] is None
"""


def test_the_shared_half_needs_no_jax():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    assert "None in sys.modules" in done.stdout  # a problem in JAX cannot be built, so JAX was out of reach all along
