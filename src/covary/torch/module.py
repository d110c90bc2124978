"""A module as vectors: its trained parameters as one, its averaged buffers as another."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from covary.errors import refused
from covary.torch.parts import Parts


class Network:
    """A module, with what a client's work needs of it.

    Parameters with `requires_grad=False` stay as they are. Buffers of real numbers that the `state_dict` has and that
    are finite are averaged over the clients. All other buffers start every client's work as the module was built.

    >>> network = Network(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    >>> network.x.shape, network.buffers.shape, network.averaged
    (torch.Size([15]), torch.Size([6]), ('1.running_mean', '1.running_var'))
    """

    def __init__(self, module: torch.nn.Module):
        self.module, self.own = module, uncompiled(module)
        named = {name: p for name, p in self.own.named_parameters() if p.requires_grad}
        self.trained: list[torch.Tensor] = list(named.values())
        _check_trained(named)
        self.sizes = [p.numel() for p in self.trained]
        self.device = self.trained[0].device
        self.dtype = _widest([p.dtype for p in self.trained])
        self._buffers = _averaged(self.own)
        self.averaged = tuple(self._buffers)
        apart = [b for name, b in self.own.named_buffers() if name not in self._buffers]
        self._apart = [(buffer, buffer.clone()) for buffer in apart]
        self._modes = [(part, part.training) for part in self.own.modules()]

    @property
    def x(self) -> torch.Tensor:
        """The trained parameters, in float32 or wider."""
        return torch.cat([p.detach().reshape(-1) for p in self.trained]).to(self.dtype)

    def set(self, y: torch.Tensor | Parts) -> None:
        """Give the trained parameters these values."""
        if isinstance(y, Parts):
            with torch.no_grad():
                torch._foreach_copy_(self.trained, y.tensors)  # pyright: ignore[reportPrivateImportUsage]
            return
        if y.shape != (sum(self.sizes),):
            allowed, came = f"a vector of {sum(self.sizes)} numbers", f"shape {tuple(y.shape)}"
            raise refused("x", allowed, came, "Use the same module.")
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.parts(y))  # pyright: ignore[reportPrivateImportUsage]

    def parts(self, y: torch.Tensor) -> list[torch.Tensor]:
        """A vector in the shapes of the trained parameters."""
        return [part.view(p.shape) for part, p in zip(y.split(self.sizes), self.trained, strict=True)]

    def named_parts(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector as the trained parameters, by name, in their own types."""
        names = (name for name, p in self.own.named_parameters() if p.requires_grad)
        return {name: part.to(p.dtype) for name, part, p in zip(names, self.parts(y), self.trained, strict=True)}

    def gradient(self, value: torch.Tensor, in_parts: bool = False) -> Any:
        """The gradient of a loss by the trained parameters, as a vector; 0 where the loss does not depend on one."""
        found = torch.autograd.grad(value, self.trained, allow_unused=True)
        return Parts([g.to(self.dtype) for g in self._dense(found)]) if in_parts else self.flat(found)

    def flat(self, found: Any) -> torch.Tensor:
        """One tensor per trained parameter, or None for zeros, as a vector."""
        return torch.cat([g.reshape(-1) for g in self._dense(found)]).to(self.dtype)

    def _dense(self, found: Any) -> list[torch.Tensor]:
        every = [torch.zeros_like(p) if g is None else g for p, g in zip(self.trained, found, strict=True)]
        return [g.to_dense() if g.is_sparse else g for g in every]

    @property
    def buffers(self) -> torch.Tensor:
        """The averaged buffers, as one vector in their widest type; empty if there are none."""
        if not self._buffers:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        wide = _widest([b.dtype for b in self._buffers.values()])
        return torch.cat([b.detach().reshape(-1).to(wide) for b in self._buffers.values()])

    def set_buffers(self, vector: torch.Tensor) -> None:
        parts = vector.split([b.numel() for b in self._buffers.values()]) if self._buffers else ()
        with torch.no_grad():
            for buffer, part in zip(self._buffers.values(), parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    def named_buffers(self, vector: Any = None) -> dict[str, np.ndarray]:
        """The averaged buffers by name, in NumPy: the module's, or those of a vector."""
        if vector is not None:
            self.set_buffers(torch.as_tensor(np.array(vector)))
        return {name: _array(buffer) for name, buffer in self._buffers.items()}

    def set_named_buffers(self, buffers: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, values in buffers.items():
                self._buffers[name].copy_(torch.as_tensor(np.array(values)))

    def restore(self) -> None:
        """Modes, and buffers that are not averaged, as the module was built: a layer set to eval() stays so."""
        for part, training in self._modes:
            part.training = training
        with torch.no_grad():
            for buffer, built in self._apart:
                buffer.copy_(built)

    def copied(self) -> Network:
        """A copy whose parameters and buffers are its own."""
        self.restore()
        for name, p in self.own.named_parameters():
            if p._backward_hooks:  # a copy would go without it
                fix = "Change the gradient in the loss or in forward instead, by a mask with detach() for example."
                raise refused("module", "one without hooks on its parameters", f"a hook on {name}", fix)
        try:
            module = copy.deepcopy(self.module)
        except Exception as error:
            fix = (
                "Every core has its own copy. Layers of torch.nn.utils.weight_norm, for example, cannot be copied, and "
                "those of torch.nn.utils.parametrizations.weight_norm can."
            )
            raise refused("module", "one that copy.deepcopy copies", f"{type(error).__name__}: {error}", fix) from error
        for part in module.modules():
            if isinstance(part, torch.nn.RNNBase):  # cuDNN wants their weights in one piece, which a copy is not
                part.flatten_parameters()
        return Network(module)


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside the wrapper of `torch.compile`, whose names have no prefix."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


def unwrapped(function: Any) -> Any:
    """The function inside the wrapper of `torch.compile`."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def any_kernels() -> contextlib.AbstractContextManager[Any]:
    """cuDNN without its search for the fastest kernels, which takes seconds for shapes that come only once."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=False,
        benchmark_limit=cudnn.benchmark_limit,
        deterministic=cudnn.deterministic,
        allow_tf32=cudnn.allow_tf32,
    )


def form_of_module(module: torch.nn.Module) -> str:
    """A fingerprint of a module: names and shapes of what is trained and averaged, and all bits of what is frozen."""
    own, digest = uncompiled(module), hashlib.sha256()
    for name, p in own.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
        if not p.requires_grad:
            digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, buffer in _averaged(own).items():
        numbers = np.dtype(str(buffer.dtype).removeprefix("torch.")) if buffer.dtype != torch.bfloat16 else buffer.dtype
        digest.update(f"{name} {tuple(buffer.shape)} {numbers}\n".encode())
    return digest.hexdigest()


def loaded(module: torch.nn.Module, x: Any, buffers: Mapping[str, np.ndarray] | None = None) -> torch.nn.Module:
    """The module with a vector as its trained parameters and, if given, with averaged buffers, as a run ends with them.

    >>> module = torch.nn.Linear(1, 1)
    >>> loaded(module, [2.0, 3.0])(torch.tensor([10.0])).tolist()
    [23.0]
    """
    network = Network(module)
    network.set(torch.as_tensor(np.array(x)).to(network.device, network.dtype))
    network.set_named_buffers(buffers or {})
    return module


def counters_that_count(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that cannot be averaged, except BatchNorm's count of its batches, by name."""
    own, averaged = uncompiled(module), _averaged(module)
    known = {
        f"{name}.num_batches_tracked".lstrip(".") for name, part in own.named_modules() if isinstance(part, _NormBase)
    }
    return {name: b for name, b in own.named_buffers() if name not in averaged and name not in known}


def _averaged(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of finite real numbers that the `state_dict` has; a mask of -inf, for example, cannot be averaged."""
    own = uncompiled(module)
    saved = own.state_dict().keys()
    real = {name: b for name, b in own.named_buffers() if b.is_floating_point() and name in saved}
    return {name: b for name, b in real.items() if bool(b.isfinite().all())}


def _check_trained(named: dict[str, torch.nn.Parameter]) -> None:
    if not named:
        raise refused("module", "one with parameters to train", "none that require a gradient", "Unfreeze some.")
    for name, p in named.items():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            fix = "Call the module once on a batch, so that its lazy layers know their sizes."
            raise refused("module", "one whose parameters have shapes", f"{name} without one", fix)
        if p.is_meta:
            fix = "Give it numbers: module.to_empty(device='cpu'), and initialise it."
            raise refused("module", "one whose parameters have numbers", f"{name} on the meta device", fix)
        if not p.is_floating_point():
            raise refused(
                "module", "trained in real numbers", f"{name} in {p.dtype}", "Freeze it: requires_grad_(False)."
            )
        if not bool(p.isfinite().all()):
            raise refused("module", "one whose parameters are finite", f"NaN or infinity in {name}", "Initialise it.")
    devices = {str(p.device) for p in named.values()}
    if len(devices) > 1:
        came = ", ".join(sorted(devices))
        raise refused("module", "on one device", f"parameters on {came}", 'Use module.to("cuda"), for example.')


def _array(buffer: torch.Tensor) -> np.ndarray:
    """A copy in NumPy, which has no bfloat16."""
    return buffer.detach().to("cpu", torch.promote_types(buffer.dtype, torch.float32)).numpy().copy()


def _widest(types: list[torch.dtype]) -> torch.dtype:
    wide = torch.float32
    for each in types:
        wide = torch.promote_types(wide, each)
    return wide
