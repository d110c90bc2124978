"""A user's own table: it becomes arrays, or an error names the column and the row."""

import csv

import numpy as np
import pytest
from helpers import DATA, needs_data
from typer.testing import CliRunner

import covary as cv
from covary.cli import app
from covary.errors import CovaryError

HEADER = "hospital,age,sex,outcome"
ROWS = [f"{'north' if i % 3 else 'south'},{30 + i},{'mf'[i % 2]},{'ill' if i % 4 == 0 else 'well'}" for i in range(30)]


def written(path, *rows, header=HEADER):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def read(path, **options):
    return cv.datasets.table(path, client_column="hospital", label="outcome", **options)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "patients.csv"


def test_a_table_becomes_features_classes_and_clients(file):
    found = read(written(file, *ROWS))
    x, y, client = found.train
    assert found.features == ["age", "sex = f", "sex = m"]
    assert (found.labels, found.clients) == (["ill", "well"], ["north", "south"])
    assert len(y) + len(found.test[1]) == 30
    assert [len(np.flatnonzero(client == k)) for k in (0, 1)] == [16, 8]  # a fifth of 20 and of 10 is held out
    np.testing.assert_allclose(x[:, 0].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, 0].std(), 1, atol=1e-6)
    np.testing.assert_array_equal(x[:, 1] + x[:, 2], 1)
    again = read(file)
    np.testing.assert_array_equal(again.train[0], x)


def test_whatever_stands_for_a_missing_value_becomes_the_training_median(file):
    marks = ["", "NA", "n/a", "nan", "NULL", "none", "?"]
    rows = [*ROWS, *(f"north,{mark},m,well" for mark in marks)]
    found = read(written(file, *rows))
    age = np.concatenate([found.train[0][:, 0], found.test[0][:, 0]])
    assert len(set(np.round(age, 5))) <= 31  # thirty ages, and one for all that are missing
    assert any(note.startswith("age: 7 missing values replaced by the median") for note in found.notes)


def test_a_missing_text_is_a_kind_of_its_own(file):
    found = read(written(file, *ROWS, *["north,40,,well"] * 10))
    assert "sex = (missing)" in found.features


def test_numbers_with_a_decimal_comma_and_other_separators(tmp_path):
    semicolons = written(
        tmp_path / "a.csv",
        *(row.replace(",", ";").replace("3", "3,", 1) for row in ROWS),
        header=HEADER.replace(",", ";"),
    )
    dots = written(tmp_path / "b.csv", *(row.replace("3", "3.", 1) for row in ROWS))
    tabs = written(
        tmp_path / "c.tsv",
        *(row.replace(",", "\t").replace("3", "3.", 1) for row in ROWS),
        header="\t".join(HEADER.split(",")),
    )
    dots.write_bytes(b"\xef\xbb\xbf" + dots.read_bytes().replace(b"\n", b"\r\n"))  # as Excel writes it
    for other in (semicolons, tabs):
        np.testing.assert_array_equal(read(other).train[0], read(dots).train[0])


def test_rows_are_counted_as_an_editor_counts_them(file):
    rows = ['north,40,"m\n",well', "", *ROWS, "north,oops,m,well"]
    with pytest.raises(CovaryError, match=r"column age, row 35: 'oops' is not a number, unlike 31 of the column's 32"):
        read(written(file, *rows))


