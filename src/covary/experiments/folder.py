"""Cells of a table in a run folder: each is saved as soon as it is measured, and is not measured again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from covary.errors import InvalidInput
from covary.experiments.common import Case, Cell
from covary.runs.folder import RunFolder


def saved_cells(folder: RunFolder, header: dict[str, Any], same: Sequence[str]) -> set[Case]:
    """The cases of the saved cells. A new folder gets the header; an old header must agree in the keys `same`."""
    if not folder.results.exists():
        folder.append(header, durable=True)
        return set()
    folder.drop_torn_line()
    if not folder.results.stat().st_size:
        folder.append(header, durable=True)
        return set()
    first, *records = folder.read()
    for key in same:
        if json.loads(json.dumps(header[key])) != first.get(key):
            raise InvalidInput(
                f"{folder.path} was started with {key} = {first.get(key)}, not {header[key]}. "
                "Use the same options, or another folder."
            )
    return {cell_from(record).case for record in records if record.get("kind") == "cell"}


def save_cell(folder: RunFolder, cell: Cell, **more: Any) -> None:
    """Save a cell and remove its checkpoints."""
    folder.append({"kind": "cell", "name": str(cell.case), **as_record(cell), **more}, durable=True)
    place = cell.case.place(folder.checkpoint)
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)


def as_record(cell: Cell) -> dict[str, Any]:
    """A cell for JSON, where its case goes by the name of setting."""
    record = asdict(cell)
    return {"setting": record.pop("case"), **record}


def cell_from(record: dict[str, Any]) -> Cell:
    """A cell from its JSON record."""
    try:
        measured = {field.name: record[field.name] for field in fields(Cell) if field.name != "case"}
        cell = Cell(case=Case(**record["setting"]), **measured)
        hash(cell.case)
        float(cell.mean_rounds + cell.mean_accuracy + cell.eta_l + cell.seconds)
        return cell
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"A line of results.jsonl is not a cell of a table ({error!r}). Start again in another folder."
        ) from None
