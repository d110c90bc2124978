"""A user's own table: a CSV file with a client column, a label column and features."""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.checks import path as checked_path
from covary.errors import CovaryError, InvalidInput
from covary.runs.files import content_of

LARGEST = 2**30  # bytes of a file
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
NAMES = frozenset({"none"})  # missing as a feature, but a valid client or class
UNNAMED = "(unnamed)"
MOST_CATEGORIES = 30  # different texts in one column
MOST_LABELS = 100
FRACTION = 5  # one row in five is held out for testing


class Table(NamedTuple):
    """A table as arrays: `partition.by_group(*table.train)` divides it among its clients."""

    train: tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y, client
    test: tuple[np.ndarray, np.ndarray]
    features: list[str]  # one for each column of x
    labels: list[str]  # the classes: y holds their positions
    clients: list[str]
    notes: list[str]  # what was done to the columns


@dataclass(frozen=True)
class Sheet:
    """The cells of a file as texts, each row with its line number in the file."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]
    comma: bool  # numbers may be written 12,5
    notes: list[str]  # how it was read

    def column(self, name: str) -> list[str]:
        at = self.header.index(name)
        return [row[at] for row in self.rows]

    def wrong(self, name: str, row: int, what: str) -> CovaryError:
        return InvalidInput(f"{self.path}, column {name}, row {self.numbers[row]}: {what}")


def table(
    path: str | Path,
    client_column: str,
    label: str,
    test: str | Path | None = None,
    ignore: Sequence[str] = (),
) -> Table:
    """Read a CSV file with one row per example: its client, its label and its features.

    Numbers are standardised with the training mean and deviation; a missing number becomes the training median. A
    column with up to 30 different texts becomes one indicator per text; a missing text counts as one of them. Constant
    and empty columns are ignored. `notes` says what was done. An error names the column and the row.

    Args:
        path: the file: UTF-8, with a header and cells separated by commas, semicolons, tabs or bars.
        client_column: the column that names the client of each row.
        label: the column to predict: classes, as numbers or texts.
        test: a file of test examples with the same columns. Without it, a fifth of each client's rows is held out.
        ignore: columns to ignore.

    >>> import pathlib, tempfile, covary as cv
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "patients.csv"
    >>> rows = [f"{'north' if i % 3 else 'south'},{20 + i},{'mf'[i % 2]},{'yes' if i > 9 else 'no'}" for i in range(20)]
    >>> _ = file.write_text("hospital,age,sex,ill\\n" + "\\n".join(rows))
    >>> found = cv.datasets.table(file, client_column="hospital", label="ill")
    >>> found.features, found.labels, found.clients
    (['age', 'sex = f', 'sex = m'], ['no', 'yes'], ['north', 'south'])
    >>> cv.partition.by_group(*found.train)
    FederatedData(2 clients, 17 examples, 6 to 11 each)
    """
    sheet = _read(checked_path("path", path))
    for name in (client_column, label, *ignore):
        _reject_unknown(sheet, name)
    for name in (client_column, label):
        if [client_column, label, *ignore].count(name) > 1:
            raise InvalidInput(
                f"Column {name} is named twice. A column is the client column, the label or ignored: choose one."
            )
    held_out = None if test is None else _read(checked_path("test", test))
    features = [name for name in sheet.header if name not in (client_column, label, UNNAMED, *ignore)]
    if held_out is not None:
        if held_out.path.samefile(sheet.path):
            raise InvalidInput(f"{sheet.path} is both the training and the test file. Pass another test file, or none.")
        for name in (label, *features):
            _reject_unknown(held_out, name, ", which the training file has")

    clients = _present(sheet, client_column, "client")
    names, owner = np.unique(clients, return_inverse=True)
    labels, y = _labels(sheet, label)
    notes = [*sheet.notes, *_look_alikes(client_column, names.tolist()), *_look_alikes(label, labels)]
    notes += [f"{len(labels)} classes: {_some(labels)}; {len(names)} clients: {_some(names.tolist())}"]
    in_test = _held_out_rows(sheet.path, owner, y) if held_out is None else np.zeros(len(y), bool)
    columns = []
    for name in features:
        own, done = _feature(sheet, held_out, name, ~in_test)
        columns += own
        notes += done
    if not columns:
        why = f" ({'; '.join(notes[-5:])})" if features else ""
        raise InvalidInput(
            f"{sheet.path} has no usable feature column besides {client_column} and {label}{why}. Add one."
        )
    x = np.stack([values for _, values, _ in columns], axis=1).astype(np.float32)
    train = (x[~in_test], y[~in_test], owner[~in_test])
    if held_out is None:
        tested = (x[in_test], y[in_test])
    else:
        tested = (
            np.stack([values for _, _, values in columns], axis=1).astype(np.float32),
            _known(held_out, label, labels),
        )
    return Table(train, tested, [name for name, _, _ in columns], labels, names.tolist(), notes)


def _read(path: Path) -> Sheet:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file" if path.exists() else "missing"
        raise InvalidInput(f"{path} is {what}. Pass a CSV file.")
    if path.stat().st_size > LARGEST:
        raise InvalidInput(
            f"{path} has {path.stat().st_size:,} bytes; a table may have at most {LARGEST:,}. Stream larger data from "
            "a folder: FederatedData.write in Python."
        )
    content = content_of(path.resolve(), LARGEST)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        raise InvalidInput(
            f"{path}, row {row}: the text is not UTF-8. Save the file as UTF-8 (in Excel: CSV UTF-8)."
        ) from None
    if "\0" in text:
        row = text[: text.index("\0")].count("\n") + 1
        raise InvalidInput(f"{path}, row {row}: this is not text. Pass a CSV file; a spreadsheet program can save one.")
    first = text.split("\n", 1)[0].strip(" \r")
    announced = re.fullmatch(r'"?sep=(.)"?', first)  # a line for Excel
    bare = re.sub(r'"[^"]*"', "", first)
    delimiter = announced[1] if announced else max(",;\t|", key=bare.count)
    rows: list[list[str]] = []
    numbers: list[int] = []
    reader, at = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1
    try:
        for row in reader:
            if at == 1 and announced:
                pass
            elif any(cell.strip() for cell in row):
                rows.append([cell.strip() for cell in row])
                numbers.append(at)
            at = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInput(f"{path}, row {at}: {error}. Look for an unclosed quotation mark.") from None
    if len(rows) < 2:
        raise InvalidInput(f"{path} has no rows. It needs a header, and one row per example below it.")
    header, notes = rows[0], []
    if not header[0] and len(header) > 1:
        header = [UNNAMED, *header[1:]]
        notes.append("the first column has no name: ignored as an index")
    for at, name in enumerate(header):
        if not name:
            raise InvalidInput(f"{path}: column {at + 1} of the header has no name. Name it, or remove the column.")
        if header.index(name) < at:
            raise InvalidInput(f"{path}: two columns are named {name}. Rename one.")
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(header):
            raise InvalidInput(
                f"{path}, row {number}: {len(row)} cells, but the header has {len(header)}. Look for a missing or "
                f"extra {'tab' if delimiter == chr(9) else repr(delimiter)}, and put texts that contain one in quotes."
            )
    return Sheet(path, header, rows[1:], numbers[1:], delimiter != ",", notes)


def _reject_unknown(sheet: Sheet, name: str, why: str = "") -> None:
    if name not in sheet.header:
        near = difflib.get_close_matches(str(name), sheet.header, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Its columns are {_some(sheet.header)}."
        raise InvalidInput(f"{sheet.path} has no column {name}{why}. {fix}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _look_alikes(column: str, names: Sequence[str]) -> list[str]:
    """Notes on names that differ only in case."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.casefold(), []).append(name)
    return [
        f"{column}: {' and '.join(kind)} differ only in case and count as different"
        for kind in kinds.values()
        if len(kind) > 1
    ]


