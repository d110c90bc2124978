"""The paper's experiments in small, and every night their quick forms."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from helpers import DATA, covary, needs_data
from typer.testing import CliRunner

from covary.cli import app
from covary.errors import CovaryError
from covary.experiments import common, reproduce, table3, table4
from covary.experiments.common import Case, Cell
from covary.report.story import read
from covary.runs.folder import RunFolder


def reproduced(name, tmp_path):
    result = covary("reproduce", name, *([] if name == "fig3" else ["--quick", "--data", str(DATA)]), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    for suffix in (".md", ".json", ".png"):
        assert (folder / f"{name}{suffix}").stat().st_size > 0
    found = reproduce.outcome(RunFolder(folder))
    (story,) = read(folder)  # what the report shows without the experiment
    assert story.title == found.header["title"]
    assert story.claims == found.claims
    assert [[cell[0] for cell in row] for row in story.tables[0].rows] == found.table[1]
    return found


def verdicts(outcome):
    return {claim.text: claim.holds for claim in outcome.claims}


def test_fig3(tmp_path):
    found = verdicts(reproduced("fig3", tmp_path))
    assert [found[text] for text in found if text.startswith("FedAvg gets worse")] == [True, True]
    assert found["SCAFFOLD improves with more local steps: K = 10 is faster than K = 2, which is faster than SGD."]


@pytest.mark.nightly
@needs_data
def test_table3_quick(tmp_path):
    outcome = reproduced("table3", tmp_path)
    assert outcome.claims[0].holds, outcome.claims[0]  # SCAFFOLD needs the fewest rounds at 0 % similarity
    assert verdicts(outcome)["With i.i.d. clients more epochs never hurt FedAvg and SCAFFOLD."]
    header, body = outcome.table
    assert header == ["similarity", "algorithm", "1 epoch", "5 epochs"]
    assert len(body) == 12


@pytest.mark.nightly
@needs_data
def test_table4_quick(tmp_path):
    found = verdicts(reproduced("table4", tmp_path))
    assert found["SCAFFOLD is faster than FedAvg at every share at 0 % similarity."]
    assert found["scaffold slows down sub-linearly: 4 times fewer clients, under 4 times the rounds."]


@pytest.mark.nightly
@needs_data
def test_table5_quick(tmp_path):
    outcome = reproduced("table5", tmp_path)
    assert outcome.claims[0].holds, outcome.claims[0]  # SCAFFOLD, then FedAvg, then SGD


@needs_data
def test_scaffold_needs_fewer_rounds_than_fedavg_on_a_part_of_emnist():
    """The first claim of tables 3 and 4 in small: two cells of the quick form, at 0 % similarity."""
    budget = replace(table3.QUICK, clients=10, examples=1000, test_examples=300, rounds=80)
    todo = [Case("scaffold", 0.0), Case("fedavg", 0.0)]
    emnist = common.load_emnist(DATA, table3.PAPER_WHITE)
    scaffold, fedavg = common.measure_cells(emnist, budget, todo, table3.CENTRE, table3.QUICK_TARGET, network=False)
    assert scaffold.mean_rounds < fedavg.mean_rounds
    assert np.isfinite(scaffold.mean_rounds)


@pytest.mark.parametrize(("name", "rows"), [("table3", 12), ("table4", 4), ("table5", 3)])
def test_a_table_is_written_and_its_first_claim_is_scaffolds(name, rows, tmp_path):
    table, places = reproduce.TABLES[name], ["scaffold", "fedavg", "fedprox", "sgd"]

    def found(order):
        """What would be measured if the algorithms came in at these places."""
        at = {algorithm: 1 + order.index(algorithm) for algorithm in order}
        return [
            Cell(s, 0.1, [round(10 * at[s.algorithm] / (1 + s.similarity))], [0.9 - 0.1 * at[s.algorithm]], [], 1.0)
            for s in table.cases(quick=True)
        ]

    budget = asdict(table.QUICK)
    header = {"data": "made up", "quick": True, "command": "", "budget": budget, "device": "here", "versions": {}}
    outcome = reproduce.Outcome(
        name, header, table.as_table(found(places), 200), table.claims(found(places), 200), [], 1.0
    )
    assert outcome.claims[0].holds
    assert not table.claims(found(places[::-1]), 200)[0].holds
    assert len(outcome.table[1]) == rows
    outcome = replace(outcome, results=found(places))
    for path in reproduce.write_up(outcome, tmp_path):
        assert path.stat().st_size > 0


def cells(rounds):
    for (algorithm, similarity), numbers in rounds.items():
        for fraction, number in zip(table4.FRACTIONS, numbers, strict=True):
            yield Cell(Case(algorithm, similarity, 5, fraction), 0.1, [number], [0.5], [], 1.0)


def test_the_papers_own_numbers_satisfy_its_claims():
    """The checks are neither too strict nor too weak: the paper's table passes, and its inversion does not."""
    paper = list(cells(table4.PAPER))
    assert [claim.holds for claim in table4.claims(paper, 1000)] == [True, True, True, None, True]
    hopeless = list(cells(dict.fromkeys(table4.PAPER, (None, None, None))))
    assert {claim.holds for claim in table4.claims(hopeless, 1000)} == {None}
    swapped = {(("fedavg" if a == "scaffold" else "scaffold"), s): n for (a, s), n in table4.PAPER.items()}
    assert table4.claims(list(cells(swapped)), 1000)[0].holds is False


