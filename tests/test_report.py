"""The report page as its reader sees it, in a real browser."""

import json
import re
import threading
import urllib.request

import numpy as np
import pytest
from browser import AXE, needs_axe, needs_browser, opened
from helpers import covary
from typer.testing import CliRunner

import covary as cv
from covary.cli import app
from covary.errors import CovaryError
from covary.report.page import page, write_page
from covary.report.serve import server
from covary.report.story import read
from covary.runs.folder import RunFolder

ROUNDS = 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of two runs, and of a sweep."""
    out = tmp_path_factory.mktemp("runs")
    common = ["--clients", "8", "--rounds", str(ROUNDS), "--out", str(out), "--quiet"]
    commands = (
        ["run", "scaffold", "--eta-l", "1", "--similarity", "0.1"],
        ["run", "fedavg", "--eta-l", "1", "--similarity", "0.1"],
        ["sweep", "scaffold", "--eta-l", "0.1,1", "--seeds", "2", "--target", "0.8"],
    )
    for command in commands:
        result = CliRunner().invoke(app, [*command, *common])
        assert result.exit_code == 0, result.output
    return sorted(out.iterdir(), key=lambda path: ("sweep" in path.name, "fedavg" in path.name))


@pytest.fixture(scope="module")
def both(folders, tmp_path_factory):
    """The address of the page of the two runs."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(folders[:2], path)
    return path.as_uri()


