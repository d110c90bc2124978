# pyright: reportMissingImports=false
"""The same rounds in PyTorch: the matrix products alone, client by client, and all clients in one batch."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from covary.bench.workloads import Workload
from covary.runs.machine import cores

ETA_L = 0.05


def fastest(work: Callable[[], Any], repeats: int, wait: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of several calls, after a warm-up call."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def layers(workload: Workload) -> list[tuple[int, int]]:
    """(inputs, outputs) of the dense layers."""
    if workload.model == "logistic":
        return [(workload.features, workload.classes)]
    return [(workload.features, workload.hidden), (workload.hidden, workload.classes)]


def floor(workload: Workload, repeats: int) -> float:
    """Only the matrix products of a round: the faster of one process per core and batched products."""
    return min(_products_by_processes(workload, repeats), _products_in_batches(workload, repeats, "cpu"))


def _products_by_processes(workload: Workload, repeats: int) -> float:
    context = multiprocessing.get_context("spawn")
    count = cores()
    barrier, results = context.Barrier(count), context.Queue()
    shares = [len(part) for part in np.array_split(np.arange(workload.cohort), count)]
    arguments = [(workload, share, repeats, barrier, results) for share in shares]
    processes = [context.Process(target=_products_of_one, args=one) for one in arguments]
    for process in processes:
        process.start()
    seconds = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return max(seconds)


def _products_of_one(workload: Workload, clients: int, repeats: int, barrier: Any, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    arrays = [
        (torch.rand(workload.batch, m), torch.rand(n, m), torch.rand(workload.batch, n)) for m, n in layers(workload)
    ]

    def work() -> None:
        for _ in range(clients * workload.steps):
            for depth, (inputs, weight, slope) in enumerate(arrays):
                torch.mm(inputs, weight.T)
                torch.mm(slope.T, inputs)
                if depth > 0:
                    torch.mm(slope, weight)

    results.put(fastest(work, repeats, barrier.wait))


def _products_in_batches(workload: Workload, repeats: int, device: str) -> float:
    import torch

    def some(*shape: int) -> Any:
        return torch.rand(workload.cohort, *shape, device=device)

    arrays = [(some(workload.batch, m), some(n, m), some(workload.batch, n)) for m, n in layers(workload)]

    def work() -> None:
        for _ in range(workload.steps):
            for depth, (inputs, weight, slope) in enumerate(arrays):
                torch.bmm(inputs, weight.transpose(1, 2))
                torch.bmm(slope.transpose(1, 2), inputs)
                if depth > 0:
                    torch.bmm(slope, weight)

    return fastest(work, repeats, _waiter(device))


def _waiter(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


class Clients:
    """The clients' data as float tensors, and a server with SCAFFOLD's control variates."""

    def __init__(self, workload: Workload, device: str):
        import torch

        self.torch, self.workload, self.device = torch, workload, device
        torch.set_float32_matmul_precision("high")  # TensorFloat-32 on a GPU, as in JAX
        self.x = torch.from_numpy(workload.x).to(device).float().div_(255)
        if workload.model == "cnn":
            side = int(workload.features**0.5)
            self.x = self.x.reshape(workload.n_clients, workload.size, 1, side, side)
        self.y = torch.from_numpy(workload.y).to(device).long()
        torch.manual_seed(0)
        self.model = module_of(workload).to(device)
        self.server = [p.detach().clone() for p in self.model.parameters()]
        self.c = [torch.zeros_like(p) for p in self.server]
        self.c_i = [torch.zeros((workload.n_clients, *p.shape), device=device) for p in self.server]
        self.rng = np.random.default_rng(0)

    def cohort(self) -> np.ndarray:
        return np.sort(self.rng.choice(self.workload.n_clients, self.workload.cohort, replace=False))

    def batches(self) -> Any:
        """The positions of one client's K batches, without replacement within an epoch."""
        w, torch = self.workload, self.torch
        epochs = -(-w.steps * w.batch // w.size)
        order = torch.cat([torch.randperm(w.size, device=self.device) for _ in range(epochs)])
        return order[: w.steps * w.batch].reshape(w.steps, w.batch)

    def commit(self, cohort: np.ndarray, dy: list[Any], new: list[Any]) -> None:
        """Steps (4) and (5) of SCAFFOLD, option II; `dy` and `new` have a leading axis over the cohort."""
        w = self.workload
        ids = self.torch.from_numpy(cohort).to(self.device)
        for k in range(len(self.server)):
            mean = (new[k] - self.c_i[k][ids]).mean(0)
            self.c_i[k][ids] = new[k]
            self.server[k] += dy[k].mean(0)
            self.c[k] += mean * (w.cohort / w.n_clients)


def module_of(workload: Workload) -> Any:
    """The workload's model as a module."""
    from torch import nn

    w = workload
    if w.model == "logistic":
        return nn.Linear(w.features, w.classes)
    if w.model == "mlp":
        return nn.Sequential(nn.Linear(w.features, w.hidden), nn.ReLU(), nn.Linear(w.hidden, w.classes))
    flat = w.features // 16 * 64
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, w.classes),
    )  # fmt: skip