def test_a_best_step_size_at_the_end_of_the_grid_is_not_trusted(monkeypatch):
    """The grid is extended until the best lies inside it."""
    tried = []

    class Fake:
        def __init__(self, grid):
            self.table = [
                {"eta_l": e, "reached": round(100 * (1 + abs(np.log10(e) - 1))), "best_accuracy": 0.5} for e in grid
            ]

    def attempt(case, problem, budget, grid, rounds, target, log, checkpoint):
        tried.append(list(grid))
        return Fake(grid)

    monkeypatch.setattr(common, "attempt", attempt)
    cell = common.tune(Case("sgd", 0.0), None, common.Budget(step_sizes=3), centre=0.1, target=0.5)  # type: ignore[arg-type]
    assert cell.eta_l == 10.0
    assert tried == [[0.0316, 0.1, 0.316], [1.0], [3.16], [10.0], [31.6]]


@needs_data
def test_an_interrupted_table_is_resumed_and_rejects_other_options(tmp_path, monkeypatch):
    monkeypatch.setattr(
        table4, "QUICK", common.Budget(clients=5, examples=300, test_examples=50, rounds=2, seeds=(0,), step_sizes=2)
    )
    folder = RunFolder(tmp_path)
    folder.settle({"command": "reproduce", "experiment": "table4"})
    first = reproduce.run_table("table4", DATA, folder, "covary reproduce table4 --quick", quick=True)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(CovaryError, match=r"lacks 6 cells. Finish it: covary reproduce table4 .*--checkpoint"):
        reproduce.outcome(folder)
    with pytest.raises(CovaryError, match="was started with budget"):
        next(reproduce.run_table("table4", DATA, folder, "", quick=True, seeds=2))
    (story,) = read(tmp_path)
    assert [len(table.rows) for table in story.tables] == [2]
    assert story.claims == []
    with folder.results.open("a") as file:
        file.write('{"kind": "cell", "setti')  # killed in the middle of a line
    rest = list(reproduce.run_table("table4", DATA, folder, "", quick=True))
    assert rest == list(range(2, 9))
    assert len(reproduce.outcome(folder).results) == 8
    finished = folder.results.read_text()
    assert list(reproduce.run_table("table4", DATA, folder, "", quick=True)) == [8]
    assert folder.results.read_text() == finished
    (story,) = read(tmp_path)
    assert [len(table.rows) for table in story.tables] == [4, 8]
    assert story.claims == reproduce.outcome(folder).claims
    page, data, _ = reproduce.write_up(reproduce.outcome(folder), tmp_path)
    assert "Quick form, not the paper's scale: 300 examples" in page.read_text()
    assert len(json.loads(data.read_text())["results"]) == 8


def test_errors(tmp_path):
    for args, says in [
        (["reproduce", "table9"], "EXPERIMENT must be one of"),
        (["reproduce", "table3", "--pixels", "blue"], "--pixels must be"),
        (["reproduce", "table4", "--resume"], "--resume needs --checkpoint"),
        (["reproduce", "table4", "--resume", "--checkpoint", str(tmp_path / "nowhere")], "holds no run to resume"),
        (["reproduce", "table3", "--out", "/dev/null/x"], "A run folder cannot be created in /dev/null/x"),
        (["data", "show", "digits", "--out", str(tmp_path / "no" / "a.png")], "--out must be a .png file"),
        (["data", "show", "digits", "--seed", "-1"], "seed must be"),
        (["data", "show", "heart-disease", "--clients", "3"], "The clients of heart-disease are its hospitals"),
        (["data", "emnist", "--root", "x", "--split", "cursive"], "--split must be"),
        (["sweep", "scaffold", "--eta-l", "0.1,fast"], "--eta-l must be numbers separated by commas"),
        (["sweep", "scaffold", "--race"], "race=True needs a target"),
        (["reproduce", "table3", "--data", str(tmp_path), "--out", str(tmp_path)], "is missing. Fetch it with"),
    ]:
        result = CliRunner().invoke(app, args)
        assert isinstance(result.exception, CovaryError), args
        assert says in str(result.exception)
