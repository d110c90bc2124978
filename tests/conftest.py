"""Fixtures for all tests: the engine's modes, in each of which the core tests hold, and a count of compilations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

import covary as cv

MODES: dict[str, dict[str, Any]] = {
    "all at once": {"devices": 1, "width": 1000},
    "one by one": {"devices": 1, "width": 1},
    "eight devices": {"devices": 8},
    "host store": {"store": "host"},
    "disk store on three devices": {"store": "disk", "devices": 3, "width": 1},
}


IN_TEST = ("all at once", "disk store on three devices")


@pytest.fixture(params=[pytest.param(mode, marks=() if mode in IN_TEST else pytest.mark.nightly) for mode in MODES])
def every_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cv.simulate` in one of the modes."""
    monkeypatch.setattr(cv, "simulate", functools.partial(cv.simulate, **MODES[request.param]))


_compiled: list[str] = []


def _listen(event: str, duration: float, **kwargs: object) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def compilations() -> list[str]:
    """One entry for every program that XLA has compiled since the list was last cleared."""
    _compiled.clear()
    return _compiled
