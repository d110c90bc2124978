"""The command-line program `covary`."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console

from covary.cli import bench, compare, data, deploy, diagnose, report, reproduce, train
from covary.errors import Corrupted, CovaryError
from covary.runs import machine

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(compare.compare)
app.command()(train.run)
app.command()(train.sweep)
app.command()(diagnose.diagnose)
app.command()(reproduce.reproduce)
app.command()(report.report)
app.command()(bench.bench)
app.command()(deploy.new_app)
app.command()(deploy.node)
app.command()(deploy.audit)
app.command()(deploy.status)
app.add_typer(data.app, name="data")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"covary {machine.versions('covary').get('covary', 'of unknown version')}")
        raise typer.Exit


@app.callback()
def covary(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning without client drift: SCAFFOLD and related algorithms."""


def main() -> None:
    """Entry point: a covary error prints one line, without a traceback. The exit code is 4 for what is damaged, else 2.

    Warnings and log lines of libraries are hidden unless Python was started with -W.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.getLogger("jax").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: save, and print how to resume
    try:
        app()
    except CovaryError as error:
        Console(stderr=True, highlight=False).print("[red]Error:[/red]", end=" ")
        Console(stderr=True, highlight=False).print(str(error), markup=False, soft_wrap=True)
        raise SystemExit(4 if isinstance(error, Corrupted) else 2) from None