def history(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def two_rounds(parent):
    """The folder of a run with two rounds so far, and no count of bytes."""
    folder = RunFolder(parent / "going")
    folder.path.mkdir()
    folder.settle({"command": "run", "algorithm": "sgd", "target": None})
    for number in (1, 2):
        folder.append({"round": number, "loss": 1 / number, "accuracy": 0.1 * number})
    return folder


def drawn(opened_page):
    """The names of the curves in the first plot."""
    paths = opened_page.locator(".plot").first.locator("path.line")
    return sorted(paths.nth(i).get_attribute("data-line") for i in range(paths.count()))


def test_every_run_has_a_complete_report(folders):
    for folder in folders:
        text = (folder / "report.html").read_text()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    text = (folders[0] / "report.html").read_text()
    assert "covary run scaffold --eta-l 1.0 --rounds 15 --clients 8 --similarity 0.1" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    keys = [metric["key"] for metric in data["metrics"]]
    assert keys == ["accuracy", "loss", "drift", "control_change", "control_error"]
    (line,) = data["panels"][0]["lines"]
    records = history(folders[0])
    for key in keys:
        np.testing.assert_allclose(line["values"][key]["mean"], [r[key] for r in records], rtol=1e-4)
    sent = np.cumsum([r["bytes_up"] + r["bytes_down"] for r in records])
    np.testing.assert_allclose(line["sent"], sent, rtol=1e-4)
    assert text.count("<figcaption>client ") == 8


@needs_browser
def test_a_curve_is_hidden_and_shown_by_mouse_and_by_keys(both):
    with opened(both) as shown:
        assert drawn(shown) == ["fedavg", "scaffold"]
        button = shown.locator("#legend").get_by_role("button", name="fedavg")
        button.click()
        assert drawn(shown) == ["scaffold"]
        assert button.get_attribute("aria-pressed") == "false"
        button.focus()
        shown.keyboard.press("Enter")
        assert drawn(shown) == ["fedavg", "scaffold"]


@needs_browser
def test_the_table_sorts_both_ways(both):
    with opened(both) as shown:
        names = shown.locator("#targets tbody tr td:first-child")
        heading = shown.get_by_role("columnheader", name="rounds")
        rounds = shown.locator("#targets tbody tr td:nth-child(3)")

        def sorted_by_rounds():
            return [float(rounds.nth(i).get_attribute("data-value") or "inf") for i in range(names.count())]

        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == "ascending"
        up = sorted_by_rounds()
        assert up == sorted(up)
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == "descending"
        assert sorted_by_rounds() == up[::-1]


@needs_browser
def test_values_are_read_off_and_zoomed_into_by_mouse_and_by_keys(both, folders):
    with opened(both) as shown:
        plot = shown.locator(".plot").first
        box = plot.bounding_box()

        def ticks():
            return plot.locator("text").all_text_contents()

        everything = ticks()
        plot.focus()
        for _ in range(60):
            shown.keyboard.press("ArrowRight")
        told = shown.locator(".tip").first.inner_text()
        assert f"round {ROUNDS}" in told
        assert f"{history(folders[0])[-1]['accuracy']:.4g}" in told
        shown.keyboard.press("+")
        assert ticks() != everything
        shown.keyboard.press("0")
        assert ticks() == everything
        y = box["y"] + box["height"] / 2
        shown.mouse.move(box["x"] + 0.4 * box["width"], y)
        shown.mouse.down()
        shown.mouse.move(box["x"] + 0.7 * box["width"], y, steps=4)
        shown.mouse.up()
        assert ticks() != everything
        shown.get_by_role("button", name="Show everything").click()
        assert ticks() == everything
        shown.get_by_label("bytes sent").check()
        assert "bytes sent, both ways" in ticks()


@needs_browser
@needs_axe
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_nothing_serious_is_in_the_way_of_anyone(both, width, scheme, tmp_path):
    with opened(both, width, color_scheme=scheme) as shown:
        shown.evaluate(AXE.read_text() + "; null")
        found = shown.evaluate("axe.run().then((found) => found.violations)")
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert serious == []
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        picture = shown.screenshot(full_page=True, path=tmp_path / "page.png")
        assert picture[:4] == b"\x89PNG"


@needs_browser
def test_names_from_a_folder_stay_text(folders, tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    folder = RunFolder(tmp_path / "evil")
    folder.path.mkdir()
    folder.settle({"command": "run", "algorithm": evil, "target": None, evil: evil})
    folder.describe(command=evil, problem=evil, clients=[{"title": evil, "clients": 1, "examples": 1, "counts": [[1]]}])
    folder.append({"round": 1, "accuracy": 0.5, evil: 1.0})
    write_page([folder.path, folders[0]], tmp_path / "report.html")
    with opened((tmp_path / "report.html").as_uri()) as shown:
        assert shown.locator("img").count() == 0
        assert evil in shown.locator("#configuration").inner_text()


@needs_browser
def test_a_served_page_follows_a_run_and_answers_to_its_own_name_only(folders, tmp_path):
    folder = two_rounds(tmp_path)
    with server([folder.path]) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{serving.server_port}/"
        with opened(where) as shown:
            assert "not in" not in shown.locator("#targets").inner_text()
            shown.get_by_label("logarithmic").check()
            shown.evaluate("zoom([1.2, 1.8])")
            shown.locator(".plot").first.focus()
            folder.append({"round": 3, "loss": 0.1, "accuracy": 0.9})
            shown.wait_for_function("data.panels[0].lines[0].round.length == 3")
            assert shown.get_by_label("logarithmic").is_checked()
            assert shown.evaluate("view.range") == [1.2, 1.8]  # the page was not reloaded
            assert shown.evaluate("document.activeElement.classList.contains('plot')")
        request = urllib.request.Request(where, headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request)
        assert refusal.value.code == 403
        refusal.value.close()
        serving.shutdown()


def test_runs_of_one_algorithm_have_different_names(folders, tmp_path):
    text = page([folders[0], folders[2]])
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    names = {line["name"] for panel in data["panels"] for line in panel["lines"]}
    assert names == {"scaffold", "scaffold, eta_l = 0.1", "scaffold, eta_l = 1"}
    twice = json.loads(re.search(r'id="data">(.*?)</script>', page([folders[0], folders[0]]))[1])
    assert len({line["name"] for line in twice["panels"][0]["lines"]}) == 2


def test_the_report_names_runs_that_diverged(tmp_path):
    common = ["--clients", "4", "--hidden", "4", "--rounds", "3", "--out", str(tmp_path), "--quiet"]
    run = CliRunner().invoke(app, ["run", "scaffold", "--eta-l", "1e300", *common])
    swept = CliRunner().invoke(app, ["sweep", "scaffold", "--eta-l", "1e300", "--seeds", "1", "--json", *common])
    assert (run.exit_code, swept.exit_code) == (1, 1)
    assert json.loads(swept.stdout)["best"] is None
    first, second = sorted(tmp_path.iterdir(), key=lambda path: "sweep" in path.name)
    assert "Diverged in round 1: the step-size is too large." in (first / "report.html").read_text()
    assert (second / "report.html").read_text().count("<td>diverged</td>") == 1


def test_folders_without_a_report_are_left_out(folders, tmp_path):
    bench = RunFolder(tmp_path / "bench")
    bench.path.mkdir()
    bench.append({"kind": "header", "quick": True})
    assert "scaffold" in page([bench.path, folders[0]])
    with pytest.raises(CovaryError, match="not a run folder of run, sweep, compare, reproduce, diagnose"):
        page([bench.path])


@pytest.mark.parametrize(
    "clients", [5, [5], [{"title": "x"}], [{"title": "x", "clients": 1, "examples": 1, "counts": []}]]
)
def test_damaged_facts_are_rejected(folders, tmp_path, clients):
    folder = two_rounds(tmp_path)
    folder.describe(clients=clients)
    with pytest.raises(CovaryError, match="has unexpected contents"):
        page([folder.path])


OUTCOME = {
    "kind": "outcome",
    "header": ["algorithm", "rounds"],
    "rows": [["sgd", "9"]],
    "claims": [{"text": "It holds.", "holds": True, "evidence": "9"}],
    "note": "",
}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [["sgd"]]},
        {"rows": 5},
        {"header": None},
        {"claims": [{"text": "It holds."}]},
        {"claims": [{"text": "It holds.", "holds": "yes", "evidence": ""}]},
        {"kind": "cell", "name": "sgd", "eta_l": 10**400, "seconds": 1, "accuracy": [1], "rounds": [1]},
        {"kind": "cell", "name": "sgd", "eta_l": 1, "seconds": 1, "accuracy": [], "rounds": [1]},
        {"kind": "curve", "name": "sgd", "panel": "G = 1", "f": [[]]},
    ],
)
def test_damaged_records_of_an_experiment_are_rejected(change, tmp_path):
    for name, own in (("whole", {}), ("damaged", change)):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.settle({"command": "reproduce", "experiment": "table3"})
        folder.append({"kind": "header", "title": "Table 3", "data": "digits"})
        folder.append(OUTCOME | own)
    assert "holds</span>: It holds." in page([tmp_path / "whole"])
    with pytest.raises(CovaryError, match="has unexpected contents"):
        page([tmp_path / "damaged"])