def per_client_loop(workload: Workload, repeats: int, device: str = "cpu", compiled: bool = False) -> float:
    """The usual implementation: a Python loop over clients and steps with autograd and one model."""
    import torch

    all_clients = Clients(workload, device)
    model, loss = all_clients.model, torch.nn.functional.cross_entropy

    def slope(x: Any, y: Any) -> Any:
        return loss(model(x), y)

    if compiled:
        slope = torch.compile(slope)

    def one_round() -> None:
        cohort = all_clients.cohort()
        params = list(model.parameters())
        changes, controls = [], []
        for i in cohort:
            with torch.no_grad():
                for p, s in zip(params, all_clients.server, strict=True):
                    p.copy_(s)
            shift = [c - c_i[i] for c, c_i in zip(all_clients.c, all_clients.c_i, strict=True)]
            for batch in all_clients.batches():
                model.zero_grad()
                slope(all_clients.x[i, batch], all_clients.y[i, batch]).backward()
                with torch.no_grad():
                    for p, q in zip(params, shift, strict=True):
                        p -= ETA_L * (p.grad + q)
            with torch.no_grad():
                dy = [p - s for p, s in zip(params, all_clients.server, strict=True)]
                changes.append(dy)
                scale = workload.steps * ETA_L
                controls.append([-q - d / scale for q, d in zip(shift, dy, strict=True)])
        with torch.no_grad():
            stacked = [[torch.stack(leaf) for leaf in zip(*each, strict=True)] for each in (changes, controls)]
            all_clients.commit(cohort, *stacked)

    return fastest(one_round, repeats, _waiter(device))


def batched_clients(workload: Workload, repeats: int, device: str = "cpu") -> float:
    """The cohort as one batch of products with hand-written gradients: the fastest form with PyTorch's own kernels."""
    import torch

    all_clients = Clients(workload, device)
    S, n = workload.cohort, workload.batch

    def one_round() -> None:
        cohort = all_clients.cohort()
        ids = torch.from_numpy(cohort).to(device)
        start = [s.expand(S, *s.shape) for s in all_clients.server]
        y = [s.clone() for s in start]
        shift = [c - c_i[ids] for c, c_i in zip(all_clients.c, all_clients.c_i, strict=True)]
        order = torch.stack([all_clients.batches() for _ in cohort])
        for k in range(workload.steps):
            batch = order[:, k]
            inputs = [all_clients.x[ids[:, None], batch]]
            for depth in range(len(y) // 2):
                out = torch.baddbmm(y[2 * depth + 1][:, None], inputs[-1], y[2 * depth].transpose(1, 2))
                inputs.append(out.relu() if 2 * depth + 2 < len(y) else out)
            g = torch.softmax(inputs[-1], 2)
            g.scatter_add_(2, all_clients.y[ids[:, None], batch][:, :, None], -torch.ones(S, n, 1, device=device))
            g /= n
            for depth in reversed(range(len(y) // 2)):
                w, b = y[2 * depth], y[2 * depth + 1]
                back = torch.bmm(g, w) if depth > 0 else None
                w.add_(torch.baddbmm(shift[2 * depth], g.transpose(1, 2), inputs[depth]), alpha=-ETA_L)
                b.add_(g.sum(1) + shift[2 * depth + 1], alpha=-ETA_L)
                if back is not None:
                    g = back * (inputs[depth] > 0)
        dy = [new - old for new, old in zip(y, start, strict=True)]
        scale = workload.steps * ETA_L
        all_clients.commit(cohort, dy, [-q - d / scale for q, d in zip(shift, dy, strict=True)])

    with torch.no_grad():
        return fastest(one_round, repeats, _waiter(device))
