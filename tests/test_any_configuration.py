"""Any configuration, sensible or not, in the API and on the command line: it runs, or covary rejects it with a message.

`COVARY_CONFIGURATIONS` sets how many (10,000 take four minutes on two cores), `COVARY_SEED` which.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import traceback
import warnings
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import covary as cv
from covary.cli import app
from covary.running.checkpoint import CheckpointWarning

COUNT = int(os.environ.get("COVARY_CONFIGURATIONS", "120"))
SEED = int(os.environ.get("COVARY_SEED", "0"))
RAN: list[Path] = []
HANGS = 900  # seconds: longer than any small run takes, however busy the machine

ODD = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 10**30, -(10**30)),
        *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-320, 1e-30, 1e30, 1e308, float("nan"), float("inf"), -float("inf")),
        *("", "x", "0.1", "uniform", "disk", "\0", b"x", 1 + 2j, object(), print, int, Path("x"), range(3)),
        *([], [0.1], [[1, 2], [3]], (), (0.1, 0.2), {}, {"eta_l": 0.1}, {1}, np.float32(0.1), np.int64(2)),
        *(np.array(0.1), np.array([1, 2]), np.array(["a"]), np.array(None), np.array([np.nan]), np.zeros((0, 3))),
    ]
)


@st.composite
def configurations(draw, fields, odd=ODD):
    """Some of the fields with sensible values, and none, one or two of them with an odd one."""
    chosen = draw(st.fixed_dictionaries({}, optional={name: st.sampled_from(vs) for name, vs in fields.items()}))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        chosen[name] = draw(odd)
    return chosen


ALGORITHMS = {
    cv.sgd: {"eta_l": (0.1, 1e30)},
    cv.fedavg: {"eta_l": (0.1,), "eta_g": (1.0, 1e-30)},
    cv.fedprox: {"eta_l": (0.1,), "mu": (0.1, 1e9)},
    cv.scaffold: {"eta_l": (0.1, 1e3), "eta_g": (1.0,), "option": ("I", "II")},
    cv.dane: {"eta_l": (0.1,), "mu": (0.0, 1.0), "eta": (1.0,)},
    cv.vrl_sgd: {"eta_l": (0.1,)},
    cv.feddyn: {"eta_l": (0.1,), "alpha": (0.1, 1e-9)},
    cv.mime: {"eta_l": (0.1,)},
}
RUN = {
    "problem": (0, 1, 2, 3),
    "rounds": (1, 2, 3),
    "clients_per_round": (None, 2, 0.5),
    "local_steps": (None, 1, 2),
    "batch_size": (None, 1, 0.5),
    "x0": (None, None, None, 0.1),
    "warm_start": (False, False, True),
    "weights": ("uniform", "examples"),
    "target": (None, ("loss", 0.1), ("loss", "<=", 1), ("accuracy", 0.5)),
    "eval_every": (1, 2),
    "devices": (None, 1),
    "width": (None, 1),
    "precision": (None,),
    "checkpoint": (None, "saved"),
    "checkpoint_every": (1, 100),
}
ALONE = {
    "local_epochs": (None, None, None, 1),
    "seed": (0, 1),
    "average": (None, "uniform", 0.1),
    "store": (None, "device", "host", "disk"),
}
SWEPT = {
    "grid": ({"eta_l": [0.1, 1.0]}, {"eta_l": [0.1], "eta_g": [1.0]}, {"mu": [1]}, {"eta_l": ["x"]}),
    "seeds": ([0], [0, 1], (1,), np.array([3]), [0, 0], [-1], [0.5]),
    "race": (False, True),
    "at_once": (None, 1),
}


@functools.cache
def problems():
    rng = np.random.default_rng(0)

    def batch(n):
        return rng.normal(size=(n, 3)), rng.integers(0, 2, n)

    model, test = cv.models.logistic_regression(3, 2), batch(5)
    return (
        cv.supervised(model, cv.FederatedData.from_clients([batch(4) for _ in range(4)]), test),
        cv.supervised(model, cv.FederatedData.from_clients([batch(n) for n in (1, 2, 5)])),
        cv.quadratics(np.stack([np.eye(2), 2 * np.eye(2)]), np.ones((2, 2))),
        cv.lower_bound(1.0),
    )


@contextlib.contextmanager
def refused_or_fine(folder: Path):
    """It raises only covary's own errors, in reasonable time."""

    def stop(number, frame):
        raise AssertionError(f"still busy after {HANGS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS)
    where = Path.cwd()
    os.chdir(folder)  # relative paths among the odd values stay there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cv.DivergenceWarning)
            warnings.simplefilter("ignore", CheckpointWarning)
            yield
        RAN.append(folder)
    except cv.CovaryError:
        pass
    finally:
        os.chdir(where)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def many(share):
    """A share of all configurations."""

    def decorate(test):
        test = settings(
            max_examples=max(1, int(share * COUNT)),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )(test)
        return seed(SEED)(test)

    return decorate


def chosen_problem(run):
    which = run.pop("problem", 0)
    return problems()[which] if type(which) is int and 0 <= which < 4 else which


@many(0.5)
@given(factory=st.sampled_from(list(ALGORITHMS)), data=st.data(), run=configurations(RUN | ALONE))
def test_simulate(factory, data, run, tmp_path_factory):
    numbers = data.draw(configurations(ALGORITHMS[factory]))
    with refused_or_fine(tmp_path_factory.mktemp("any")):
        problem = chosen_problem(run)
        found = cv.simulate(factory(**{"eta_l": 0.1} | numbers), problem, **{"rounds": 2} | run)
        assert np.isfinite(found.x).all()
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in (*found.server, *found.clients))
        measured = found.history["round"] % run.get("eval_every", 1) == 0
        assert np.isfinite(found.history["loss"][measured]).all()
        assert found.rounds == run.get("rounds", 2) or found.reached or found.diverged


