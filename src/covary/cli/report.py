"""`covary report`: the report of one or several runs, written to a file or served while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covary.checks import whole
from covary.cli.common import REPORT, Json, Open, Quiet
from covary.cli.terminal import Terminal, open_in_browser
from covary.errors import InvalidInput, refused
from covary.runs.files import replace


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or several run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. \\[default: report.html in the run folder; comparison.html for several]"),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Count rounds to this test accuracy.")] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the report on this machine and update it as the runs progress.")
    ] = False,
    port: Annotated[int, typer.Option(help="The port for --serve; 0 picks a free one.")] = 0,
    show: Open = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the curves, tables, clients and settings of runs to one HTML file that needs no network.

    Example: covary report runs/* --out comparison.html

    Example: covary report runs/20261116-120000-run-scaffold --serve
    """
    from covary.report.page import page, stories_of
    from covary.report.serve import server

    terminal = Terminal(as_json, quiet)
    if target is not None and not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    whole("--port", port, 0, most=65535)
    if serve:
        if out is not None:
            raise InvalidInput("--serve writes no file. Leave out --out or --serve.")
        with server(runs, port, target) as serving:
            address = f"http://127.0.0.1:{serving.server_port}/"
            terminal.show(f"Serving {address} until Ctrl-C. Only this machine can reach it.")
            terminal.answer({"address": address})
            if show:
                open_in_browser(address)
            try:
                serving.serve_forever()
            except KeyboardInterrupt:
                terminal.say("Stopped.")
        return
    text = page(runs, target)
    for reason in stories_of(runs)[1]:
        terminal.say(f"Skipped: {reason}", style="yellow")
    path = out or (runs[0] / REPORT if len(runs) == 1 else Path("comparison.html"))
    if not path.parent.is_dir():
        raise refused("--out", "a file in a folder that exists", out, "Try --out report.html.")
    try:
        replace(path, text.encode())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written ({error.strerror}). Choose another place with --out.") from None
    terminal.written("Report", path)
    terminal.answer({"report": str(path)})
    if show:
        open_in_browser(path)
