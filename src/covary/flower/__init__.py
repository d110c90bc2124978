"""Deployment on Flower: the same algorithms across machines, with control variates that survive every failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import flwr as _  # noqa: F401
except ImportError as error:
    raise ImportError("covary.flower needs Flower: pip install 'covary[flower]'") from error

from covary.flower.audit import Audit, audit
from covary.flower.client import client_app
from covary.flower.server import Settings, serve, server_app

if TYPE_CHECKING:
    from covary.flower.torch import flat_parameters, load_parameters, torch_client_app

__all__ = [
    "Audit",
    "Settings",
    "audit",
    "client_app",
    "flat_parameters",
    "load_parameters",
    "serve",
    "server_app",
    "torch_client_app",
]

FROM_TORCH = ("flat_parameters", "load_parameters", "torch_client_app")


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is asked for."""
    if name in FROM_TORCH:
        from covary.flower import torch

        return getattr(torch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
