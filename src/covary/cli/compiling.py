"""What JAX is compiling, and for how long: what a progress line says while no round can end."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable

NOTED_AFTER = 2.0  # seconds
NAMES = {
    "chunk": "the rounds",
    "visit": "a round",
    "draw": "the cohorts",
    "init": "the model's start",
    "losses": "the loss",
    "part": "the loss",
}


class Compiling:
    """The program that JAX is compiling, by JAX's own events.

    >>> now = Compiling()
    >>> now.heard("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, fun_name="jit(chunk)")
    >>> now.what, now.text()  # said after two seconds
    ('the rounds', '')
    >>> now.heard("/jax/core/compile/backend_compile_duration", 0.3, fun_name="jit(chunk)")
    >>> now.what is None
    True
    """

    def __init__(self) -> None:
        self.what: str | None = None
        self.since = 0.0
        self.say: Callable[[str], None] | None = None  # where there is no line that is drawn again
        self._timer: threading.Timer | None = None

    def heard(self, event: str, duration_secs: float, **about: object) -> None:
        """What JAX announces: a program is lowered just before it is compiled."""
        if event.endswith("jaxpr_to_mlir_module_duration"):
            name = str(about.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            self._end()
            self.what, self.since = NAMES.get(name, name or "a program"), time.monotonic()
            if self.say is not None:
                self._timer = threading.Timer(NOTED_AFTER, self.say, [f"compiling {self.what} ..."])
                self._timer.daemon = True
                self._timer.start()
        elif event.endswith("backend_compile_duration"):
            if self.say is not None and duration_secs > NOTED_AFTER and self.what is not None:
                self.say(f"compiled {self.what} in {duration_secs:.0f} s")
            self._end()
        elif event.endswith("jaxpr_trace_duration"):  # lowered, but not to be compiled
            self._end()

    def text(self) -> str:
        """What is compiling and for how long, if it takes long."""
        spent = time.monotonic() - self.since
        return "" if self.what is None or spent < NOTED_AFTER else f"compiling {self.what}, {spent:.0f} s"

    def _end(self) -> None:
        self.what = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


NOW = Compiling()


def follow(say: Callable[[str], None] | None) -> None:
    """Listen to JAX, if it is loaded; `say` gets a line on what takes long."""
    NOW.say = say
    if "jax" in sys.modules:
        _listen()


@functools.cache
def _listen() -> None:
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(NOW.heard)
