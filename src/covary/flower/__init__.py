"""Deployment on Flower: the same algorithms across machines, with control variates that survive failures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import flwr as _  # noqa: F401
except ImportError as error:
    raise ImportError("covary.flower needs Flower: pip install 'covary[flower]'") from error

if TYPE_CHECKING:
    from covary.flower.app import server_app
    from covary.flower.client import client_app
    from covary.flower.ending import Outcome, outcome
    from covary.flower.limits import Limits
    from covary.flower.model import load_model
    from covary.flower.proof import Audit, audit
    from covary.flower.server import serve
    from covary.flower.settings import Settings
    from covary.flower.torch import flat_parameters, load_parameters, torch_client_app

__all__ = [
    "Audit",
    "Limits",
    "Outcome",
    "Settings",
    "audit",
    "client_app",
    "flat_parameters",
    "load_model",
    "load_parameters",
    "outcome",
    "serve",
    "server_app",
    "torch_client_app",
]

ROOMS = {
    "proof": ("Audit", "audit"),
    "client": ("client_app",),
    "limits": ("Limits",),
    "model": ("load_model",),
    "ending": ("Outcome", "outcome"),
    "app": ("server_app",),
    "server": ("serve",),
    "settings": ("Settings",),
    "torch": ("flat_parameters", "load_parameters", "torch_client_app"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a node starts a process for every message and needs only its own part."""
    for room, names in ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"covary.flower.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