def _missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _present(sheet: Sheet, name: str, what: str) -> list[str]:
    """The clients or labels in a column, with 1.0 read as 1. A missing one is an error."""
    cells = sheet.column(name)
    for row, cell in enumerate(cells):
        if _missing(cell) and cell.lower() not in NAMES:
            why = f"{cell!r} means a missing value" if cell else "the cell is empty"
            raise sheet.wrong(name, row, f"{why}, so the row has no {what}. Fill it in, or remove the row.")
    return [re.sub(r"^(-?\d+)\.0+$", r"\1", cell) for cell in cells]


def _number(sheet: Sheet, cell: str) -> float | None:
    """The number in a cell, or None: 12.5, and also 12,5 and 1.012,5 if commas do not separate the cells."""
    if sheet.comma and re.fullmatch(r"[-+]?(\d*|\d{1,3}(\.\d{3})+),\d*([eE][-+]?\d+)?", cell):
        cell = cell.replace(".", "").replace(",", ".")
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _labels(sheet: Sheet, name: str) -> tuple[list[str], np.ndarray]:
    """The classes in order, and the class of each row."""
    cells = _present(sheet, name, "label")
    kinds = set(cells)
    numbers = {kind: _number(sheet, kind) for kind in kinds}
    fractions = sum(value is not None and math.isfinite(value) and value % 1 != 0 for value in numbers.values())
    if len(kinds) > MOST_LABELS or fractions > 10:
        raise InvalidInput(
            f"{sheet.path}, column {name}: {len(kinds)} different values look like measurements, not classes. covary's "
            "built-in models classify. Make classes of the values (for example above and below a threshold), or use "
            "your own model in Python."
        )
    if len(kinds) == 1:
        raise InvalidInput(
            f"{sheet.path}, column {name}: every row is {cells[0]!r}. Training needs at least two classes."
        )
    if all(value is not None for value in numbers.values()):
        order = sorted(kinds, key=lambda kind: (numbers[kind], kind))
    else:
        order = sorted(kinds)
    index = {kind: k for k, kind in enumerate(order)}
    return order, np.array([index[cell] for cell in cells], np.int32)


