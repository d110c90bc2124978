"""PyTorch modules simulated: the numbers of JAX, of Flower and of a loop written out, whatever the module has in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import LoopbackGrid
from test_flower import ALGORITHMS, HANGS, OPEN
from torch.utils.data import DataLoader, TensorDataset
from torch_problems import (
    CLASSES,
    EVEN,
    LINEAR,
    UNEVEN,
    D,
    batch_norm,
    bits_of,
    both,
    cross_entropy,
    dropout,
    generators_as_before,
    hits,
    linear,
    network,
    parts,
    problem,
    same,
    tensors,
)

import covary as cv
import covary.torch as cvt
from covary.draws import Draw, cohort, order_of_epoch
from covary.flower import Settings, serve, torch_client_app
from covary.torch.seeds import seed_of

F = torch.nn.functional
ROUNDS = {"rounds": 4, "local_steps": 3, "batch_size": 4}


# The numbers of JAX


class Twin:
    """In JAX, a Sequential of linear layers, convolutions, tanh and Flatten."""

    def __init__(self, module):
        self.layers = list(module)
        self.start = {name: value.numpy() for name, value in module.state_dict().items()}

    def init(self, key):
        return {name: jnp.asarray(value) for name, value in self.start.items()}

    def scores(self, params, h):
        for at, layer in enumerate(self.layers):
            w, b = params.get(f"{at}.weight"), params.get(f"{at}.bias")
            if isinstance(layer, torch.nn.Linear):
                h = h @ w.T + b
            elif isinstance(layer, torch.nn.Conv2d):
                h = jax.lax.conv(h, w, (1, 1), "VALID") + b[:, None, None]
            elif isinstance(layer, torch.nn.Flatten):
                h = h.reshape(len(h), -1)
            else:
                h = jnp.tanh(h)
        return h

    def loss(self, params, batch):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(self.scores(params, batch[0])), batch[1][:, None], 1))

    def metrics(self, params, batch):
        return {"accuracy": self.scores(params, batch[0]).argmax(1) == batch[1]}


def logistic():
    return torch.nn.Sequential(torch.nn.Linear(**LINEAR))


def mlp():
    return torch.nn.Sequential(
        torch.nn.Linear(D, 4, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Linear(4, 3, dtype=torch.float64)
    )


def cnn():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2), torch.nn.Tanh(), torch.nn.Conv2d(2, 2, 2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    ).double()


def pictures(sizes):
    rng = np.random.default_rng(1)
    return [(rng.normal(i / 2, 1, (n, 1, 4, 4)), rng.integers(0, 3, n)) for i, n in enumerate(sizes)]


@functools.cache
def pair(build, sizes):
    """The same problem in JAX and in PyTorch."""
    torch.manual_seed(1)
    module, make = build(), pictures if build is cnn else parts
    data, test = cv.FederatedData.from_clients(make(sizes)), make((30,))[0]
    return cv.supervised(Twin(module), data, test), cvt.supervised(module, cross_entropy, data, test, hits)


WAYS = ({}, {"width": 1}, {"width": 1, "devices": 1})
SMALL_BATCHES = {"local_steps": 3, "batch_size": 4}
CASES = [
    *((name, mlp, EVEN, SMALL_BATCHES) for name in ALGORITHMS),
    *((name, logistic, UNEVEN, SMALL_BATCHES) for name in ("scaffold-I", "mime")),
    ("scaffold", logistic, EVEN, {"local_epochs": 2, "batch_size": 5}),
    ("scaffold", mlp, UNEVEN, {"local_epochs": 2, "batch_size": 0.4, "weights": "examples", "average": 0.1}),
    ("scaffold", mlp, UNEVEN, {"local_epochs": 1, "batch_size": 3, "warm_start": True, "average": "uniform"}),
    ("scaffold", cnn, EVEN, SMALL_BATCHES),
    ("vrl_sgd", mlp, UNEVEN, {"local_steps": 2, "weights": "examples"}),
]


@pytest.mark.parametrize(("name", "build", "sizes", "work"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_numbers_are_those_of_jax_in_every_way_of_computing(name, build, sizes, work):
    algorithm, (theirs, ours) = ALGORITHMS[name], pair(build, sizes)
    call = {"rounds": 4, "clients_per_round": None if algorithm.lockstep else 3, "seed": 3, **work}
    expected = cv.simulate(algorithm, theirs, **call)
    order = [name for name, _ in ours.module.named_parameters()]
    start = ours.network.x.numpy()
    flat = functools.partial(lambda params: np.concatenate([np.ravel(params[name]) for name in order]))
    for way in WAYS:
        run = cv.simulate(algorithm, ours, **call, **way)
        np.testing.assert_allclose(run.x, flat(expected.params), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(run.x, flat(run.params))
        if expected.average is not None:
            np.testing.assert_allclose(flat(run.average), flat(expected.average), rtol=0, atol=1e-12)
        assert set(run.history) == set(expected.history)
        for column, values in expected.history.items():
            exact = "accuracy" not in column  # JAX takes the mean of booleans in float32
            np.testing.assert_allclose(
                run.history[column], values, rtol=1e-10 if exact else 1e-6, atol=1e-12, err_msg=column
            )
        assert run.history["loss"].dtype == np.float64
    assert np.abs(run.x - start).max() > 1e-3


# The numbers of Flower


def loaders(sizes=EVEN):
    return [DataLoader(TensorDataset(*each), 4, shuffle=True) for each in tensors(sizes)]


@pytest.mark.parametrize(
    ("build", "name", "sizes"),
    [
        (linear, "scaffold", UNEVEN),
        (both, "scaffold", EVEN),
        (both, "mime", EVEN),
        (dropout, "dane", UNEVEN),
        (batch_norm, "scaffold-I", (8, 12, 10, 20, 6, 4)),
        (batch_norm, "scaffold by examples", (8, 12, 10, 20, 6, 4)),
        (dropout, "scaffold with loaders", EVEN),
        (linear, "mime with loaders", EVEN),
    ],
)
def test_a_deployed_run_is_the_simulated_one(build, name, sizes, tmp_path):
    name, _, how = name.partition(" ")
    loaded = how == "with loaders"
    algorithm, work = ALGORITHMS[name], {"local_epochs": 2} if loaded else SMALL_BATCHES
    work = {**work, "weights": "examples" if how == "by examples" else "uniform"}
    data = loaders(sizes) if loaded else tensors(sizes)
    apps = {
        i: (
            torch_client_app(build(), cross_entropy, part, state=tmp_path / f"state{i}", limits=OPEN),
            {"partition-id": i},
        )
        for i, part in enumerate(data)
    }
    given = Settings(3, **work, clients_per_round=3, min_clients=6, patience=HANGS, checkpoint=tmp_path / "server")
    deployed = serve(LoopbackGrid(apps), algorithm, build(), given)
    ours = problem(build(), data=loaders(sizes) if loaded else tensors(sizes))
    run = cv.simulate(algorithm, ours, 3, **work, clients_per_round=3)
    np.testing.assert_allclose(run.x, deployed.x, rtol=0, atol=1e-12)
    for column in ("loss", "drift"):
        np.testing.assert_allclose(run.history[column], deployed.history[column], rtol=1e-10, atol=1e-12)
    for name, values in (run.buffers or {}).items():
        np.testing.assert_allclose(values, deployed.buffers[name], rtol=0, atol=1e-12)


# A loop written out


def by_hand(module, loss, clients, run, eta_l, K, size, seed):
    """SCAFFOLD, option II: Algorithm 1 of the paper in float64, with the draws of a run; buffers are averaged."""
    trained = [p for p in module.parameters() if p.requires_grad]
    float_buffers = [b for b in module.buffers() if b.is_floating_point()]
    N, S = len(clients), run.history["cohort"].shape[1]
    x, b = [p.detach().double().clone() for p in trained], [b.clone() for b in float_buffers]
    c = [torch.zeros_like(p) for p in x]
    c_i = [c] * N
    for r in range(1, run.rounds + 1):
        ids = cohort(seed, r, N, S)
        np.testing.assert_array_equal(ids, run.history["cohort"][r - 1])
        ys, bs, dcs = [], [], []
        for i in ids:
            examples, n, y = clients[i], len(clients[i][0]), x
            fill(float_buffers, b)
            parts = -(-n // size)
            for k in range(K):
                order = order_of_epoch(seed, r, 1, int(i), k // parts, n)
                rows = torch.from_numpy(order[k % parts * size : (k % parts + 1) * size])
                fill(trained, y)
                torch.manual_seed(seed_of(Draw(seed, r, 1, int(i)), k + 1))
                value = loss(module, tuple(leaf[rows] for leaf in examples))
                found = torch.autograd.grad(value, trained, allow_unused=True)
                g = [torch.zeros_like(p) if each is None else each.to_dense() for each, p in zip(found, y, strict=True)]
                y = [p - eta_l * (g - ci + c) for p, g, ci, c in zip(y, g, c_i[i], c, strict=True)]  # eq. (3)
            new = [ci - c + (x - y) / (K * eta_l) for ci, c, x, y in zip(c_i[i], c, x, y, strict=True)]  # eq. (4)
            dcs.append([n - ci for n, ci in zip(new, c_i[i], strict=True)])
            ys, bs, c_i[i] = [*ys, y], [*bs, [f.clone() for f in float_buffers]], new
        x, b = ([sum(each) / S for each in zip(*lists, strict=True)] for lists in (ys, bs))
        c = [c + sum(each) / N for c, each in zip(c, zip(*dcs, strict=True), strict=True)]  # eq. (5)
    return torch.cat([p.reshape(-1) for p in x]).numpy(), [buffer.numpy() for buffer in b]


def fill(tensors, numbers):
    with torch.no_grad():
        for tensor, new in zip(tensors, numbers, strict=True):
            tensor.copy_(new)


class Tied(torch.nn.Module):
    """Twice the same weight."""

    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.second = torch.nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class As(torch.nn.Module):
    """A layer in another type than those around it."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype

    def forward(self, x):
        return self.layer(x.to(self.dtype)).to(x.dtype)


