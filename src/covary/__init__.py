"""covary: federated learning that does not drift. SCAFFOLD and its family, right and fast."""

from covary import models, theory, trackers
from covary._engine.configure import configure
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

configure()

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