@pytest.mark.parametrize(
    ("rows", "header", "says"),
    [
        ([*ROWS, "north,4x,m,well"], HEADER, r"column age, row 32: '4x' is not a number"),
        ([*ROWS, "north,inf,m,well"], HEADER, r"column age, row 32: 'inf' is too large or not finite"),
        ([*ROWS, ",40,m,well"], HEADER, r"column hospital, row 32: the cell is empty, so the row has no client"),
        (
            [*ROWS, "north,40,m,?"],
            HEADER,
            r"column outcome, row 32: '\?' means a missing value, so the row has no label",
        ),
        ([*ROWS, "north,40,m"], HEADER, r"row 32: 3 cells, but the header has 4"),
        ([*ROWS, 'north,40,"m,well'], HEADER, r"row 32: .*quotation mark"),
        (
            [f"north,{i},name {i},{i % 2}" for i in range(40)],
            HEADER,
            r"column sex, row 2: 'name 0' is one of 40 different",
        ),
        (
            [f"north,{i},m,{i / 7}" for i in range(40)],
            HEADER,
            r"column outcome: 40 different values look like measurements",
        ),
        ([f"north,{i},m,1" for i in range(40)], HEADER, r"column outcome: every row is '1'"),
        (
            [f"{i},{i},m,{i % 2}" for i in range(40)],
            HEADER,
            r"no row can be held out for testing, because no client has",
        ),
        (ROWS, "hospital,age,age,outcome", r"two columns are named age"),
        (ROWS, "hospital,,sex,outcome", r"column 2 of the header has no name"),
        ([*ROWS, "north,1_0,m,well"], HEADER, r"column age, row 32: '1_0' is not a number"),
        ([], HEADER, r"has no rows"),
        (["north,1,m,a", "north,1,m,b"] * 9, HEADER, r"no usable feature column"),
    ],
)
def test_unreadable_cells_are_rejected_by_column_and_row(file, rows, header, says):
    with pytest.raises(CovaryError, match=says):
        read(written(file, *rows, header=header))


def test_a_file_that_is_not_text_is_rejected(file):
    file.write_bytes(b"hospital,outcome\nnorth,\xe9\n")
    with pytest.raises(CovaryError, match="row 2: the text is not UTF-8"):
        read(file)
    file.write_bytes(b"PK\x03\x04\0\0")
    with pytest.raises(CovaryError, match="row 1: this is not text"):
        read(file)


def test_a_test_file_must_match_the_training_file(tmp_path, file):
    written(file, *ROWS)
    test = written(tmp_path / "test.csv", "north,41,m,ill", "west,42,x,well")
    found = read(file, test=test)
    assert found.test[0].shape == (2, 3)
    assert found.test[1].tolist() == [0, 1]
    assert found.test[0][1, 1:].tolist() == [0, 0]  # an unseen kind is none of those that are known
    assert any("x only in test rows" in note for note in found.notes)
    with pytest.raises(CovaryError, match=r"test.csv, column outcome, row 3: 'dead' is not a class of"):
        read(file, test=written(test, "north,41,m,ill", "north,42,m,dead"))
    with pytest.raises(CovaryError, match="has no column sex, which the training file has"):
        read(file, test=written(test, "north,41,ill", header="hospital,age,outcome"))


def test_columns_are_named_as_the_header_does(file):
    written(file, *ROWS)
    with pytest.raises(CovaryError, match="Did you mean hospital"):
        cv.datasets.table(file, client_column="Hospitl", label="outcome")
    with pytest.raises(CovaryError, match="Column hospital is named twice"):
        cv.datasets.table(file, client_column="hospital", label="hospital")
    assert read(file, ignore=["sex"]).features == ["age"]


def test_names_are_what_they_look_like(tmp_path, file):
    """1.0 is 1, inf and none are classes as any, and names that differ only in case get a note."""
    rows = [f"{['1', '1.0', '2'][i % 3]},{i},m,{['inf', 'none'][i % 2]}" for i in range(30)]
    found = read(written(file, *rows))
    assert (found.clients, found.labels) == (["1", "2"], ["inf", "none"])
    assert "2 classes: inf, none; 2 clients: 1, 2" in found.notes
    test = written(tmp_path / "test.csv", "1,3,m,0.0", "1,3,m,1.0")
    numbered = [f"a,{i},m,{i % 2}" for i in range(30)]
    assert read(written(file, *numbered), test=test).test[1].tolist() == [0, 1]
    cases = [f"{['North', 'NORTH'][i % 2]},{i},m,{i % 2}" for i in range(30)]
    assert "hospital: NORTH and North differ only in case and count as different" in read(written(file, *cases)).notes


