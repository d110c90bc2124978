"""A sweep is many simulations at once, and nothing else."""

import numpy as np
import pytest
from helpers import random_quadratics, small_logistic

import covary as cv

A, b = random_quadratics(N=6, d=4)
PROBLEM = cv.quadratics(A, b)
SETTINGS = {"clients_per_round": 2, "local_steps": 3}


@pytest.mark.parametrize(
    "factory",
    [cv.sgd, cv.scaffold, cv.feddyn, cv.mime],  # no step; one exchange; a number that a client keeps; two exchanges
)
def test_every_member_is_what_simulate_gives(factory):
    problem = small_logistic([5, 8, 6, 7])
    settings = {"rounds": 30, "clients_per_round": 2, "local_epochs": 2, "batch_size": 2}
    tried = cv.sweep(factory, problem, {"eta_l": [0.01, 0.1, 0.3]}, seeds=[0, 5], **settings)
    for p, point in enumerate(tried.points):
        for s, seed in enumerate(tried.seeds):
            run = cv.simulate(factory(**point), problem, seed=seed, **settings)
            for name in ("accuracy", "drift"):
                np.testing.assert_allclose(tried.curves[name][p, s], run.history[name], rtol=1e-8, atol=1e-10)


def test_the_grid_is_every_combination():
    grid = {"eta_l": [0.01, 0.1], "eta_g": [0.5, 1.0, 2.0]}
    tried = cv.sweep(cv.fedavg, PROBLEM, grid, rounds=5, **SETTINGS)
    assert tried.points == [{"eta_l": a, "eta_g": b} for a in grid["eta_l"] for b in grid["eta_g"]]
    assert [(row["eta_l"], row["eta_g"], row["seed"], row["rounds"]) for row in tried.table] == [
        (p["eta_l"], p["eta_g"], 0, 5) for p in tried.points
    ]
    run = cv.simulate(cv.fedavg(0.1, 2.0), PROBLEM, 5, **SETTINGS)
    assert tried.table[-1]["last_loss"] == pytest.approx(run.history["loss"][-1], rel=1e-9)


def test_a_diverging_member_does_not_disturb_the_others():
    alone = cv.sweep(cv.scaffold, PROBLEM, {"eta_l": [0.05]}, rounds=200, **SETTINGS)
    beside = cv.sweep(cv.scaffold, PROBLEM, {"eta_l": [0.05, 1e3]}, rounds=200, **SETTINGS)
    np.testing.assert_allclose(beside.curves["loss"][0], alone.curves["loss"][0], rtol=1e-8)
    good, bad = beside.table
    assert (good["outcome"], bad["outcome"]) == ("finished", "diverged")
    with pytest.warns(cv.DivergenceWarning):
        assert bad["diverged"] == cv.simulate(cv.scaffold(1e3), PROBLEM, 200, **SETTINGS).diverged
    assert np.isnan(beside.curves["loss"][1, 0, bad["rounds"] :]).all()
    assert np.isfinite(beside.curves["loss"][1, 0, : bad["rounds"]]).all()


def test_members_stop_at_the_target_and_the_fastest_is_best():
    problem = cv.lower_bound(G=10.0)
    settings = {"rounds": 200, "local_steps": 2, "x0": 1.0, "target": ("loss", 1e-6)}
    tried = cv.sweep(cv.scaffold, problem, {"eta_l": [0.03, 0.1, 0.2]}, **settings)
    alone = [cv.simulate(cv.scaffold(e), problem, **settings).reached for e in (0.03, 0.1, 0.2)]
    assert [row["reached"] for row in tried.table] == alone
    assert tried.mean_rounds().tolist() == alone
    assert tried.best() == int(np.argmin(alone))
    ends = np.isfinite(tried.curves["loss"][:, 0]).sum(axis=1)
    assert ends.tolist() == alone


def test_a_race_finds_the_same_winner_in_fewer_rounds():
    grid = {"eta_l": [0.001, 0.003, 0.01, 0.1, 0.15]}
    settings = {"rounds": 2000, "local_steps": 2, "x0": 1.0, "target": ("loss", 1e-6), "seeds": [0, 1]}
    whole, race = (cv.sweep(cv.scaffold, cv.lower_bound(10.0), grid, race=r, **settings) for r in (False, True))
    assert race.best() == whole.best()
    assert race.mean_rounds()[race.best()] == whole.mean_rounds()[whole.best()]
    assert race.table[0]["outcome"] == "outpaced"
    assert sum(row["rounds"] for row in race.table) < sum(row["rounds"] for row in whole.table) / 5


def test_groups_that_fit_memory_change_nothing():
    grid = {"eta_l": [0.01, 0.02, 0.05, 0.1, 0.2]}
    whole = cv.sweep(cv.scaffold, PROBLEM, grid, rounds=10, seeds=[0, 1], **SETTINGS)
    parts = cv.sweep(cv.scaffold, PROBLEM, grid, rounds=10, seeds=[0, 1], at_once=2, **SETTINGS)
    np.testing.assert_allclose(parts.curves["loss"], whole.curves["loss"], rtol=1e-9)
    assert [row["eta_l"] for row in parts.table] == [row["eta_l"] for row in whole.table]


