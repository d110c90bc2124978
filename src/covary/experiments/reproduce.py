"""Running an experiment of the paper, saving its measurements, and writing its report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from covary.errors import InvalidInput
from covary.experiments import fig3, plots, table3, table4, table5
from covary.experiments.common import Budget, Log, Outcome, load_emnist, measure_cells
from covary.experiments.folder import as_record, cell_from, save_cell, saved_cells
from covary.runs import machine
from covary.runs.folder import RunFolder

TABLES = {"table3": table3, "table4": table4, "table5": table5}
EXPERIMENTS = ("fig3", *TABLES)
TITLES = {"fig3": fig3.TITLE, **{name: table.TITLE for name, table in TABLES.items()}}


def run_table(
    name: str,
    root: Path,
    folder: RunFolder,
    command: str,
    quick: bool = False,
    paper_white: bool | None = None,
    seeds: int | None = None,
    log: Log | None = None,
) -> Iterator[int]:
    """Measure and save every cell that the folder does not have yet; yields the number of cells so far."""
    table = TABLES[name]
    started = time.perf_counter()
    budget: Budget = table.QUICK if quick else table.FULL
    budget = budget if seeds is None else replace(budget, seeds=tuple(range(seeds)))
    emnist = load_emnist(root, table.PAPER_WHITE if paper_white is None else paper_white)
    header = {**_header(name, emnist.source, command), "quick": quick, "budget": asdict(budget)}
    done = saved_cells(folder, header, ("experiment", "data", "quick", "budget", "device", "versions"))
    todo = [case for case in table.cases(quick) if case not in done]
    target = table.QUICK_TARGET if quick else table.TARGET
    yield len(done)
    cells = measure_cells(emnist, budget, todo, table.CENTRE, target, table.NETWORK, log, folder.checkpoint)
    for number, cell in enumerate(cells, len(done) + 1):
        save_cell(folder, cell)
        yield number
    if todo:
        folder.append({"kind": "end", "wall_seconds": time.perf_counter() - started})
    _conclude(folder)


def run_figure(folder: RunFolder, command: str) -> None:
    # a repeated call measures everything again, which takes seconds
    folder.rewrite([_header("fig3", "simulated", command)])
    started = time.perf_counter()
    for curve in fig3.run():
        folder.append({"kind": "curve", "seconds": time.perf_counter() - started, **curve})
        started = time.perf_counter()
    _conclude(folder)


def _header(name: str, data: str, command: str) -> dict[str, Any]:
    """The first record of a folder."""
    about = {"experiment": name, "title": TITLES[name], "data": data, "command": command}
    versions = machine.versions("covary", "jax", "jaxlib", "numpy")
    return {"kind": "header", **about, "device": machine.device(), "versions": versions}


def _conclude(folder: RunFolder) -> None:
    """Save the table and the claims of a complete folder once, so that the report does not need the cells."""
    records = folder.read()
    if any(record.get("kind") == "outcome" for record in records):
        return
    result = outcome_of(records)
    header, rows = result.table
    claims, note = [asdict(claim) for claim in result.claims], how_long(result)
    folder.append({"kind": "outcome", "header": header, "rows": rows, "claims": claims, "note": note}, durable=True)


def cells_of(name: str, quick: bool) -> int:
    """The number of cells of a table."""
    return len(TABLES[name].cases(quick))


def most_rounds(name: str, quick: bool) -> int:
    """The maximum rounds per run of a table."""
    return (TABLES[name].QUICK if quick else TABLES[name].FULL).rounds


def missing(records: list[dict[str, Any]]) -> int:
    """The number of curves of the figure, or cells of the table, that are missing."""
    header, name = records[0], records[0].get("experiment")
    whole = fig3.CURVES if name == "fig3" else cells_of(str(name), header["quick"])
    return whole - sum(record.get("kind") in ("curve", "cell") for record in records)


def outcome(folder: RunFolder) -> Outcome:
    """The results in the folder, as a table and checked claims."""
    records = folder.read()
    name = records[0].get("experiment")
    if name not in EXPERIMENTS:
        raise InvalidInput(f"{folder.path} holds no experiment of the paper. Pass a run folder of covary reproduce.")
    if missing(records):
        raise InvalidInput(
            f"{folder.path} lacks {missing(records)} cells. Finish it: covary reproduce {name} --checkpoint "
            f"{folder.path}"
        )
    return outcome_of(records)


def outcome_of(records: list[dict[str, Any]]) -> Outcome:
    """The records of a complete folder, as a table and checked claims."""
    header, *records = records
    name = header["experiment"]
    seconds = max(_total(records, "seconds"), _total(records, "wall_seconds"))
    if name == "fig3":
        curves = [{k: v for k, v in r.items() if k != "kind"} for r in records if r.get("kind") == "curve"]
        return Outcome(name, header, fig3.as_table(curves), fig3.claims(curves), curves, seconds)
    cells = [cell_from(record) for record in records if record.get("kind") == "cell"]
    table, limit = TABLES[name], header["budget"]["rounds"]
    return Outcome(name, header, table.as_table(cells, limit), table.claims(cells, limit), cells, seconds)


def _total(records: list[dict[str, Any]], name: str) -> float:
    return float(sum(v for v in (record.get(name) for record in records) if isinstance(v, int | float)))


def write_up(result: Outcome, folder: Path) -> list[Path]:
    """Write the outcome as Markdown, JSON and a plot."""
    title = TITLES[result.name]
    picture = folder / f"{result.name}.png"
    plots.draw(result, title, picture)
    page, data = folder / f"{result.name}.md", folder / f"{result.name}.json"
    page.write_text(_markdown(result, title), encoding="utf-8")
    data.write_text(json.dumps(_json(result), indent=1) + "\n", encoding="utf-8")
    return [page, data, picture]


def how_long(result: Outcome) -> str:
    """The time of the measurements and the machine, as a note below the table."""
    return f"{result.seconds:.0f} s on {result.header['device']}, including compilation."


def quick_note(result: Outcome) -> str:
    """A note on the size of a quick form."""
    budget, table = result.header["budget"], TABLES[result.name]
    target = f"target {table.QUICK_TARGET}, " if table.QUICK_TARGET else ""
    return (
        f"Quick form, not the paper's scale: {budget['examples']:,} examples, {budget['clients']} clients, {target}"
        f"at most {budget['rounds']} rounds, {len(budget['seeds'])} seed(s)"
    )


def _markdown(result: Outcome, title: str) -> str:
    header, (columns, body) = result.header, result.table
    module = fig3 if result.name == "fig3" else TABLES[result.name]
    about = (module.__doc__ or "").strip()
    versions = ", ".join(f"{name} {number}" for name, number in header["versions"].items())
    lines = [f"# {title}", "", about, ""]
    if header.get("quick"):
        lines += [f"**{quick_note(result)}**", ""]
    lines += [
        f"- Data: {header['data']}.",
        f"- Command: `{header['command']}`, {result.seconds:.0f} s, including compilation.",
        f"- Machine: {header['device']}; {versions}.",
    ]
    if "budget" in header:
        b = header["budget"]
        tuned = f"{b['step_sizes']} step-sizes a factor of √10 apart, and more if the best lies at an end"
        lines += [f"- {len(b['seeds'])} seeds: means, with the smallest and largest value or ± one deviation; {tuned}."]
    lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row).replace("\n", "<br>") + " |" for row in body]
    lines += ["", f"![{title}]({result.name}.png)", "", "## The paper's claims", ""]
    lines += [f"- **{c.verdict}**: {c.text} ({c.evidence})" for c in result.claims]
    if result.name != "fig3":
        lines += ["", "## The tuned step-sizes", "", "| cell | eta_l |", "|---|---|"]
        lines += [f"| {cell.case} | {cell.eta_l:g} |" for cell in result.results]
    return "\n".join(lines) + "\n"


def _json(result: Outcome) -> dict[str, Any]:
    results = result.results if result.name == "fig3" else [as_record(cell) for cell in result.results]
    for record in results:
        for member in record.get("tried", []):
            for key, value in member.items():
                member[key] = round(value, 4) if isinstance(value, float) and key != "eta_l" else value
    return {
        **{k: v for k, v in result.header.items() if k != "kind"},
        "seconds": round(result.seconds, 1),
        "claims": [asdict(claim) for claim in result.claims],
        "results": results,
    }
