"""The diagnosis: its advice runs, its warnings fire where they should, and it rejects what it cannot diagnose."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DATA, covary, needs_data, random_quadratics, small_logistic
from test_dissimilarity import Linear, Normed, clients_of

import covary as cv

quick = {"trial_rounds": 6, "local_steps": 2, "trial_seeds": 1, "algorithms": ()}


@pytest.fixture(scope="module")
def digits():
    (x, y), test = cv.datasets.digits()
    return cv.supervised(
        cv.models.logistic_regression(64, 10), cv.partition.by_similarity(x, y, 20, similarity=0.0), test
    )


@pytest.fixture(scope="module")
def digits_found(digits):
    goal = ("accuracy", 0.8)
    return cv.diagnose(
        digits, clients_per_round=0.2, batch_size=0.2, target=goal, local_steps=12, algorithms=("sgd", "mime")
    )


def test_the_advice_for_sorted_digits_is_scaffold_and_it_works(digits, digits_found):
    d = digits_found
    assert d.scaffold_beats_fedavg
    assert d.algorithm == "scaffold"
    assert "will beat FedAvg" in d.verdict
    assert d.convex
    assert d.eta_l_safe < d.eta_l
    settings = {"clients_per_round": 0.2, "batch_size": 0.2, "local_steps": d.K, "target": ("accuracy", 0.8), "seed": 9}
    assert cv.simulate(d.build(), digits, 3 * int(d.measured["scaffold"]), **settings).reached
    assert set(d.measured) == {"sgd", "fedavg", "scaffold", "mime"}
    assert all(value > 0 for value in (d.beta, d.delta, d.G, d.sigma))
    assert d.B >= 1
    assert d.sigma_se > 0


def test_a_diagnosis_is_plain_values_for_json(digits_found):
    told = json.loads(json.dumps(digits_found.as_dict(), default=float))
    assert told["algorithm"] == "scaffold"
    assert len(told["points"]) == 3
    for name in ("beta", "mu", "sigma", "G", "B", "delta", "algorithm", "K", "eta_l", "eta_g", "reasons", "warnings"):
        assert name in told


def test_same_seed_same_diagnosis():
    problem = small_logistic([25] * 10)
    first, second = (cv.diagnose(problem, clients_per_round=0.2, batch_size=0.2, **quick) for _ in range(2))
    assert not any("Stale control variates" in text for text in first.warnings)
    assert json.dumps(first.as_dict(), default=float) == json.dumps(second.as_dict(), default=float)


def test_identical_clients_need_no_scaffold():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = (x @ [1, -2, 1] + rng.normal(size=60) > 0).astype(int)
    data = cv.FederatedData.from_clients([(x, y)] * 5)
    d = cv.diagnose(cv.supervised(cv.models.logistic_regression(3, 2), data), batch_size=0.2, **quick)
    assert not d.scaffold_beats_fedavg
    assert "will not beat FedAvg" in d.verdict
    assert d.G / d.points[0]["gradient_norm"] < 1e-3
    assert d.delta < 1e-3 * d.beta
    assert any("Clients are alike" in text for text in d.warnings)
    assert any("Noise dominates" in text for text in d.warnings)


def test_rarely_seen_clients_are_warned_of():
    A, b = random_quadratics(N=40, d=3)
    d = cv.diagnose(cv.quadratics(A, b), rounds=20, clients_per_round=2, **quick)
    assert any("Stale control variates" in text and "visit a client 1 times" in text for text in d.warnings)


def test_a_settled_K_is_kept():
    A, b = random_quadratics(N=5, d=3)
    d = cv.diagnose(cv.quadratics(A, b), **quick)
    assert d.K == 2
    assert {row["K"] for row in d.trials["scaffold"].tried} == {2}
    assert set(d.trials) == {"scaffold", "fedavg"}


def test_batch_statistics_are_warned_of():
    d = cv.diagnose(cv.supervised(Normed(), clients_of([8, 8, 8])), **quick)
    assert any("BatchNorm" in text for text in d.warnings)
    assert np.isnan(d.sigma)


def test_networks_and_clients_with_one_example_are_warned_of():
    network = cv.supervised(cv.models.mlp(3, 4, 3), small_logistic([6, 9, 1]).data)
    d = cv.diagnose(network, **quick)
    assert not d.convex
    assert any("not convex" in text for text in d.warnings)
    assert any("1 of 3 clients have one example" in text for text in d.warnings)


def test_a_step_size_that_diverges_after_the_target_is_warned_of():
    A, b = [np.diag([1.0, 0.01])] * 2, [[1e-7, 1.0], [-1e-7, -1.0]]
    d = cv.diagnose(
        cv.quadratics(A, b), x0=[1e-6, 100.0], target=("loss", 25.0), **quick | {"trial_rounds": 30, "local_steps": 1}
    )
    assert any("diverges after it" in text for text in d.warnings)
    assert np.isfinite(d.beta)


def test_all_hessians_equal_and_nothing_given():
    d = cv.diagnose(
        cv.quadratics(np.repeat(np.diag([1.0, 0.3])[None], 3, axis=0), np.eye(3)[:, :2]),
        max_local_steps=8,
        **{k: v for k, v in quick.items() if k != "local_steps"},
    )
    assert "was given" not in d.reasons["K"]
    assert {row["K"] for row in d.trials["fedavg"].tried} == {1, 2, 8}


def test_the_advice_and_the_verdict_agree(digits_found):
    d = digits_found
    assert (d.algorithm == "scaffold") <= d.scaffold_beats_fedavg


def test_an_unreachable_target_is_reported():
    A, b = random_quadratics(N=5, d=3)
    d = cv.diagnose(cv.quadratics(A, b), target=("loss", -1e9), **quick)
    assert any("No run reached loss -1e+09 within 6 rounds" in text for text in d.warnings)
    assert all(np.isinf(rounds) for rounds in d.measured.values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"algorithms": ("adam",)}, "algorithms must be any of"),
        ({"algorithms": "sgd"}, "algorithms must be a list"),
        ({"seed": -1}, "seed must be"),
        ({"target": ("loss", float("nan"))}, "target must be"),
        ({"trial_rounds": 1}, "trial_rounds must be"),
        ({"max_local_steps": 0}, "max_local_steps must be"),
        ({"local_steps": 0}, "local_steps must be"),
        ({"clients_per_round": 9}, "clients_per_round must be"),
        ({"batch_size": 3}, "batch_size=3 is larger"),
        ({"target": ("accuracy", 0.5)}, "accuracy"),
        ({"weights": "size"}, "weights must be"),
        ({"x0": [1.0]}, "x0 must be"),
    ],
)
def test_wrong_arguments_are_rejected_before_the_work(wrong, said):
    A, b = random_quadratics(N=4, d=3)
    with pytest.raises(cv.CovaryError, match=said):
        cv.diagnose(cv.quadratics(A, b), **wrong)


def test_problems_that_cannot_be_diagnosed_are_rejected():
    with pytest.raises(cv.CovaryError, match="at least 2 clients"):
        cv.diagnose(cv.quadratics(np.ones((1, 1, 1)), np.ones((1, 1))))
    with pytest.raises(cv.CovaryError, match="kinks"):
        cv.diagnose(cv.supervised(Linear(jnp.abs), clients_of([200, 200])))
    with pytest.raises(cv.CovaryError, match="a Problem"):
        cv.diagnose("digits")


def test_command_line(tmp_path):
    options = ("--trial-rounds", "4", "--local-steps", "5", "--target", "0.4", "--json")
    done = covary("diagnose", "digits", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["title"].startswith("digits, 0 % similarity: 20 clients")
    assert told["K"] in (1, 5)
    (picture,) = tmp_path.glob("runs/*/diagnosis.png")
    assert picture.stat().st_size > 10_000
    (results,) = tmp_path.glob("runs/*/results.jsonl")
    assert json.loads(results.read_text())["eta_l"] == told["eta_l"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mnist"], "DATASET must be digits, emnist"),
        (["--target", "95"], "--target must be an accuracy in (0, 1]"),
        (["--target", "0.9", "--target-loss", "1"], "two targets"),
        (["--check"], "--check counts rounds to a target"),
        (["heart-disease", "--clients", "4"], "The clients of heart-disease are its hospitals"),
        (["emnist", "--root", "/no/such"], "is missing"),
    ],
)
def test_command_line_errors(args, said, tmp_path):
    done = covary("diagnose", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@needs_data
def test_four_hospitals(tmp_path):
    """Real silos of unequal size, all in every round: FedAvg stops short of the optimum and SCAFFOLD does not."""
    train, test = cv.datasets.heart_disease(DATA / "fed-heart-disease.npz")
    problem = cv.supervised(cv.models.logistic_regression(13, 2), cv.partition.by_group(*train), test)
    d = cv.diagnose(problem, batch_size=0.2, target=("loss", 0.416), local_steps=25, trial_seeds=1, algorithms=())
    assert d.scaffold_beats_fedavg
    assert d.N == d.S == 4
    assert d.convex
    assert d.beta_se <= 0.02 * d.beta  # all hospitals were measured