WIDTH = 4
LAYERS = {
    "linear": lambda: torch.nn.Linear(WIDTH, WIDTH),
    "tanh": torch.nn.Tanh,
    "frozen": lambda: torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "half frozen": lambda: frozen_bias(torch.nn.Linear(WIDTH, WIDTH)),
    "tied": lambda: Tied(WIDTH),
    "batch norm": lambda: torch.nn.BatchNorm1d(WIDTH),
    "fixed batch norm": lambda: torch.nn.BatchNorm1d(WIDTH).eval(),
    "batch norm without statistics": lambda: torch.nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "layer norm": lambda: torch.nn.LayerNorm(WIDTH),
    "group norm": lambda: torch.nn.GroupNorm(2, WIDTH),
    "dropout": lambda: torch.nn.Dropout(0.3),
}


def frozen_bias(layer):
    layer.bias.requires_grad_(False)
    return layer


def stacked(layers, low):
    """A module of random layers in float64, but for one in another type."""
    torch.manual_seed(len(layers))
    made = [LAYERS[name]().double() for name in layers]
    if low is not None:
        made.append(As(torch.nn.Linear(WIDTH, WIDTH), low))
    module = torch.nn.Sequential(torch.nn.Linear(D, WIDTH), *made, torch.nn.Linear(WIDTH, CLASSES))
    module[0].double(), module[-1].double()
    modes = {part: part.training for part in module.modules()}
    return module, modes