@many(0.15)
@given(run=configurations(RUN | SWEPT | {"factory": (cv.scaffold, cv.fedavg, cv.fedprox)}))
def test_sweep(run, tmp_path_factory):
    with refused_or_fine(tmp_path_factory.mktemp("any")):
        factory, problem = run.pop("factory", cv.scaffold), chosen_problem(run)
        found = cv.sweep(factory, problem, **{"rounds": 2, "grid": {"eta_l": [0.1]}} | run)
        assert {row["outcome"] for row in found.table} <= {"target", "diverged", "finished", "outpaced"}
        assert all(row["diverged"] or np.isfinite(row[f"last_{found.metrics[0]}"] or 0.0) for row in found.table)


X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 2, 2])
BUILDERS = [
    (cv.partition.by_similarity, {"x": (X,), "y": (Y,), "n_clients": (2, 3), "similarity": (0.0, 0.5), "seed": (0,)}),
    (cv.partition.iid, {"x": (X,), "y": (Y,), "n_clients": (2,), "seed": (0,)}),
    (cv.partition.dirichlet, {"x": (X,), "y": (Y,), "n_clients": (2,), "alpha": (0.3,), "seed": (0,)}),
    (cv.partition.by_group, {"x": (X,), "y": (Y,), "groups": (Y, list("aabbcc"))}),
    (cv.FederatedData, {"examples": ((X, Y), {"x": X}, X), "sizes": ([2, 4], [6])}),
    (cv.FederatedData.from_clients, {"clients": ([(X, Y)], [(X, Y), (X[:1], Y[:1])])}),
    (cv.models.logistic_regression, {"n_features": (2,), "n_classes": (3,)}),
    (cv.models.mlp, {"n_features": (2,), "hidden": (4,), "n_classes": (3,)}),
    (cv.models.cnn, {"n_classes": (3,), "side": (4, 8)}),
    (cv.quadratics, {"A": (np.stack([np.eye(2)] * 2),), "b": (np.ones((2, 2)),)}),
    (cv.lower_bound, {"G": (1.0, 0.0), "mu": (1.0,)}),
    (cv.datasets.emnist, {"root": (".",), "split": ("mnist",), "paper_white": (False,)}),
    (cv.datasets.heart_disease, {"path": (".",)}),
    (cv.FederatedData.open, {"folder": (".",), "stream": (None, True)}),
]


