"""The paper's assumptions and theorems: measured constants, rates, and advice."""

from covary.theory import rates
from covary.theory.diagnosis import Diagnosis, check_advice, diagnose
from covary.theory.dissimilarity import (
    Gradients,
    Noise,
    control_lag,
    envelope,
    gradient_dissimilarity,
    gradient_noise,
    lag_along,
    optimum,
)
from covary.theory.estimate import Estimate
from covary.theory.hessians import Curvature, curvature

__all__ = [
    "Curvature",
    "Diagnosis",
    "Estimate",
    "Gradients",
    "Noise",
    "check_advice",
    "control_lag",
    "curvature",
    "diagnose",
    "envelope",
    "gradient_dissimilarity",
    "gradient_noise",
    "lag_along",
    "optimum",
    "rates",
]
