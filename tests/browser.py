"""A real browser for tests of the report page: Debian's chromium, driven through Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import HANGS, ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = ROOT / ".venv" / "node_modules" / "axe-core" / "axe.min.js"
ALONE = [  # it connects only to the page
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not in .venv; make .venv/axe needs npm")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ALONE, timeout=1000 * HANGS)
        yield started
        started.close()


@contextlib.contextmanager
def opened(where: str, width: int = 1200, **options: Any) -> Iterator[Any]:
    """A page at an address, which must neither log errors nor send requests to other addresses."""
    with browser() as started:
        page = started.new_context(viewport={"width": width, "height": 900}, **options).new_page()
        page.set_default_timeout(1000 * HANGS)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if foreign(request.url, where) else None)
        page.goto(where)
        yield page
        assert complaints == []


def foreign(url: str, where: str) -> bool:
    return not url.startswith(("data:", where))