@needs_browser
def test_lines_without_bytes_are_not_drawn_by_bytes(folders, tmp_path):
    folder = two_rounds(tmp_path)
    for chosen in ([folder.path], [folder.path, folders[0]]):
        write_page(chosen, tmp_path / "report.html")
        with opened((tmp_path / "report.html").as_uri()) as shown:
            assert shown.get_by_label("bytes sent").is_visible() == (len(chosen) == 2)
            if len(chosen) == 2:
                shown.get_by_label("bytes sent").check()
                assert shown.locator("path.line").count() > 0


def test_a_report_of_runs_made_in_python(tmp_path):
    runs = {name: cv.simulate(make(0.1), cv.lower_bound(10.0), 9, local_steps=5, x0=1.0) for name, make in
            (("fedavg", cv.fedavg), ("scaffold", cv.scaffold))}  # fmt: skip
    cv.write_report(tmp_path / "report.html", runs, target=("loss", 0.5))
    text = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    for line in data["panels"][0]["lines"]:
        np.testing.assert_allclose(line["values"]["loss"]["mean"], runs[line["name"]].history["loss"], rtol=1e-4)
    assert "Rounds to loss 0.5" in text
    for wrong in ({}, [runs["scaffold"]], {"x": 3}):
        with pytest.raises(CovaryError, match="runs must be a dict"):
            cv.write_report(tmp_path / "report.html", wrong)
    for wrong in (("accuracy", 0.5), 0.9, ("loss", "x"), ("cohort", 1)):
        with pytest.raises(CovaryError, match="target must be a column"):
            cv.write_report(tmp_path / "report.html", runs, target=wrong)


def test_a_folder_without_a_run_is_rejected(tmp_path):
    with pytest.raises(CovaryError, match="is not a run folder"):
        read(tmp_path)
    done = covary("report", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere is not a run folder" in done.stderr