def test_warm_start_in_a_sweep():
    settings = {"rounds": 8, "warm_start": True, **SETTINGS}
    tried = cv.sweep(cv.scaffold, PROBLEM, {"eta_l": [0.02, 0.1]}, seeds=[0, 1], **settings)
    run = cv.simulate(cv.scaffold(0.1), PROBLEM, seed=1, **settings)
    assert set(tried.curves) == set(run.history) - {"round", "cohort"}
    for name, curves in tried.curves.items():
        np.testing.assert_allclose(curves[1, 1], run.history[name], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tried.curves["control_error"], 0, atol=1e-12)


def test_the_loss_can_be_recorded_beside_the_metrics_without_deciding():
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x, y, n_clients=5, similarity=0.0)
    problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    settings = {"rounds": 4, "local_steps": 3, "clients_per_round": 2}
    plain = cv.sweep(cv.scaffold, problem, {"eta_l": [0.1, 1.0]}, **settings)
    tried = cv.sweep(cv.scaffold, problem, {"eta_l": [0.1, 1.0]}, measure_loss=True, **settings)
    run = cv.simulate(cv.scaffold(1.0), problem, **settings)
    assert "loss" not in plain.curves
    np.testing.assert_allclose(tried.curves["loss"][1, 0], run.history["loss"], rtol=1e-9)
    assert tried.metrics == plain.metrics == ("accuracy",)
    assert tried.best() == plain.best()


def test_a_point_that_diverged_is_never_the_best():
    problem = small_logistic([5, 5, 5])
    tried = cv.sweep(cv.sgd, problem, {"eta_l": [0.001, 1e308]}, rounds=3)
    assert [row["outcome"] for row in tried.table] == ["finished", "diverged"]
    assert tried.best() == 0


def test_without_a_target_the_best_is_by_the_metric():
    drifting = cv.sweep(cv.fedavg, cv.lower_bound(1.0), {"eta_l": [0.01, 0.1, 0.3]}, rounds=30, local_steps=3, x0=1.0)
    assert drifting.metrics == ("loss",)
    assert drifting.best() == drifting.best("loss") == int(np.argmin([r["best_loss"] for r in drifting.table]))
    tried = cv.sweep(cv.sgd, cv.lower_bound(1.0), {"eta_l": [0.01, 0.5, 0.1]}, rounds=20, x0=1.0)
    assert tried.points[tried.best("loss")] == {"eta_l": 0.5}
    with pytest.raises(cv.CovaryError, match="metric must be one of"):
        tried.best("accuracy")


def test_log_reports_how_many_members_are_running():
    heard = []
    cv.sweep(
        cv.sgd, PROBLEM, {"eta_l": [0.1, 0.2]}, rounds=60, log=lambda r, values: heard.append((r, values["running"]))
    )
    assert heard[0] == (1, 2.0)
    assert heard[-1] == (60, 2.0)
    assert [r for r, _ in heard] == sorted({r for r, _ in heard})


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"grid": {}}, "grid must be a dict of lists"),
        ({"grid": {"eta_l": []}}, "grid must be a dict of lists"),
        ({"grid": {"eta_l": 0.1}}, "grid must be a dict of lists"),
        ({"grid": {"eta_l": [0.1, -1.0]}}, "eta_l must be a number above 0"),
        ({"grid": {"eta": [0.1]}}, "grid must be named after the factory's arguments"),
        ({"grid": {"eta_l": [0.1], "option": ["I", "II"]}}, "grid must be over numbers only"),
        ({"seeds": []}, "seeds must be"),
        ({"seeds": [1, 1]}, "seeds must be"),
        ({"seeds": 3}, "seeds must be"),
        ({"seeds": [0.5]}, "seeds must be"),
        ({"grid": {"eta_l": [[0.1], [0.1, 0.2]]}}, "grid must be a dict of lists"),
        ({"seeds": [-1]}, "seed must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"race": True}, "race=True needs a target"),
        ({"at_once": 0}, "at_once must be"),
        ({"factory": lambda eta_l: 3}, "factory must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input(kwargs, says):
    given = {"factory": cv.scaffold, "grid": {"eta_l": [0.1]}, "rounds": 3, **kwargs}
    with pytest.raises(cv.CovaryError, match=says):
        cv.sweep(given.pop("factory"), PROBLEM, **given)


def test_a_type_error_inside_the_factory_is_raised_as_it_is():
    def factory(eta_l):
        return cv.scaffold(eta_l) + 1

    with pytest.raises(TypeError, match="unsupported operand"):
        cv.sweep(factory, cv.lower_bound(G=1), {"eta_l": [0.1]}, rounds=1)
    with pytest.raises(cv.CovaryError, match="named after the factory's arguments; got step"):
        cv.sweep(factory, cv.lower_bound(G=1), {"step": [0.1]}, rounds=1)
