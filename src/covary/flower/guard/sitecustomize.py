"""Python runs this file when a process of a node starts: only approved apps are imported, and their errors stay here.

A SuperNode puts the folder of an app on `sys.path` and imports the app. The SuperLink chooses that folder: Flower makes
its name of the app's version without a check, and "/../../tmp/x" is a version. So this file checks what Python imports,
and not only where Flower installs. Flower also sends the text of an app's error to the server, and that text
may quote data that the app reads when it is imported. `covary node` sets COVARY_APPS.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

UNAPPROVED = "is not an app that this node's owner has approved"


class ImportFailed(ImportError):
    """An approved app failed when it was imported. This node's log has the error."""


class OnlyApproved:
    """A finder before Python's own, which removes folders that were put on `sys.path` without approval.

    >>> import importlib.util, sys
    >>> guard = OnlyApproved(approved=["/var/lib/covary/flower/apps/you.my-hospital.1.0.0.2b0f5a1c"])
    >>> sys.path.insert(0, "/var/lib/covary/flower/apps/../../../../tmp/other-app")
    >>> guard.find_spec("other_app")
    Traceback (most recent call last):
    ImportError: other-app is not an app that this node's owner has approved
    >>> "/var/lib/covary/flower/apps/../../../../tmp/other-app" in sys.path
    False
    """

    def __init__(self, approved: list[str]):
        self.known = frozenset(sys.path)
        self.approved = frozenset(approved)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        for place in list(sys.path):
            if place not in self.known and os.path.realpath(place) not in self.approved:
                sys.path.remove(place)  # namespace packages would look there too
                raise ImportError(f"{os.path.basename(place)} {UNAPPROVED}", name=name)
        if not any(os.path.realpath(place) in self.approved for place in sys.path):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not self.holds(spec.origin):
            return None
        spec.loader = Discreet(spec.loader)
        return spec

    def holds(self, path: str | None) -> bool:
        return path is not None and any(os.path.realpath(path).startswith(app + os.sep) for app in self.approved)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Reject another app by name before Flower installs it: Flower's own error would quote a path."""
        if event == "os.mkdir" and isinstance(arguments[0], str | os.PathLike):
            place = str(os.fspath(arguments[0]))
            here = any(place.startswith(os.path.dirname(app) + os.sep) for app in self.approved)
            if here and not self.holds(place):
                raise PermissionError(f"{os.path.basename(place)} {UNAPPROVED}")


class Discreet(Loader):
    """A loader of an app's modules. The text of an error at import goes to this process's log only."""

    def __init__(self, loader: Any):
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        try:
            self.loader.exec_module(module)
        except ImportFailed:  # of a module that this one imports
            raise
        except Exception:
            traceback.print_exc()
            raise ImportFailed("the app failed when it was imported; the node's own log says why") from None


if approved := os.environ.get("COVARY_APPS"):
    guard = OnlyApproved(approved.split(os.pathsep))
    sys.meta_path.insert(0, guard)
    sys.addaudithook(guard.audit)
