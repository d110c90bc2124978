# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
"""The deep workloads in PyTorch: the usual loop over clients and steps, eager, compiled or as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from covary.bench.deep import GPT, DeepWorkload, ResNet
from covary.bench.torch_rivals import ETA_L

MODES = ("eager", "compile", "graph")


class TorchResNet(nn.Module):
    """`deep.ResNet` in PyTorch."""

    def __init__(self, model: ResNet):
        super().__init__()
        widths, n_in = model.widths, model.widths[0]
        self.stem, self.stem_norm = nn.Conv2d(3, n_in, 3, padding=1, bias=False), nn.GroupNorm(model.groups, n_in)
        blocks = []
        for stage, n_out in enumerate(widths):
            for number in range(2):
                stride = 2 if number == 0 and stage > 0 else 1
                blocks.append(Block(n_in, n_out, stride, model.groups))
                n_in = n_out
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(n_in, model.classes)

    def forward(self, images: Any) -> Any:
        x = images.permute(0, 3, 1, 2) / 128 - 1
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))

    def loss(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0].float()), batch[1].long())


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, n_in: int, n_out: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(groups, n_out), nn.GroupNorm(groups, n_out)
        self.short = nn.Identity()
        if n_in != n_out:
            self.short = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.GroupNorm(groups, n_out))

    def forward(self, x: Any) -> Any:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.short(x))


class TorchGPT(nn.Module):
    """`deep.GPT` in PyTorch."""

    def __init__(self, model: GPT):
        super().__init__()
        self.heads, d = model.heads, model.width
        self.tokens, self.places = nn.Embedding(model.vocabulary, d), nn.Embedding(model.length, d)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layers, self.norm = nn.ModuleList([Layer(model) for _ in range(model.layers)]), nn.LayerNorm(d)

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T

    def loss(self, batch: Any) -> Any:
        tokens = batch[0].long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Layer(nn.Module):
    """Attention, then two dense layers."""

    def __init__(self, model: GPT):
        super().__init__()
        d, self.heads = model.width, model.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Any) -> Any:
        n, length, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, d)
        x = x + self.out(h)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def time_loop(workload: DeepWorkload, mode: str, precision: str | None, rounds: int) -> dict[str, float]:
    """Seconds until the first round of SCAFFOLD is done, and seconds of the fastest later one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TensorFloat-32 on a GPU, as in JAX
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    start, times = time.perf_counter(), []
    one_round = _loop(workload, mode, precision, device)
    for _ in range(rounds):
        one_round()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return {"first": times[0] - start, "seconds": float(np.diff(times).min())}


def _loop(workload: DeepWorkload, mode: str, precision: str | None, device: str) -> Callable[[], None]:
    """A round of SCAFFOLD, option II."""
    S, N, K = workload.cohort, workload.n_clients, workload.steps
    model = (TorchGPT if isinstance(workload.model, GPT) else TorchResNet)(workload.model).to(device)
    params = list(model.parameters())
    data = [torch.from_numpy(a).to(device) for a in workload.examples]
    server = [p.detach().clone() for p in params]
    c, shift = [torch.zeros_like(p) for p in server], [torch.zeros_like(p) for p in server]
    c_i = [[torch.zeros_like(p) for p in server] for _ in range(N)]
    rng, loss = np.random.default_rng(0), torch.compile(model.loss) if mode == "compile" else model.loss

    def step(batch: list[Any]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision is not None):
            value = loss(batch)
        grads = torch.autograd.grad(value, params)
        with torch.no_grad():
            torch._foreach_add_(params, torch._foreach_add(grads, shift), alpha=-ETA_L)

    take = _captured(step, [a[: workload.batch].clone() for a in data]) if mode == "graph" else step

    def one_round() -> None:
        changes: list[Any] = []
        new_controls: list[Any] = []
        cohort = np.sort(rng.choice(N, S, replace=False))
        for i in cohort:
            with torch.no_grad():
                torch._foreach_copy_(params, server)
                torch._foreach_copy_(shift, torch._foreach_sub(c, c_i[i]))
            order = i * workload.size + torch.randperm(workload.size, device=device)
            for k in range(K):
                at = order.roll(-k * workload.batch)[: workload.batch]
                take([a[at] for a in data])
            with torch.no_grad():
                changes.append(torch._foreach_sub(params, server))
                scaled = torch._foreach_mul(changes[-1], -1 / (K * ETA_L))
                new_controls.append(torch._foreach_sub(scaled, shift))
        with torch.no_grad():
            for i, change, new in zip(cohort, changes, new_controls, strict=True):
                torch._foreach_add_(server, change, alpha=1 / S)
                torch._foreach_add_(c, torch._foreach_sub(new, c_i[i]), alpha=1 / N)
                c_i[i] = list(new)

    return one_round


def _captured(step: Callable[[list[Any]], None], buffers: list[Any]) -> Callable[[list[Any]], None]:
    """The step as a CUDA graph that reads its batch from buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(buffers)

    def replay(batch: list[Any]) -> None:
        torch._foreach_copy_(buffers, batch)
        graph.replay()

    return replay
