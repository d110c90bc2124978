"""The constants of PyTorch modules are those of the same models in JAX, and so is the advice."""

import copy
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import covary as cv
import covary.torch as cvt
from covary import theory
from covary.theory import hessians
from covary.theory.oracle import Oracle


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, and workers beside this one: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Network(torch.nn.Module):
    """covary.models' logistic regression and mlp, with parameters in the order of their names."""

    def __init__(self, *sizes: int):
        super().__init__()
        layers = list(zip(sizes[1:], sizes, strict=False))
        names = [""] if len(layers) == 1 else [str(k + 1) for k in range(len(layers))]
        for name, (rows, _) in zip(names, layers, strict=True):
            self.register_parameter(f"b{name}", torch.nn.Parameter(torch.zeros(rows, dtype=torch.float64)))
        for name, shape in zip(names, layers, strict=True):
            self.register_parameter(f"w{name}", torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        self.names = names

    def forward(self, x):
        for k, name in enumerate(self.names):
            x = (torch.relu(x) if k else x) @ getattr(self, f"w{name}").T + getattr(self, f"b{name}")
        return x


def loss(module, batch):
    return cross_entropy(module(batch[0]), batch[1])


def clients_of(sizes, features=4, classes=3, seed=0):
    """Clients whose labels and features differ."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(i % 4, 1, (n, features)), rng.integers(0, 1 + i % classes, n)) for i, n in enumerate(sizes)]


def both(sizes, *, hidden=None, seed=0):
    """The same problem in JAX and in PyTorch, and a point."""
    data = cv.FederatedData.from_clients(clients_of(sizes, seed=seed))
    model = cv.models.mlp(4, hidden, 3) if hidden else cv.models.logistic_regression(4, 3)
    module = Network(4, hidden, 3) if hidden else Network(4, 3)
    ours = cv.supervised(model, data)
    return ours, cvt.supervised(module, loss, data), np.random.default_rng(1).normal(size=ours.start(None, 0)[0].size)


def in_double(*layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(*layers).double()


def problem_of(module, loss=loss, sizes=(12, 12, 12), **settings):
    return cvt.supervised(module, loss, cv.FederatedData.from_clients(clients_of(sizes, **settings)))


def constants(problem, x, **settings):
    found = theory.curvature(problem, x, **settings)
    apart = theory.gradient_dissimilarity(problem, x, **settings)
    return [
        *(astuple(getattr(found, name)) for name in ("beta", "mu", "delta", "weak_convexity")),
        *(astuple(apart.G), (apart.norm, apart.mean_square, apart.loss)),
    ]


@pytest.mark.parametrize(("hidden", "weights"), [(None, "examples"), (3, "uniform")])
def test_constants_are_those_of_jax(hidden, weights):
    ours, theirs, x = both([9, 30, 17, 1400, 1], hidden=hidden)
    a, b = (constants(p, x, weights=weights) for p in (ours, theirs))
    for own, other in zip(a, b, strict=True):
        np.testing.assert_allclose(other, own, rtol=1e-6, atol=1e-9)
    a, b = (theory.gradient_noise(p, x, weights=weights) for p in (ours, theirs))
    for batch_size in (1, None):
        np.testing.assert_allclose(astuple(b.sigma(batch_size)), astuple(a.sigma(batch_size)), rtol=1e-6)


def test_samples_of_clients_and_examples_are_those_of_jax(monkeypatch):
    """Where all clients or all examples would be costly."""
    monkeypatch.setattr(hessians, "CHEAP", 1e4)
    monkeypatch.setattr(hessians, "AFFORDABLE", 1e6)
    ours, theirs, x = both([40, 20, 60] * 6)
    a, b = (constants(p, x, clients=7) for p in (ours, theirs))
    for own, other in zip(a, b, strict=True):
        np.testing.assert_allclose(other, own, rtol=1e-6, atol=1e-9)
    assert a[4][1] > 0  # G's standard error, of the clients left out


def test_control_lag_and_optimum_are_those_of_jax():
    ours, theirs, x = both([9, 30, 17])
    c_i = np.random.default_rng(2).normal(size=(3, x.size))
    assert theory.control_lag(theirs, c_i, x) == pytest.approx(theory.control_lag(ours, c_i, x), rel=1e-9)
    (a, _), (b, _) = (theory.optimum(p, steps=5) for p in (ours, theirs))
    np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-9)
    found = theory.lag_along(cv.scaffold(0.1), theirs, [1, 20], local_steps=2)
    assert found["lag"][1] < found["lag"][0]


def test_the_advice_is_that_for_the_same_model_in_jax():
    ours, theirs, _ = both([20] * 6)
    settings = {"trial_rounds": 6, "local_steps": 10, "trial_seeds": 1, "algorithms": (), "batch_size": 0.5}
    a, b = (cv.diagnose(p, clients_per_round=2, **settings) for p in (ours, theirs))
    assert (b.algorithm, b.K, b.eta_l, b.eta_g, b.warnings) == (a.algorithm, a.K, a.eta_l, a.eta_g, a.warnings)
    assert b.measured == a.measured
    assert (b.beta, b.delta, b.G, b.B, b.sigma) == pytest.approx((a.beta, a.delta, a.G, a.B, a.sigma), rel=1e-6)
    run = cv.simulate(b.build(), theirs, 2, local_steps=b.K)
    assert run.rounds == 2


def test_a_target_and_a_trial_without_metrics():
    module = in_double(torch.nn.Linear(4, 3))
    accuracy = {"metrics": lambda m, b: {"accuracy": (m(b[0]).argmax(1) == b[1]).double()}}
    data = cv.FederatedData.from_clients(clients_of([12, 12, 12]))
    problem = cvt.supervised(module, loss, data, **accuracy)
    quick = {"trial_rounds": 4, "local_steps": 2, "trial_seeds": 1, "algorithms": ()}
    found = cv.diagnose(problem, target=("accuracy", 0.4), **quick)
    assert found.goal == "accuracy 0.4"
    assert np.isfinite(found.measured["scaffold"])
    checked = theory.check_advice(found, problem, ("accuracy", 0.4), [2], seeds=(1,), rounds=4)
    assert checked.cells >= 4
    with pytest.raises(cv.CovaryError, match="accuracy"):
        cv.diagnose(problem.without_metrics(), target=("accuracy", 0.4), **quick)
    assert np.isfinite(cv.diagnose(problem, **quick).trials["fedavg"].value)


def test_dropout_is_off_and_frozen_parameters_stay_out():
    plain = in_double(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    dropping = torch.nn.Sequential(*plain[:2], torch.nn.Dropout(0.5), plain[2])
    a, b = (constants(problem_of(module), None) for module in (plain, dropping))
    assert a == b
    frozen = copy.deepcopy(plain)
    frozen[0].requires_grad_(False)
    problem = problem_of(frozen)
    assert Oracle(problem).start.size == 3 * 3 + 3
    # what is left is logistic regression on the first layer's outputs
    features = [(frozen[1](frozen[0](torch.tensor(x))).numpy(), y) for x, y in clients_of([12, 12, 12])]
    last = cvt.supervised(plain[2], loss, cv.FederatedData.from_clients(features))
    np.testing.assert_allclose(np.hstack(constants(problem, None)), np.hstack(constants(last, None)), rtol=1e-9)


def test_batch_norm_normalises_by_the_batch_and_the_module_stays_as_it_is():
    module = in_double(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.1), torch.nn.Linear(5, 3))
    before = copy.deepcopy(module.state_dict())
    problem = problem_of(module, sizes=(12, 7, 20))
    found = cv.diagnose(problem, trial_rounds=3, local_steps=2, trial_seeds=1, algorithms=())
    assert np.isnan(found.sigma)
    assert any("BatchNorm" in text for text in found.warnings)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(part.training for part in module.modules())
    with pytest.raises(cv.CovaryError, match="BatchNorm"):
        theory.gradient_noise(problem)
    # f_i of all examples of a client at once, in training mode
    own = copy.deepcopy(module)
    own[2].eval()
    values = [loss(own, (torch.tensor(x), torch.tensor(y))) for x, y in clients_of([12, 7, 20])]
    assert theory.gradient_dissimilarity(problem).loss == pytest.approx(np.mean([v.item() for v in values]))
    slopes = [torch.cat([g.ravel() for g in torch.autograd.grad(v, list(own.parameters()))]) for v in values]
    apart = np.sqrt(np.mean([float((g - sum(slopes) / 3).square().sum()) for g in slopes]))
    assert theory.gradient_dissimilarity(problem).G.value == pytest.approx(apart)
    oracle = Oracle(problem, "examples")  # f is then the mean of three functions, of which none can be divided
    x, V, each = oracle.start, torch.ones(1, oracle.start.size).double(), oracle.clients(np.arange(3))
    own_products = oracle.own_products(x, V.expand(3, -1), each)
    common = oracle.common_products(x, V, oracle.everyone()[0])[0]
    assert torch.allclose(common, torch.tensor(oracle.p) @ own_products)
    # a layer that was set to eval() normalises by its buffers, so its loss is a mean again
    module[1].eval()
    assert theory.gradient_noise(problem_of(module)).sigma(1).value > 0


def test_a_module_that_draws_in_evaluation_is_the_same_function_every_time():
    class Sampling(torch.nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            return z + 0.1 * torch.randn_like(z)

    oracle = Oracle(problem_of(Sampling(4, 3).double()))
    state = torch.get_rng_state()
    first, second = (theory.gradient_dissimilarity(oracle) for _ in range(2))
    assert first.loss == second.loss
    some, one = (oracle.gradients(oracle.start, oracle.clients(np.array(ids))) for ids in ([0, 1], [1]))
    assert (some[1] == one[0]).all()
    assert torch.equal(torch.get_rng_state(), state)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(1, 6), torch.nn.Linear(2, 3)

    def forward(self, x):
        q, k, v = self.qkv(x[..., None])[:, None].chunk(3, dim=-1)
        return self.out(scaled_dot_product_attention(q, k, v).mean(dim=(1, 2)))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = torch.nn.LSTM(1, 2, batch_first=True), torch.nn.Linear(2, 3)

    def forward(self, x):
        return self.out(self.lstm(x[..., None])[0][:, -1])


@pytest.mark.parametrize("build", [Attention, Recurrent])
def test_kernels_that_cannot_be_differentiated_twice_are_replaced(build):
    torch.manual_seed(0)
    problem = problem_of(build())
    found, gradients = theory.curvature(problem), Oracle(problem)
    x, v = gradients.start, np.ones_like(gradients.start)
    parts, one = gradients.everyone()[0], np.ones(1)
    ahead, behind = (gradients.survey((x + s * v).astype(x.dtype), parts, one, 0 * x)[3] for s in (1e-2, -1e-2))
    curved = gradients.responses(x, v, parts, one, 0 * x)[2]
    np.testing.assert_allclose(curved, (ahead - behind) / 2e-2, atol=2e-2 * np.abs(curved).max())
    assert np.isfinite([found.beta.value, found.delta.value]).all()
    assert theory.gradient_noise(gradients).sigma(1).value > 0


def test_gradients_of_single_examples_where_they_cannot_be_computed_together():
    class Asking(torch.nn.Linear):
        def forward(self, x):
            assert x.sum().item() < 1e9  # torch.func cannot know it
            return super().forward(x)

    asking = Asking(4, 3).double()
    plain = torch.nn.Linear(4, 3).double()
    plain.load_state_dict(asking.state_dict())
    a, b = (theory.gradient_noise(problem_of(module)).sigma(1) for module in (asking, plain))
    assert a.value == pytest.approx(b.value)


class Blind(torch.autograd.Function):
    """A square whose derivative PyTorch takes for a constant."""

    @staticmethod
    def forward(ctx, z):
        ctx.slope = 2 * z.detach()
        return z**2

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.slope


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        return 2 * slope * ctx.saved_tensors[0]


def of_residual(function):
    return lambda module, batch: function(module(batch[0])[:, 0] - batch[1]).mean()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.abs, r"must be twice differentiable.*kinks"),
        (lambda z: torch.relu(1 - z), r"must be twice differentiable.*kinks"),
        (Blind.apply, r"no curvature at all|must be twice differentiable.*kinks"),
        (lambda z: Once.apply(z) ** 2, r"must be twice differentiable.*once_differentiable"),
        (lambda z: z, "no curvature at all"),
        (lambda z: (z - z.detach()).abs() ** 1.5, r"(gradient|Hessian) of client 0 .* NaN or infinite"),
    ],
)
def test_a_loss_without_curvature_is_rejected(function, said):
    with pytest.raises(cv.CovaryError, match=said):
        theory.curvature(problem_of(in_double(torch.nn.Linear(4, 1)), of_residual(function), sizes=(100, 100)))


def test_what_cannot_be_measured_is_rejected():
    tensors = [tuple(map(torch.tensor, client)) for client in clients_of([8, 8])]
    module = in_double(torch.nn.Linear(4, 3))
    for data in (
        [list(zip(*client, strict=True)) for client in tensors],
        [DataLoader(TensorDataset(*client), batch_size=4) for client in tensors],
    ):
        problem = cvt.supervised(module, loss, [_Set(d) if isinstance(d, list) else d for d in data])
        for measure in (cv.diagnose, theory.gradient_noise):
            with pytest.raises(cv.CovaryError, match="Pass tensors, one tuple per client"):
                measure(problem)
    with pytest.raises(cv.CovaryError, match="float32 or float64"):
        theory.curvature(cvt.supervised(torch.nn.Linear(4, 3).bfloat16(), in_bfloat16, tensors))
    with pytest.raises(cv.CovaryError, match="at least 2 clients"):
        cv.diagnose(cvt.supervised(module, loss, tensors[:1]))
    with pytest.raises(cv.CovaryError, match="finite"):
        theory.curvature(cvt.supervised(module, loss, tensors), np.full(15, np.nan))
    theory.curvature(cvt.supervised(module, loss, tensors), module.state_dict())


def in_bfloat16(module, batch):
    return cross_entropy(module(batch[0].bfloat16()).float(), batch[1])


class _Set(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]
