"""covary: federated learning without client drift, with SCAFFOLD and related algorithms."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from covary._engine.configure import configure, tidy_environment

if TYPE_CHECKING:
    from covary import models, plain, theory, trackers
    from covary.algorithm import Algorithm, Exchange
    from covary.algorithms import dane, fedavg, feddyn, fedprox, mime, scaffold, sgd, vrl_sgd
    from covary.data import datasets, partition
    from covary.data.federated import FederatedData
    from covary.errors import CovaryError, DivergenceWarning
    from covary.problem import Problem, lower_bound, quadratics, supervised
    from covary.report.page import write_report
    from covary.simulate import Run, simulate
    from covary.sweep import Sweep, sweep
    from covary.theory import Diagnosis, diagnose

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "CovaryError",
    "Diagnosis",
    "DivergenceWarning",
    "Exchange",
    "FederatedData",
    "Problem",
    "Run",
    "Sweep",
    "dane",
    "datasets",
    "diagnose",
    "fedavg",
    "feddyn",
    "fedprox",
    "lower_bound",
    "mime",
    "models",
    "partition",
    "plain",
    "quadratics",
    "scaffold",
    "sgd",
    "simulate",
    "supervised",
    "sweep",
    "theory",
    "trackers",
    "vrl_sgd",
    "write_report",
]

# The module of each name, imported when the name is first used, so that `import covary` does not import JAX.
_ROOMS = {
    "algorithm": ("Algorithm", "Exchange"),
    "algorithms": ("dane", "fedavg", "feddyn", "fedprox", "mime", "scaffold", "sgd", "vrl_sgd"),
    "data.federated": ("FederatedData",),
    "errors": ("CovaryError", "DivergenceWarning"),
    "problem": ("Problem", "lower_bound", "quadratics", "supervised"),
    "report.page": ("write_report",),
    "simulate": ("Run", "simulate"),
    "sweep": ("Sweep", "sweep"),
    "theory": ("Diagnosis", "diagnose"),
}
_ROOM_OF = {name: f"covary.{room}" for room, names in _ROOMS.items() for name in names}
_MODULES = {"datasets": "covary.data.datasets", "partition": "covary.data.partition"}
_MODULES |= {
    name: f"covary.{name}"
    for name in (
        *("algorithm", "algorithms", "checks", "client", "data", "errors", "flower", "models", "plain", "problem"),
        *("report", "targets", "theory", "trackers", "training"),
    )
}


class _Package(ModuleType):
    """The package. Its `simulate` and `sweep` stay the functions when the modules of these names are imported."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            found = importlib.import_module(_MODULES[name])
        elif name in _ROOM_OF:
            found = getattr(importlib.import_module(_ROOM_OF[name]), name)
        else:
            raise AttributeError(f"module 'covary' has no attribute {name!r}")
        tidy_environment()
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _ROOM_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*__all__, *_MODULES, *(name for name in self.__dict__ if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
configure()
