"""All tests run in float64, where numbers agree to 1e-10; float32 is JAX's and the command line's default.

Eight CPU devices stand in for eight accelerators. Programs are cached in a folder that all workers share, between runs.
At the end of a run, the ten most expensive tests are listed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Most of the tests' time is compilation: XLA is told to save on passes that make programs faster, and to emit fused
# loops the older way, which compiles three times as fast.
FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))

import jax  # noqa: E402
import pytest  # noqa: E402

kept = Path(__file__).parent / ".pytest_cache" / "programs"
os.environ["XDG_CACHE_HOME"] = str(kept)
jax.config.update("jax_compilation_cache_dir", str(kept))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)

programs = 0  # that XLA compiled, or found in its cache, in this process


def _count(event: str, seconds: float, **more: object) -> None:
    global programs
    programs += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def _spent() -> tuple[float, int]:
    """CPU seconds of this process and of its ended children, and programs, up to now."""
    return sum(os.times()[:4]), programs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    item.spent = _spent()  # type: ignore[attr-defined]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    before, item.spent = item.spent, _spent()  # type: ignore[attr-defined]
    report.cost = (report.duration, *(now - then for now, then in zip(item.spent, before, strict=True)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The ten most expensive tests, with what was set up for them."""
    costs: dict[str, tuple[float, ...]] = {}
    for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "cost")):
        so_far = costs.get(report.nodeid, (0.0, 0.0, 0))
        costs[report.nodeid] = tuple(a + b for a, b in zip(so_far, report.cost, strict=True))
    if not costs:
        return
    terminalreporter.section("most expensive")
    terminalreporter.line("seconds  CPU seconds  programs compiled")
    for test, (seconds, cpu, compiled) in sorted(costs.items(), key=lambda item: -item[1][1])[:10]:
        terminalreporter.line(f"{seconds:7.1f}  {cpu:11.1f}  {compiled:8.0f}  {test}")