def _known(sheet: Sheet, name: str, labels: list[str]) -> np.ndarray:
    """The class of each test row. A class that the training file lacks is an error."""
    cells = _present(sheet, name, "label")
    index = {kind: k for k, kind in enumerate(labels)}
    for row, cell in enumerate(cells):
        if cell not in index:
            shown = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
            raise sheet.wrong(name, row, f"{cell!r} is not a class of the training file ({shown}). Correct it.")
    return np.array([index[cell] for cell in cells], np.int32)


def _held_out_rows(path: Path, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A fifth of each client's rows, without rows whose class would then be missing from the training rows."""
    chosen, rng = np.zeros(len(y), bool), np.random.default_rng(0)
    for client in range(owner.max() + 1):
        rows = rng.permutation(np.flatnonzero(owner == client))
        chosen[rows[: len(rows) // FRACTION]] = True
    chosen &= np.isin(y, y[~chosen])
    if not chosen.any():
        raise InvalidInput(
            f"{path}: no row can be held out for testing, because no client has {FRACTION} rows or each class occurs "
            "once. Pass a file of test rows: --test FILE.csv."
        )
    return chosen


Column = tuple[str, np.ndarray, np.ndarray]  # a feature's name, its values, and those of the test file


def _feature(sheet: Sheet, held_out: Sheet | None, name: str, trained: np.ndarray) -> tuple[list[Column], list[str]]:
    """A column as features, and notes on how."""
    cells = sheet.column(name)
    present = [cell for cell in cells if not _missing(cell)]
    counted = sum(_number(sheet, cell) is not None for cell in present)
    if not any(not _missing(cell) for cell, used in zip(cells, trained, strict=True) if used):
        return [], [f"{name}: no value in the training rows, ignored"]
    if 2 * counted > len(present):
        return _measurement(sheet, held_out, name, trained, counted, len(present))
    return _category(sheet, held_out, name, trained)


def _measurement(
    sheet: Sheet, held_out: Sheet | None, name: str, trained: np.ndarray, counted: int, present: int
) -> tuple[list[Column], list[str]]:
    def values_of(file: Sheet) -> np.ndarray:
        values = np.full(len(file.rows), np.nan)
        for row, cell in enumerate(file.column(name)):
            value = None if _missing(cell) else _number(file, cell)
            if value is None and not _missing(cell):
                fix = "Correct it, empty the cell if the value is missing, or ignore the column with --ignore."
                most = f"{counted} of the column's {present} values" if file is sheet else "the training values"
                raise file.wrong(name, row, f"{cell!r} is not a number, unlike {most}. {fix}")
            if value is not None and not abs(value) <= np.finfo(np.float32).max:
                raise file.wrong(name, row, f"{cell!r} is too large or not finite. Correct it, or empty the cell.")
            values[row] = np.nan if value is None else value
        return values

    if any(re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+,\d*", cell) for cell in sheet.column(name)):
        for row, cell in enumerate(sheet.column(name)):
            if re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+", cell):
                raise sheet.wrong(
                    name,
                    row,
                    f"{cell!r} is ambiguous, because other values use a point for thousands. Remove the point.",
                )
    values = values_of(sheet)
    later = np.empty(0) if held_out is None else values_of(held_out)
    seen = values[trained]
    median = float(np.median(seen[~np.isnan(seen)]))
    gaps = int(np.isnan(values).sum() + np.isnan(later).sum())
    notes = [f"{name}: {gaps} missing values replaced by the median, {median:g}"] if gaps else []
    comma = next((cell for cell in sheet.column(name) if sheet.comma and "," in cell), None)
    notes += [f"{name}: decimal commas, {comma} is read as {_number(sheet, comma):g}"] if comma else []
    values, later = (np.where(np.isnan(part), median, part) for part in (values, later))
    mean, deviation = values[trained].mean(), values[trained].std()
    if deviation == 0:
        return [], [*notes, f"{name}: constant in the training rows, ignored"]
    return [(name, (values - mean) / deviation, (later - mean) / deviation)], notes


def _category(sheet: Sheet, held_out: Sheet | None, name: str, trained: np.ndarray) -> tuple[list[Column], list[str]]:
    def kinds_of(file: Sheet) -> list[str]:
        return ["(missing)" if _missing(cell) else cell for cell in file.column(name)]

    cells, later = kinds_of(sheet), [] if held_out is None else kinds_of(held_out)
    kinds = sorted({cell for cell, used in zip(cells, trained, strict=True) if used})
    if len(set(cells)) > MOST_CATEGORIES:
        raise sheet.wrong(
            name,
            0,
            f"{cells[0]!r} is one of {len(set(cells))} different texts; a column may have at most {MOST_CATEGORIES}. "
            "Ignore the column with --ignore, or group its values.",
        )
    if len(kinds) == 1:
        return [], [f"{name}: constant in the training rows, ignored"]
    unseen = sorted({cell for cell in [*cells, *later] if cell not in kinds})
    notes = [f"{name}: {', '.join(unseen)} only in test rows, with all indicators 0"] if unseen else []

    def indicator(kind: str, part: list[str]) -> np.ndarray:
        return np.array([float(cell == kind) for cell in part])

    columns = [(f"{name} = {kind}", indicator(kind, cells), indicator(kind, later)) for kind in kinds]
    return columns, [f"{name}: {len(kinds)} categories, one indicator each", *notes]
