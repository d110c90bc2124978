"""A server for the report on this machine, which updates the report during its runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from covary.errors import CovaryError, InvalidInput
from covary.report.page import page


def server(folders: Sequence[Path], port: int = 0, target: float | None = None) -> ThreadingHTTPServer:
    """A server for the report of some run folders, reachable from this machine only; `serve_forever` starts it.

    >>> with server([], port=0) as serving:
    ...     serving.server_address[0]
    '127.0.0.1'
    """
    if folders:
        page(folders, target)  # raises an error for folders without a report

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}  # type: ignore[attr-defined]
            if self.headers.get("Host") not in here:  # DNS rebinding: a page of another site under this address
                self.answer(403, "text/plain", "This server answers to its own address only.")
            elif self.path == "/":
                try:
                    self.answer(200, "text/html", page(folders, target, version(folders)))
                except CovaryError as error:
                    self.answer(500, "text/plain", str(error))
            elif self.path == "/version":
                self.answer(200, "text/plain", version(folders))
            else:
                self.answer(404, "text/plain", "The only page is /.")

        def answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise InvalidInput(f"Port {port} cannot be used ({error.strerror}). Choose another with --port.") from None


def version(folders: Sequence[Path]) -> str:
    """A string that changes whenever a run folder changes."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.glob("*.json*"), *folder.glob("*/*.json*")]):
            try:
                about = path.stat()
            except OSError:
                continue
            digest.update(f"{path} {about.st_size} {about.st_mtime_ns} ".encode())
    return digest.hexdigest()[:16]
