import jax
import pytest

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
