"""`covary bench`: time covary on this machine, next to PyTorch and other simulators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.cli.common import Json, Out, Quiet
from covary.cli.terminal import Terminal
from covary.errors import refused
from covary.runs.folder import RunFolder

PARTS = ("rounds", "sweep", "cnn", "torch", "deep", "first", "growth", "deploy")


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="Any of rounds, sweep, cnn, torch, deep, first, growth, deploy. \\[default: rounds sweep]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: checks that it runs; the times mean nothing.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Also time other installed simulators.")] = True,
    out: Out = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time the paper's round in covary, in PyTorch and in other installed simulators, side by side.

    PARTS are any of rounds, sweep, cnn, torch, deep, first, growth and deploy.
    Only ratios within one run are meaningful. The comparison needs PyTorch (pip install torch).

    Example: covary bench rounds sweep
    """
    from covary.bench import measure
    from covary.report.speed import save_speed

    terminal = Terminal(as_json, quiet)
    chosen = parts or ["rounds", "sweep"]
    for part in chosen:
        if part not in PARTS:
            raise refused("PARTS", f"any of {', '.join(PARTS)}", part, "Try: covary bench rounds.")
    folder = RunFolder.create("bench", out)
    folder.append({"kind": "header", "quick": quick, "parts": chosen, **measure.measured_on()})
    records: list[dict[str, Any]] = []
    with terminal.progress("parts", len(chosen)) as progress:
        for number, part in enumerate(chosen, start=1):

            def say(text: str) -> None:
                progress.update(what=text)

            extra = {"with_peers": peers} if part in ("rounds", "torch") else {}
            for record in getattr(measure, part)(quick=quick, say=say, **extra):
                folder.append(record)
                records.append(record)
            progress.update(number)
    _show(terminal, records)
    picture = folder.path / "speed.png"
    save_speed(picture, records)
    if picture.is_file():
        terminal.written("Picture", picture)
    terminal.written("Raw results", folder.results)
    terminal.show(json.dumps(measure.measured_on()), style="dim", markup=False)
    terminal.answer({"machine": measure.measured_on(), "records": records, "folder": str(folder.path)})


def _show(terminal: Terminal, records: list[dict[str, Any]]) -> None:
    from covary.report.tables import plain_table

    rounds = [r for r in records if r["what"] == "round"]
    for workload in dict.fromkeys(r["workload"] for r in rounds):
        rows = [r for r in rounds if r["workload"] == workload]
        base = rows[0]["seconds"]
        body = [
            [r["who"], f"{1000 * r['seconds']:.2f}", f"{r['seconds'] / base:.2f}"]
            if r["seconds"]
            else [r["who"], r["why"], ""]
            for r in rows
        ]
        terminal.show(plain_table(f"One round of {workload}", ["", "ms", "× covary"], body))
    deep = [r for r in records if r["what"] == "deep"]
    for workload in dict.fromkeys(r["workload"] for r in deep):
        rows = [r for r in deep if r["workload"] == workload]
        base = rows[0]["seconds"]
        body = [[r["who"], *_first_and_later(r, base)] for r in rows]
        columns = ["", "first round, s", "then ms", "× covary"]
        terminal.show(plain_table(f"One round of {workload}", columns, body))
    for r in records:
        if r["what"] == "sweep":
            ratio = r["seconds"] / r["one"]
            terminal.show(f"Sweep of {r['members']}: {1000 * r['seconds']:.1f} ms per round, {ratio:.1f} × one run.")
        elif r["what"] == "first":
            terminal.show(
                f"Cache {r['cache']}: covary compare shows finished rounds after {r['compare']:.1f} s; W1 compiles and "
                f"sets up in {r['w1']['compilation_and_setup']:.1f} s."
            )
        elif r["what"] == "clients":
            held = f"{r['resident_bytes'] / 1e9:.2f} GB resident"
            terminal.show(f"N = {r['N']:,}: {1000 * r['seconds']:.2f} ms per round of {r['S']} clients, {held}.")
        elif r["what"] == "deploy":
            terminal.show(
                f"{r['who']}: {r['seconds']:.2f} s and {r['bytes_up']:,.0f} bytes uploaded per deployed round."
            )
        elif r["what"] == "linear":
            terminal.show(f"{r['in']} = {r['value']}: {1000 * r['seconds']:.2f} ms per round.")


def _first_and_later(row: dict[str, Any], base: float | None) -> list[str]:
    """The first round and a later one as text, or why there is none."""
    if row["first"] is None:
        return [row["why"], "", ""]
    first, seconds = f"{row['first']:.1f}", row["seconds"]
    return [first, f"{1000 * seconds:.0f}", f"{seconds / base:.2f}" if base else ""] if seconds else [first, "", ""]
