"""The workloads as PyTorch modules in `simulate`, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from covary.algorithms import scaffold
from covary.bench.clock import Clock
from covary.bench.deep import GPT, DeepWorkload
from covary.bench.deep_torch import TorchGPT, TorchResNet
from covary.bench.torch_rivals import ETA_L, module_of
from covary.bench.workloads import Workload
from covary.data.federated import FederatedData
from covary.simulate import simulate
from covary.torch import Problem, supervised


def module_round(workload: Workload, rounds: int, device: str) -> float:
    """Seconds per round of SCAFFOLD without evaluation."""
    images = workload.x.reshape(-1, workload.features).astype(np.float32) / 255
    if workload.model == "cnn":
        side = int(workload.features**0.5)
        images = images.reshape(-1, 1, side, side)
    sizes = [workload.size] * workload.n_clients
    data = FederatedData((images, workload.y.reshape(-1)), sizes)
    torch.set_float32_matmul_precision("high")
    problem = supervised(module_of(workload).to(device), _cross_entropy, data)
    clock = Clock()
    simulate(scaffold(eta_l=ETA_L), problem, rounds, eval_every=10**6, log=clock.tick, **_settings(workload))
    return clock.fastest_round()


def module_deep_round(workload: DeepWorkload, rounds: int, compiled: bool = False, **how: Any) -> dict[str, Any]:
    """Seconds until the first round of SCAFFOLD is done, and seconds of the fastest later one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TensorFloat-32 on a GPU, as in the hand-written loop
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    clock = Clock()
    problem = _deep_problem(workload, device, compiled)
    simulate(scaffold(eta_l=ETA_L), problem, rounds, eval_every=10**6, log=clock.tick, **_settings(workload), **how)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"first": clock.first(), "seconds": clock.fastest_round(), "peak": peak}


def _settings(workload: Workload | DeepWorkload) -> dict[str, Any]:
    return {"clients_per_round": workload.cohort, "local_steps": workload.steps, "batch_size": workload.batch}


def _deep_problem(workload: DeepWorkload, device: str, compiled: bool) -> Problem:
    is_gpt = isinstance(workload.model, GPT)
    module = (TorchGPT if is_gpt else TorchResNet)(workload.model).to(device)
    loss: Callable[[Any, Any], Any] = _next_token if is_gpt else _of_images
    data = FederatedData(workload.examples, [workload.size] * workload.n_clients)
    return supervised(module, torch.compile(loss) if compiled else loss, data)


def _cross_entropy(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def _of_images(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module(batch[0].float()), batch[1])


def _next_token(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    (tokens,) = batch
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