@many(0.2)
@given(data=st.data())
def test_builders(data, tmp_path_factory):
    build, arguments = data.draw(st.sampled_from(BUILDERS))
    given = {name: values[0] for name, values in arguments.items()} | data.draw(configurations(arguments))
    with refused_or_fine(tmp_path_factory.mktemp("any")):
        made = build(**given)
        if isinstance(made, cv.FederatedData):
            made = cv.supervised(cv.models.logistic_regression(2, 3), made)
        if isinstance(made, cv.Problem):
            cv.simulate(cv.scaffold(0.1), made, 1)


WORDS = st.sampled_from(
    [
        "",
        "x",
        "0",
        "1",
        "2",
        "-1",
        "0.5",
        "1.5",
        "1e-9",
        "1e999",
        "nan",
        "inf",
        "-inf",
        "1e30",
        "9" * 30,
        "1,2",
        ",",
        "ä",
    ]
)


TRAINING = {
    "--rounds": ("1", "2"),
    "--clients": ("2", "5"),
    "--similarity": ("0", "0.1", "1"),
    "--clients-per-round": ("0.5", "2"),
    "--local-steps": ("1",),
    "--batch-size": ("0", "0.2"),
    "--hidden": ("0", "3"),
    "--weights": ("uniform", "examples"),
    "--target": ("0.5",),
    "--checkpoint-every": ("1", "100"),
}
SINGLE = {"--eta-l": ("0.3", "1e30"), "--eta-g": ("1",), "--option": ("I", "II"), "--seed": ("0",)}
GRID = {"--eta-l": ("0.3", "0.1,1"), "--eta-g": ("1",), "--seeds": ("1", "2")}
NAMES = ("scaffold", "scaffold", "fedavg", "dane", "feddyn", "x")
COMMANDS = {
    "run": (NAMES, TRAINING | SINGLE | {"--mu": ("1",), "--local-epochs": ("1",)}),
    "sweep": (NAMES, TRAINING | GRID),
    "compare": ((), {"--target": ("0",), "--seeds": ("0",)}),  # long runs are rejected here
    "reproduce": (("table3", "table4", "x"), {"--seeds": ("1",), "--pixels": ("ink",), "--data": (".",)}),
    "diagnose": (("emnist", "x"), {"--clients": ("2",), "--similarity": ("0",), "--target": ("0.5",)}),
    "audit": ((".", "x"), {"--state": (".",)}),
}


@many(0.15)
@given(data=st.data())
def test_command_line(data, tmp_path_factory):
    command = data.draw(st.sampled_from(["run"] * 5 + ["sweep"] * 3 + sorted(COMMANDS)))
    names, options = COMMANDS[command]
    chosen = data.draw(configurations(options, WORDS))
    if command in ("run", "sweep"):
        chosen = {"--rounds": "2", "--clients": "2"} | chosen
    if command == "compare":
        chosen = {"--rounds": "-1"} | chosen
    args = [command, *([data.draw(st.sampled_from(names))] if names else [])]
    args += [word for pair in chosen.items() for word in pair]
    args += ["--warm-start"] if command in ("run", "sweep") and data.draw(st.booleans()) else []
    with refused_or_fine(tmp_path_factory.mktemp("any")):
        result = CliRunner().invoke(app, args)
        if isinstance(result.exception, cv.CovaryError):
            raise result.exception
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"{args}\n" + "".join(traceback.format_exception(result.exception)))
        assert result.exit_code != 0 or "nan" not in result.stdout.lower(), (args, result.stdout)
