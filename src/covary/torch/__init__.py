"""PyTorch modules as they are: simulated, swept and diagnosed with covary's algorithms. It works without JAX.

>>> import torch, covary as cv, covary.torch as cvt
>>> module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
>>> loss = lambda module, batch: torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
>>> (x, y), test = cv.datasets.digits()
>>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
>>> problem = cvt.supervised(module, loss, data)
>>> run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=3, clients_per_round=5, batch_size=0.2)
>>> run.history["loss"].shape, type(run.model()).__name__
((3,), 'Sequential')
"""

from covary.torch.problem import Problem, supervised

__all__ = ["Problem", "supervised"]
