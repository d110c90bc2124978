"""Python runs this file at the start of each process of a node: it imports apps from approved folders only.

A SuperNode puts the folder of an app on `sys.path` and imports the app. The SuperLink chooses that folder: Flower makes
its name of an app's version without a check, and "/../../tmp/x" is a version. So this file checks what Python imports,
and not only where Flower installs. `covary node` sets COVARY_APPS.
"""

from __future__ import annotations

import os
import sys


class OnlyApproved:
    """Stands before Python's own finders. It finds nothing, and removes folders that came onto `sys.path` unapproved.

    >>> import importlib.util, sys
    >>> guard = OnlyApproved(approved=["/var/lib/covary/flower/apps/you.my-hospital.1.0.0.2b0f5a1c"])
    >>> sys.path.insert(0, "/var/lib/covary/flower/apps/../../../../tmp/other-app")
    >>> guard.find_spec("other_app")
    Traceback (most recent call last):
    ImportError: /var/lib/covary/flower/apps/../../../../tmp/other-app is not the folder of an approved app
    >>> "/var/lib/covary/flower/apps/../../../../tmp/other-app" in sys.path
    False
    """

    def __init__(self, approved: list[str]):
        self.known = frozenset(sys.path)
        self.approved = frozenset(approved)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        for place in list(sys.path):
            if place not in self.known and os.path.realpath(place) not in self.approved:
                sys.path.remove(place)  # namespace packages would look there too
                raise ImportError(f"{place} is not the folder of an approved app", name=name)


if approved := os.environ.get("COVARY_APPS"):
    sys.meta_path.insert(0, OnlyApproved(approved.split(os.pathsep)))