def test_what_spreadsheets_and_pandas_add_is_left_out(file):
    rows = [f"{i},{row}" for i, row in enumerate(ROWS)]
    found = read(written(file, *rows, header=f",{HEADER}"))
    assert found.features == ["age", "sex = f", "sex = m"]
    assert "the first column has no name: ignored as an index" in found.notes
    semicolons = [row.replace(",", ";") for row in ROWS]
    found = read(written(file, HEADER.replace(",", ";"), *semicolons, header="sep=;"))
    assert found.features == ["age", "sex = f", "sex = m"]
    thousands = [f"north;{i + 1}.012,5;m;{i % 2}" for i in range(30)]
    found = read(written(file, *thousands, header=HEADER.replace(",", ";")))
    assert "age: decimal commas, 1.012,5 is read as 1012.5" in found.notes


def test_commas_in_numbers_are_read_or_rejected(file):
    header = HEADER.replace(",", ";")
    rows = [f"north;{number};m;{i % 2}" for i, number in enumerate([",5", "2,5e3", "7", "-1,25"] * 8)]
    assert read(written(file, *rows, header=header)).features == ["age"]
    rows += ["north;1.012,5;m;1", "north;1.013;m;0"]
    with pytest.raises(CovaryError, match=r"column age, row 35: '1.013' is ambiguous"):
        read(written(file, *rows, header=header))
    tabs = [row.replace(",", "\t") for row in ROWS]
    assert read(written(file, HEADER.replace(",", "\t"), *tabs, header="sep=\t")).clients == ["north", "south"]


def test_the_training_file_is_no_test_file(file):
    with pytest.raises(CovaryError, match="is both the training and the test file"):
        read(written(file, *ROWS), test=file)


def test_a_messy_table_is_trained_on_from_the_command_line(file, tmp_path):
    """Missing values, texts, an empty column, a constant one, and a client with one row."""
    rows = [f"{row},,7" for row in ROWS] + ["lonely,33,,ill,,7", "north,,f,well,,7"]
    written(file, *rows, header=f"{HEADER},empty,constant")
    base = ["--client-column", "hospital", "--label", "outcome", "--out", str(tmp_path / "runs"), "--rounds", "3"]
    for more in (["run"], ["run", "fedavg", "--hidden", "4"], ["sweep", "--eta-l", "0.1,1", "--seeds", "1"]):
        done = CliRunner().invoke(app, [more[0], *more[1:], "--data", str(file), *base])
        assert done.exit_code == 0, done.output
        assert "empty: no value in the training rows, ignored" in done.stderr
        assert "constant: constant in the training rows, ignored" in done.stderr
    report = sorted((tmp_path / "runs").iterdir())[0] / "report.html"
    assert "lonely" in report.read_text()


@needs_data
def test_the_hospitals_as_a_table_learn_what_the_hospitals_do(tmp_path):
    with np.load(DATA / "fed-heart-disease.npz") as stored:
        x, y, site = stored["X"], stored["y"], stored["site"]
    path = tmp_path / "hospitals.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", *(f"f{k}" for k in range(13)), "outcome"])
        for row, label, at in zip(x, y, site, strict=True):
            writer.writerow([f"site {at}", *("" if np.isnan(v) else v for v in row), "disease" if label else "healthy"])
    table = cv.datasets.table(path, client_column="hospital", label="outcome")
    (own, _, _), _ = cv.datasets.heart_disease(DATA / "fed-heart-disease.npz")
    assert table.train[0].shape == own.shape
    data = cv.partition.by_group(*table.train)
    problem = cv.supervised(cv.models.logistic_regression(13, 2), data, table.test)
    run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=30, local_epochs=5, batch_size=0.2)
    assert run.history["accuracy"][-1] > 0.75
