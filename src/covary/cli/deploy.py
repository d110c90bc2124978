"""`covary new-app`, `node`, `audit` and `status`: a deployment on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from covary.cli.common import Json, Quiet
from covary.cli.terminal import Terminal
from covary.errors import InvalidInput


def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; the app gets its name.")],
    with_torch: Annotated[bool, typer.Option("--torch", help="A PyTorch model instead of a JAX one.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a small, complete Flower app that trains with SCAFFOLD.

    Example: covary new-app my-hospital --torch
    """
    _reject_without_flower()
    from covary.flower.template import write_app

    write_app(folder, with_torch)
    terminal = Terminal(as_json, quiet)
    terminal.show(f"Wrote {folder}. Its README.md explains how to run it.", markup=False)
    terminal.answer({"folder": str(folder)})


def node(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of the SuperLink's gate.")],
    root_certificates: Annotated[Path, typer.Option(metavar="FILE", help="The CA certificate, ca.crt.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="This node's private key.")],
    state: Annotated[Path, typer.Option(metavar="DIR", help="The folder for this node's control variate.")],
    app: Annotated[list[Path], typer.Option(metavar="APP", help="An app that may run here: a folder or a .fab file.")],
    config: Annotated[str, typer.Option(help="The app's context.node_config.")] = "",
    port: Annotated[int, typer.Option(help="A free port of this machine.", min=1, max=65535)] = 9094,
) -> None:
    """Run this machine's node. It runs only the apps you name, and prints the reason when it ends.

    Example: covary node --superlink superlink.example.org:443 --root-certificates ca.crt --key hospital-a
    --state /var/lib/covary --app my-hospital --config 'partition-id=0'
    """
    _reject_without_flower()
    from covary.flower.node import Node, run_node

    raise typer.Exit(run_node(Node(superlink, root_certificates, key, state, app, config, port)))


def audit(
    checkpoint: Annotated[Path, typer.Argument(help="The server's checkpoint folder.")],
    states: Annotated[list[Path], typer.Argument(help="The nodes' state folders.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check from the saved states that the server's c is the mean of the nodes' c_i. Exit code 1 if it is not.

    Example: covary audit checkpoint state-0 state-1 state-2
    """
    _reject_without_flower()
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
            table.add_row(name, "state not found")
        never = found.members - len(found.norms) - len(found.missing)
        if never:
            table.add_row(f"{never} not counted yet", "0")
        terminal.show(table)
        wrong = "cannot be checked, states are missing" if found.missing else "c is not the mean of the c_i"
        verdict = "[green]c = mean(c_i)[/green]" if found.holds else f"[red]{wrong}[/red]"
        terminal.show(f"‖c‖ = {found.norm:.6g}, ‖c - mean c_i‖ = {found.gap:.3g}: {verdict}")
    if not found.holds:
        raise typer.Exit(1)


def status(
    checkpoint: Annotated[Path, typer.Argument(help="The server's checkpoint folder.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show whether a deployed run is complete. Exit code 0: complete; 1: stopped early; 3: still running.

    Example: covary status checkpoint
    """
    _reject_without_flower()
    from covary.flower import outcome

    found, terminal = outcome(checkpoint), Terminal(as_json, quiet)
    terminal.answer({**vars(found), "reached": found.reached})
    terminal.show(str(found), markup=False)
    raise typer.Exit(0 if found.reached else 3 if found.state == "running" else 1)


def _reject_without_flower() -> None:
    try:
        import covary.flower as _  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"{error}.") from None