@settings(max_examples=30, deadline=None)
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), max_size=4),
    low=st.sampled_from([None, None, None, torch.float32, torch.bfloat16]),
    sizes=st.lists(st.integers(4, 9), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_module_runs_as_the_loop_written_out(layers, low, sizes, data):
    N = len(sizes)
    S, K = data.draw(st.integers(1, N), label="S"), data.draw(st.integers(1, 4), label="K")
    even = data.draw(st.booleans(), label="even")
    sizes = [sizes[0] // 2 * 2] * N if even else [n // 2 * 2 for n in sizes]  # BatchNorm takes no single example
    seed, way = data.draw(st.integers(0, 9), label="seed"), data.draw(st.sampled_from(WAYS), label="way")
    clients = tensors(sizes)
    if "width" not in way and low is not None:
        way = {"width": 1}  # rounding differs between a product of several clients and one
    ours = cvt.supervised(stacked(layers, low)[0], cross_entropy, clients)
    call = {"rounds": 2, "clients_per_round": S, "local_steps": K, "batch_size": 2, "seed": seed}
    run = cv.simulate(cv.scaffold(0.1), ours, **call, **way)
    x, buffers = by_hand(stacked(layers, low)[0], cross_entropy, clients, run, 0.1, K, 2, seed)
    rounding = {None: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}[low]
    for own, other in zip((run.x, *(run.buffers or {}).values()), (x, *buffers), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=rounding * max(1, np.abs(other).max()))
    assert len(run.x) == sum(p.numel() for p in ours.module.parameters() if p.requires_grad)


# BatchNorm


def test_buffers_are_the_cohorts_mean_and_the_metrics_read_them():
    ours = problem(batch_norm(), test=tensors()[0], metrics=hits)
    counter = ours.module[0].num_batches_tracked.clone()
    for algorithm in (cv.scaffold(0.05), cv.mime(0.05), cv.dane(0.05), cv.feddyn(0.05, 1.0)):
        run = cv.simulate(algorithm, ours, 3, clients_per_round=4, local_steps=2, batch_size=4)
        assert sorted(run.buffers) == ["0.running_mean", "0.running_var"]
        module = run.model()
        for name, values in run.buffers.items():
            np.testing.assert_array_equal(values, run.params[name])
            np.testing.assert_array_equal(values, module.state_dict()[name])
            assert not np.array_equal(values, ours.module.state_dict()[name])
        assert torch.equal(module[0].num_batches_tracked, counter)
        assert run.x.shape == run.server.x.shape == (2 * D + D * CLASSES + CLASSES,)
        with torch.no_grad():
            module.eval()
            x, y = (torch.cat(leaves) for leaves in zip(*tensors(), strict=True))
            assert run.history["loss"][-1] == pytest.approx(float(cross_entropy(module, (x, y))), rel=1e-12)
            x, y = tensors()[0]
            assert run.history["accuracy"][-1] == pytest.approx(float((module(x).argmax(1) == y).double().mean()))


def test_a_counter_of_batches_starts_anew_with_every_clients_work():
    """Without a momentum, BatchNorm takes the mean over as many batches as it has counted."""
    norm = torch.nn.BatchNorm1d(D, momentum=None)
    for way in ({}, {"devices": 1}):
        run = cv.simulate(cv.fedavg(0.1), problem(network(norm)), 3, 1, 1, **way)
        x, _ = tensors()[int(run.history["cohort"][-1, 0])]
        np.testing.assert_allclose(run.buffers["0.running_mean"], x.mean(0), rtol=1e-12)


def test_batch_norm_is_not_given_a_single_example_where_covary_divides_the_data():
    """Passes over all of a client's data go in parts, for example of 1,024."""
    run = cv.simulate(cv.mime(0.05), problem(batch_norm(), sizes=(1025, 1025)), 1, local_steps=1, batch_size=0.5)
    assert np.isfinite(run.x).all()


def test_the_users_module_and_generators_stay_as_they_are(tmp_path):
    module = both()
    module[1].eval()
    before = bits_of(module)
    with generators_as_before():
        ours = problem(module, test=tensors()[0], metrics=hits)
        for more in ({}, {"width": 1}, {"store": "disk"}, {"checkpoint": tmp_path}, {"average": "uniform"}):
            cv.simulate(cv.mime(0.05), ours, **ROUNDS, **more).model()
        cv.sweep(cv.scaffold, ours, {"eta_l": [0.1, 0.2]}, **ROUNDS)
        with pytest.raises(ZeroDivisionError):
            cv.simulate(cv.sgd(0.1), ours, 1, log=lambda r, values: 1 // 0)
    after = bits_of(module)
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name], name


# What is drawn at random


class Drop(torch.nn.Module):
    """Dropout by another generator than PyTorch's."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x if self.training and self.draw() < 0.5 else 2 * x


def python_random():
    import random

    return network(Drop(random.random))


def numpy_random():
    return network(Drop(lambda: np.random.rand()))  # a copy of `rand` itself would have a generator of its own


@pytest.mark.parametrize("build", [dropout, both, python_random, numpy_random])
def test_the_seed_decides_what_a_module_draws(build, tmp_path):
    call = {**ROUNDS, "clients_per_round": 3, "seed": 5}
    run = cv.simulate(cv.scaffold(0.1), problem(build()), **call)
    for more in ({}, {"devices": 1}, {"devices": 2, "width": 1}, {"store": "host"}, {"store": "disk"}):
        torch.rand(3)  # what else the process draws has no influence
        same(cv.simulate(cv.scaffold(0.1), problem(build()), **call, **more), run)
    assert not np.array_equal(run.x, cv.simulate(cv.scaffold(0.1), problem(build()), **call | {"seed": 6}).x)
    part = cv.simulate(cv.scaffold(0.1), problem(build()), **call | {"rounds": 4}, checkpoint=tmp_path)
    same(part, run)


def test_every_step_of_every_client_in_every_exchange_draws_its_own_numbers():
    drawn = []

    def loss(module, batch):
        if module.training:
            drawn.append(float(torch.rand(())))
        return cross_entropy(module, batch)

    ours = problem(loss=loss)
    drawn.clear()
    cv.simulate(cv.dane(0.1), ours, 3, 2, 4, batch_size=3, eval_every=9)
    assert len(drawn) == len(set(drawn)) >= 3 * 2 * (1 + 1 + 4)  # two passes over all data besides the steps


class Autoencoder(torch.nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(D, 4), torch.nn.Linear(2, D)

    def loss(self, x):
        mean, log = self.encode(x).chunk(2, -1)
        y = self.decode(mean + torch.randn_like(mean) * (log / 2).exp())
        return ((y - x) ** 2).sum(1).mean() - 0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()


def test_a_loss_may_draw_in_evaluation_too(tmp_path):
    torch.manual_seed(0)
    module = Autoencoder().double()
    runs = []
    with generators_as_before():
        for _ in range(2):
            ours = problem(module, loss=lambda module, batch: module.loss(batch[0]))
            runs.append(cv.simulate(cv.scaffold(0.001), ours, **ROUNDS))
    same(*runs)
    for _ in range(2):
        same(cv.simulate(cv.scaffold(0.001), ours, **ROUNDS, checkpoint=tmp_path), runs[0])
    with pytest.raises(cv.CovaryError, match="must be the mean"):
        problem(module, loss=lambda module, batch: len(batch[0]) * module.loss(batch[0]))


# Parameters that are not trained


class LowRank(torch.nn.Module):
    """A frozen layer with an adapter, as LoRA."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = torch.nn.Parameter(torch.randn(rank, layer.in_features, dtype=torch.float64))
        self.B = torch.nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + x @ self.A.T @ self.B.T


def adapted():
    torch.manual_seed(0)
    return torch.nn.Sequential(LowRank(torch.nn.Linear(D, D).double()), torch.nn.Tanh(), LowRank(linear()))


def test_only_adapters_are_trained_and_sent(tmp_path):
    module = adapted()
    size = 2 * (D + D) + 2 * (D + CLASSES)
    run = cv.simulate(cv.scaffold(0.1), problem(module), **ROUNDS, clients_per_round=3)
    assert run.x.shape == run.server.c.shape == (size,)
    assert run.clients.c_i.shape == (6, size)
    np.testing.assert_array_equal(run.history["bytes_up"], 3 * 8 * size)
    trained = run.model().state_dict()
    assert list(run.params) == list(trained) == list(module.state_dict())
    for name, before in module.state_dict().items():
        assert torch.equal(trained[name], before) == (".layer." in name), name
    full = cv.simulate(cv.scaffold(0.1), problem(module), **ROUNDS, x0=run.params, clients_per_round=3)
    assert full.history["loss"][-1] < run.history["loss"][0]
    changed = {name: value + 1 for name, value in run.params.items()}
    with pytest.raises(cv.CovaryError, match="the module's own, as it is frozen"):
        cv.simulate(cv.scaffold(0.1), problem(module), **ROUNDS, x0=changed)


@pytest.mark.parametrize(
    "x0",
    [
        lambda m: m,
        lambda m: m.state_dict(),
        lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
        lambda m: torch.nn.utils.parameters_to_vector(m.parameters()).detach().numpy(),
        lambda m: torch.compile(m, backend="eager"),
    ],
)
def test_a_run_starts_from_parameters_in_any_form(x0):
    module = torch.nn.Linear(**LINEAR)
    call = {**ROUNDS, "seed": 1}
    same(cv.simulate(cv.sgd(0.1), problem(), **call, x0=x0(module)), cv.simulate(cv.sgd(0.1), problem(module), **call))


def test_a_function_builds_another_start_for_every_seed():
    build = lambda: torch.nn.Linear(**LINEAR)  # noqa: E731
    starts = []
    for seed in (0, 1, 1):
        with generators_as_before():
            starts.append(cv.simulate(cv.sgd(1e-9), problem(build), rounds=1, seed=seed).x)
        torch.manual_seed(seed)
        np.testing.assert_allclose(
            starts[-1], torch.nn.utils.parameters_to_vector(build().parameters()).detach(), atol=1e-6
        )
    np.testing.assert_array_equal(starts[1], starts[2])
    assert not np.array_equal(starts[0], starts[1])


# Odd modules


class Recurrent(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.out = kind(1, 4, batch_first=True), torch.nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.out(self.layer(x[..., None])[0][:, -1])


class Alias(torch.nn.Module):
    """Has its weight in a list too, where torch.func does not replace it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(D, CLASSES)
        self.weights = [self.layer.weight]

    def forward(self, x):
        return x @ self.weights[0].T + self.layer.bias


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.out(self.embedding((x.abs() * 2).long().clamp(max=6)).mean(1))


class Odd(torch.nn.Module):
    """Callable attributes, and a length of 0."""

    def __init__(self):
        super().__init__()
        self.layer, self.squash, self.scale = torch.nn.Linear(D, CLASSES), torch.tanh, lambda x: 2 * x

    def __len__(self):
        return 0

    def forward(self, x):
        return self.scale(self.squash(self.layer(x)))


def hooked():
    module = network(torch.nn.Linear(D, D))
    module[0].register_forward_hook(lambda module, args, out: 2 * out)
    module[1].register_full_backward_hook(lambda module, ins, outs: tuple(g if g is None else g / 2 for g in ins))
    return module


ODD = {
    "lstm": lambda: Recurrent(torch.nn.LSTM),
    "gru": lambda: Recurrent(torch.nn.GRU),
    "sparse embedding": Bag,
    "no length": Odd,
    "hooks": hooked,
    "parametrized": lambda: torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(D, CLASSES)),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(D, CLASSES)),
    "a weight in two places": Alias,
    "attention": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (D, 1)),
        torch.nn.Linear(1, 4),
        torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * D, CLASSES),
    ),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(D, CLASSES)),
    "channels last": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, D, 1)), torch.nn.Conv2d(1, 2, (2, 1)), torch.nn.Flatten(), torch.nn.Linear(8, CLASSES)
    ).to(memory_format=torch.channels_last),
    "one number": lambda: torch.nn.Sequential(Scale(), torch.nn.Linear(D, CLASSES).requires_grad_(False)),
    "compiled": lambda: torch.compile(linear(), backend="eager"),
}


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.nothing = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.factor * x


@pytest.mark.parametrize("kind", ODD)
def test_odd_modules_run_as_the_loop_written_out(kind):
    def build():
        torch.manual_seed(0)
        return ODD[kind]().double()

    module = build()
    for way in WAYS:
        run = cv.simulate(cv.scaffold(0.1), problem(module), 2, 3, 2, batch_size=4, **way)
        own = getattr(plain := build(), "_orig_mod", plain)
        x, _ = by_hand(own, cross_entropy, tensors(), run, 0.1, 2, 4, 0)
        np.testing.assert_allclose(run.x, x, rtol=0, atol=1e-12)
        assert isinstance(run.model(), type(getattr(module, "_orig_mod", module)))


class Mixed(torch.nn.Module):
    """Layers in two types, and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.low, self.high = torch.nn.Linear(D, D).bfloat16(), torch.nn.Linear(D, CLASSES)
        self.register_buffer("mean", torch.full((D,), 0.1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
        self.register_buffer("places", torch.arange(D))
        self.register_buffer("bound", torch.ones(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.count.add_(1)
        h = self.low((x - self.mean).bfloat16()).float()
        return self.high(h[:, self.places]) * self.bound + self.mask.exp()


def test_parameters_and_buffers_of_several_types_keep_them():
    torch.manual_seed(0)
    module = Mixed()
    run = cv.simulate(cv.scaffold(0.01), problem(module), 2, local_steps=3, batch_size=4, store="disk")
    assert run.x.dtype == np.float32
    assert sorted(run.buffers) == ["count", "mean"]
    np.testing.assert_array_equal(run.buffers["count"], 6.0)
    assert run.buffers["mean"].dtype == np.float64
    for state in (run.params, run.model().state_dict()):
        for name, value in module.state_dict().items():
            assert state[name].dtype == value.dtype, name
            assert torch.equal(state[name], value) == (name in ("mask", "places")), name


def test_a_module_may_be_in_any_mode_and_a_loss_may_change_it():
    def evaluated(module, batch):
        module.eval()
        return cross_entropy(module, batch)

    ours = problem(dropout(), loss=evaluated)
    same(cv.simulate(cv.sgd(0.1), ours, **ROUNDS), cv.simulate(cv.sgd(0.1), problem(dropout().eval()), **ROUNDS))
    assert ours.module.training


@pytest.mark.parametrize(
    "call", [{"clients_per_round": 1}, {"local_steps": 1}, {"batch_size": 1}, {"rounds": 1}, {"eval_every": 9}]
)
def test_the_smallest_cohorts_steps_and_batches(call):
    run = cv.simulate(cv.scaffold(0.1), problem(), **ROUNDS | call)
    assert np.isfinite(run.history["loss"][-1])


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (12,), (1, 30)])
def test_one_client_and_clients_with_one_example(sizes):
    runs = [cv.simulate(cv.scaffold(0.1), problem(sizes=sizes), 3, local_steps=2, **way) for way in WAYS]
    assert runs[0].history["loss"][-1] < runs[0].history["loss"][0]
    for run in runs[1:]:
        np.testing.assert_allclose(run.x, runs[0].x, atol=1e-12)
