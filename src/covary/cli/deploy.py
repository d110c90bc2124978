"""`covary new-app` and `covary audit`: the beginning and the proof of a deployment on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from covary.cli.common import Json, Quiet
from covary.cli.terminal import Terminal
from covary.errors import CovaryError


def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; its name becomes the app's.")],
    with_torch: Annotated[bool, typer.Option("--torch", help="A PyTorch model instead of a JAX one.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a small, complete Flower app that trains with SCAFFOLD.

    Example: covary new-app my-hospital --torch
    """
    _refuse_without_flower()
    from covary.flower.template import write_app

    write_app(folder, with_torch)
    terminal = Terminal(as_json, quiet)
    terminal.show(f"Written: {folder}. Its README.md says how to run it.", markup=False)
    terminal.answer({"folder": str(folder)})


def audit(
    checkpoint: Annotated[Path, typer.Argument(help="The server's checkpoint folder.")],
    states: Annotated[list[Path], typer.Argument(help="The nodes' state folders.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check, on the disks, that the server's c is the mean of the nodes' c_i. Exit code 1 if it is not.

    Example: covary audit checkpoint state-0 state-1 state-2
    """
    _refuse_without_flower()
    from covary.flower import audit as audit_disks

    found, terminal = audit_disks(checkpoint, states), Terminal(as_json, quiet)
    terminal.answer({**vars(found), "holds": found.holds})
    if not as_json:
        table = Table(title=f"After round {found.round}, epoch {found.epoch}", title_justify="left")
        table.add_column("member")
        table.add_column("‖c_i‖", justify="right")
        for name, norm in found.norms.items():
            table.add_row(name, f"{norm:.6g}")
        for name in found.missing:
            table.add_row(name, "on none of these disks")
        never = found.members - len(found.norms) - len(found.missing)
        if never:
            table.add_row(f"{never} not counted yet", "0")
        terminal.show(table)
        wrong = "it cannot be shown, states are missing" if found.missing else "c is not the mean of the c_i"
        verdict = "[green]c = mean(c_i)[/green]" if found.holds else f"[red]{wrong}[/red]"
        terminal.show(f"‖c‖ = {found.norm:.6g}, ‖c - mean c_i‖ = {found.gap:.3g}: {verdict}")
    if not found.holds:
        raise typer.Exit(1)


def _refuse_without_flower() -> None:
    try:
        import covary.flower as _  # noqa: F401
    except ImportError as error:
        raise CovaryError(f"{error}.") from None
