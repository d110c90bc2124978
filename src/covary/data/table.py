"""A user's own table: a CSV file with a column that says whose row it is and a column to predict."""

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
from covary.errors import CovaryError
from covary.runs.files import content_of

LARGEST = 2**30  # bytes of a file
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
NAMES = frozenset({"none"})  # that stand for nothing among features, and may well be a class
UNNAMED = "(unnamed)"
MOST_CATEGORIES = 30  # different texts in a column that is still a category
MOST_LABELS = 100
FRACTION = 5  # one row in so many is kept for testing


class Table(NamedTuple):
    """A table as arrays: `partition.by_group(*table.train)` divides it among its clients."""

    train: tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y, client
    test: tuple[np.ndarray, np.ndarray]
    features: list[str]  # one for each column of x
    labels: list[str]  # what y counts
    clients: list[str]
    notes: list[str]  # what was done to the columns


@dataclass(frozen=True)
class Sheet:
    """The cells of a file as texts, each row with its number in the file, as an editor counts it."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]
    comma: bool  # numbers may be written 12,5
    notes: list[str]  # what was done to read it

    def column(self, name: str) -> list[str]:
        at = self.header.index(name)
        return [row[at] for row in self.rows]

    def wrong(self, name: str, row: int, what: str) -> CovaryError:
        return CovaryError(f"{self.path}, column {name}, row {self.numbers[row]}: {what}")


def table(
    path: str | Path,
    client_column: str,
    label: str,
    test: str | Path | None = None,
    ignore: Sequence[str] = (),
) -> Table:
    """Read a CSV file with one row an example: whose it is, what is to be predicted, and the features.

    Numbers are standardised with the training mean and deviation, and missing ones become the training median. Texts
    of up to 30 kinds become one indicator each; a missing text is a kind of its own. Columns that tell nothing are left
    out. `notes` says what was done. Whatever cannot be read is refused by column and row.

    Args:
        path: the file: UTF-8, a header, cells separated by commas, semicolons, tabs or bars.
        client_column: the column that names the client of each row.
        label: the column to predict: classes, as numbers or texts.
        test: a file of test examples with the same columns. Without it a fifth of every client's rows is kept.
        ignore: columns to leave out.

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
        _refuse_unknown(sheet, name)
    for name in (client_column, label):
        if [client_column, label, *ignore].count(name) > 1:
            raise CovaryError(
                f"Column {name} is asked for twice: it is the client's, the label's or left out. Choose one."
            )
    held_out = None if test is None else _read(checked_path("test", test))
    features = [name for name in sheet.header if name not in (client_column, label, UNNAMED, *ignore)]
    if held_out is not None:
        if held_out.path.samefile(sheet.path):
            raise CovaryError(f"{sheet.path} is both the training and the test file. Leave the test file out.")
        for name in (label, *features):
            _refuse_unknown(held_out, name, ", which the training file has")

    clients = _present(sheet, client_column, "nobody's. Say whose row it is, or leave it out.")
    names, owner = np.unique(clients, return_inverse=True)
    labels, y = _labels(sheet, label)
    notes = [*sheet.notes, *_look_alikes(client_column, names.tolist()), *_look_alikes(label, labels)]
    notes += [f"{len(labels)} classes: {_some(labels)}; {len(names)} clients: {_some(names.tolist())}"]
    in_test = _kept_for_testing(sheet.path, owner, y) if held_out is None else np.zeros(len(y), bool)
    columns = []
    for name in features:
        own, told = _feature(sheet, held_out, name, ~in_test)
        columns += own
        notes += told
    if not columns:
        why = f" ({'; '.join(notes[-5:])})" if features else ""
        raise CovaryError(
            f"{sheet.path} has no column to learn from besides {client_column} and {label}{why}. Add some."
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
        what = "a folder" if path.is_dir() else "no file" if path.exists() else "missing"
        raise CovaryError(f"{path} is {what}. Pass a CSV file.")
    if path.stat().st_size > LARGEST:
        raise CovaryError(
            f"{path} has {path.stat().st_size:,} bytes, and tables of at most {LARGEST:,} are read into memory. Stream "
            "larger data from a folder: FederatedData.write in Python."
        )
    content = content_of(path.resolve(), LARGEST)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        raise CovaryError(f"{path}, row {row}: not UTF-8. Save the file as UTF-8 (in Excel: CSV UTF-8).") from None
    if "\0" in text:
        row = text[: text.index("\0")].count("\n") + 1
        raise CovaryError(f"{path}, row {row}: no text. Pass a CSV file: a spreadsheet program can save as one.")
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
        raise CovaryError(f"{path}, row {at}: {error}. Look for a quotation mark that is not closed.") from None
    if len(rows) < 2:
        raise CovaryError(f"{path} has no rows. It needs a header and below it one row an example.")
    header, notes = rows[0], []
    if not header[0] and len(header) > 1:
        header = [UNNAMED, *header[1:]]
        notes.append("the first column has no name, as an index has none: left out")
    for at, name in enumerate(header):
        if not name:
            raise CovaryError(f"{path}: column {at + 1} of the header has no name. Name it, or remove the column.")
        if header.index(name) < at:
            raise CovaryError(f"{path}: two columns are named {name}. Rename one.")
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(header):
            raise CovaryError(
                f"{path}, row {number}: {len(row)} cells, where the header has {len(header)}. Look for a missing or "
                f"surplus {'tab' if delimiter == chr(9) else repr(delimiter)}, or put texts that contain one in quotes."
            )
    return Sheet(path, header, rows[1:], numbers[1:], delimiter != ",", notes)


def _refuse_unknown(sheet: Sheet, name: str, why: str = "") -> None:
    if name not in sheet.header:
        near = difflib.get_close_matches(str(name), sheet.header, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Its columns are {_some(sheet.header)}."
        raise CovaryError(f"{sheet.path} has no column {name}{why}. {fix}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _look_alikes(column: str, names: Sequence[str]) -> list[str]:
    """A word on names that differ by their case alone."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.casefold(), []).append(name)
    return [f"{column}: {' and '.join(kind)} are taken for different ones" for kind in kinds.values() if len(kind) > 1]


def _missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _present(sheet: Sheet, name: str, what: str) -> list[str]:
    """The names in a column, where 1.0 is 1, and none may be missing."""
    cells = sheet.column(name)
    for row, cell in enumerate(cells):
        if _missing(cell) and cell.lower() not in NAMES:
            why = f"{cell!r} stands for a missing value" if cell else "the cell is empty"
            raise sheet.wrong(name, row, f"{why}, so the row is {what}")
    return [re.sub(r"^(-?\d+)\.0+$", r"\1", cell) for cell in cells]


def _number(sheet: Sheet, cell: str) -> float | None:
    """The number that a text is, or None: 12.5, and where commas do not separate cells 12,5 and 1.012,5 too."""
    if sheet.comma and re.fullmatch(r"[-+]?(\d*|\d{1,3}(\.\d{3})+),\d*([eE][-+]?\d+)?", cell):
        cell = cell.replace(".", "").replace(",", ".")
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _labels(sheet: Sheet, name: str) -> tuple[list[str], np.ndarray]:
    """The classes in their order, and which of them each row is."""
    cells = _present(sheet, name, "of no class. Fill it in, or leave the row out.")
    kinds = set(cells)
    numbers = {kind: _number(sheet, kind) for kind in kinds}
    fractions = sum(value is not None and math.isfinite(value) and value % 1 != 0 for value in numbers.values())
    if len(kinds) > MOST_LABELS or fractions > 10:
        raise CovaryError(
            f"{sheet.path}, column {name}: {len(kinds)} different values, which look like measurements, not classes. "
            "covary's models classify: make classes of them (say, above and below a threshold), or use your own model "
            "in Python."
        )
    if len(kinds) == 1:
        raise CovaryError(f"{sheet.path}, column {name}: every row says {cells[0]!r}. There is nothing to learn.")
    if all(value is not None for value in numbers.values()):
        order = sorted(kinds, key=lambda kind: (numbers[kind], kind))
    else:
        order = sorted(kinds)
    index = {kind: k for k, kind in enumerate(order)}
    return order, np.array([index[cell] for cell in cells], np.int32)


def _known(sheet: Sheet, name: str, labels: list[str]) -> np.ndarray:
    """The classes of test rows, which the training rows must have."""
    cells, index = _present(sheet, name, "of no class. Fill it in, or leave the row out."), {}
    index = {kind: k for k, kind in enumerate(labels)}
    for row, cell in enumerate(cells):
        if cell not in index:
            shown = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
            raise sheet.wrong(name, row, f"{cell!r} is no class of the training file, which has {shown}. Correct it.")
    return np.array([index[cell] for cell in cells], np.int32)


def _kept_for_testing(path: Path, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A fifth of every client's rows, but none whose class would be missing from the training rows."""
    chosen, rng = np.zeros(len(y), bool), np.random.default_rng(0)
    for client in range(owner.max() + 1):
        rows = rng.permutation(np.flatnonzero(owner == client))
        chosen[rows[: len(rows) // FRACTION]] = True
    chosen &= np.isin(y, y[~chosen])
    if not chosen.any():
        raise CovaryError(
            f"{path}: no row can be kept for testing, as no client has {FRACTION} rows or each class is there once. "
            "Give a file of test rows: --test FILE.csv."
        )
    return chosen


Column = tuple[str, np.ndarray, np.ndarray]  # a feature's name, its values, and those of the test file


def _feature(sheet: Sheet, held_out: Sheet | None, name: str, trained: np.ndarray) -> tuple[list[Column], list[str]]:
    """A column as features, and a word on what was done to it."""
    cells = sheet.column(name)
    present = [cell for cell in cells if not _missing(cell)]
    counted = sum(_number(sheet, cell) is not None for cell in present)
    if not any(not _missing(cell) for cell, used in zip(cells, trained, strict=True) if used):
        return [], [f"{name} has no value in the training rows: left out"]
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
                fix = "Correct it, empty it if it is missing, or leave the column out with --ignore."
                many = f"as {counted} of the column's {present} values are" if file is sheet else "as in training"
                raise file.wrong(name, row, f"{cell!r} is not a number, {many}. {fix}")
            if value is not None and not abs(value) <= np.finfo(np.float32).max:
                raise file.wrong(name, row, f"{cell!r} is too large, or not finite. Correct it, or empty it.")
            values[row] = np.nan if value is None else value
        return values

    if any(re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+,\d*", cell) for cell in sheet.column(name)):
        for row, cell in enumerate(sheet.column(name)):
            if re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+", cell):
                raise sheet.wrong(
                    name, row, f"{cell!r} may have a point for thousands, as others do. Write it without."
                )
    values = values_of(sheet)
    later = np.empty(0) if held_out is None else values_of(held_out)
    seen = values[trained]
    median = float(np.median(seen[~np.isnan(seen)]))
    gaps = int(np.isnan(values).sum() + np.isnan(later).sum())
    notes = [f"{name}: {gaps} missing values became the median, {median:g}"] if gaps else []
    comma = next((cell for cell in sheet.column(name) if sheet.comma and "," in cell), None)
    notes += [f"{name}: commas are decimal, {comma} was read as {_number(sheet, comma):g}"] if comma else []
    values, later = (np.where(np.isnan(part), median, part) for part in (values, later))
    mean, deviation = values[trained].mean(), values[trained].std()
    if deviation == 0:
        return [], [*notes, f"{name} is the same in all training rows: left out"]
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
            f"{cells[0]!r} is one of {len(set(cells))} different texts, too many for a category (at most "
            f"{MOST_CATEGORIES}). Leave the column out with --ignore, or group its values.",
        )
    if len(kinds) == 1:
        return [], [f"{name} is the same in all training rows: left out"]
    unseen = sorted({cell for cell in [*cells, *later] if cell not in kinds})
    notes = [f"{name}: {', '.join(unseen)} only in test rows, counted as none of its kinds"] if unseen else []

    def indicator(kind: str, part: list[str]) -> np.ndarray:
        return np.array([float(cell == kind) for cell in part])

    columns = [(f"{name} = {kind}", indicator(kind, cells), indicator(kind, later)) for kind in kinds]
    return columns, [f"{name}: {len(kinds)} kinds, one indicator each", *notes]
