"""Data for PyTorch modules in every form, and what is rejected before the first round."""

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split
from torch_problems import (
    CLASSES,
    EVEN,
    UNEVEN,
    Crash,
    D,
    batch_norm,
    crash_at,
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
from covary.errors import InvalidInput
from covary.running.store import ALLOWED

CALL = {"rounds": 3, "clients_per_round": 3, "local_steps": 3}


def run(data, loss=cross_entropy, module=None, algorithm=None, **more):
    ours = cvt.supervised(linear() if module is None else module, loss, data)
    return cv.simulate(algorithm or cv.scaffold(0.1), ours, **{**CALL, "batch_size": 4, **more})


# Forms that give the same numbers


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Items(Dataset):
    """An example at a time; changed at random where noise is given."""

    def __init__(self, x, y, noise=0.0):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        drawn = torch.randn(D) + random.random() + np.random.rand() if self.noise else 0
        return self.x[at] + self.noise * drawn, self.y[at]


class Whole(Items):
    """Many examples at once."""

    def __getitems__(self, places):
        return [(self.x[at], self.y[at]) for at in places]


class Plain:
    """No Dataset, but what one has."""

    def __init__(self, x, y):
        self.rows = list(zip(x, y, strict=True))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


def by_name(module, batch):
    return cross_entropy(module, (batch["input"]["x"], batch["y"]))


def streamed(folder):
    cv.FederatedData.write(folder, parts(UNEVEN))
    return cv.FederatedData.open(folder, stream=True)


def split_off(data):
    """The clients as subsets of one data set."""
    x, y = (torch.cat(leaves) for leaves in zip(*data, strict=True))
    whole, starts = TensorDataset(x, y), np.cumsum([0, *(len(part[0]) for part in data)])
    return [Subset(whole, range(low, high)) for low, high in itertools.pairwise(starts)]


FORMS = {
    "FederatedData": lambda data: cv.FederatedData.from_clients(parts(UNEVEN)),
    "arrays": lambda data: parts(UNEVEN),
    "arrays in float32 and int8": lambda data: [(x, y.astype(np.int8)) for x, y in parts(UNEVEN)],
    "arrays in big endian order": lambda data: [(x.astype(">f8"), y.astype(">i4")) for x, y in parts(UNEVEN)],
    "read-only arrays": lambda data: [(read_only(x), read_only(y)) for x, y in parts(UNEVEN)],
    "lists": lambda data: [list(part) for part in data],
    "named tuples": lambda data: [Pair(*part) for part in data],
    "TensorDatasets": lambda data: [TensorDataset(*part) for part in data],
    "subsets": split_off,
    "subsets of data sets": lambda data: [Subset(Items(*part), range(len(part[0]))) for part in data],
    "data sets": lambda data: [Items(*part) for part in data],
    "data sets that give many at once": lambda data: [Whole(*part) for part in data],
    "objects with a length": lambda data: [Plain(*part) for part in data],
    "joined data sets": lambda data: [ConcatDataset([Items(x[:2], y[:2]), Items(x[2:], y[2:])]) for x, y in data],
}


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_gives_the_same_numbers(form):
    found, expected = run(FORMS[form](tensors(UNEVEN))), run(tensors(UNEVEN))
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-12)


def test_data_read_from_a_folder_gives_the_same_numbers(tmp_path):
    found, expected = run(streamed(tmp_path / "data"), warm_start=True), run(tensors(UNEVEN), warm_start=True)
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.history["loss"][-1], expected.history["loss"][-1], rtol=1e-12)
    assert (tmp_path / "data").is_dir()
    ours = cvt.supervised(linear(), cross_entropy, streamed(tmp_path / "again"))
    with pytest.raises(InvalidInput, match="streamed from its folder"):
        cv.sweep(cv.sgd, ours, {"eta_l": [0.1]}, rounds=1)


def test_dicts_and_single_tensors_are_batches_too():
    nested = [{"input": {"x": x}, "y": y} for x, y in tensors()]
    same(run(nested, by_name), run(tensors()))
    alone = run([x for x, _ in tensors()], lambda module, x: (module(x) ** 2).mean())
    same(alone, run([(x,) for x, _ in tensors()], lambda module, batch: (module(batch[0]) ** 2).mean()))


def test_a_random_split_and_a_test_set_as_a_data_set():
    whole = TensorDataset(*(torch.cat(leaves) for leaves in zip(*tensors(), strict=True)))
    *clients, held_out = random_split(whole, [12] * 5 + [12], torch.Generator().manual_seed(0))
    ours = cvt.supervised(linear(), cross_entropy, clients, test=held_out, metrics=hits)
    found = cv.simulate(cv.scaffold(0.1), ours, **CALL)
    x, y = (torch.stack(leaves) for leaves in zip(*held_out, strict=True))
    assert found.history["accuracy"][-1] == pytest.approx((found.model()(x).argmax(1) == y).double().mean().item())


# Data that is drawn at random


def augmented():
    return [Items(*part, noise=0.3) for part in tensors(UNEVEN)]


def shuffled(generator=False):
    """Loaders with batches of 3, of which the last is smaller."""
    torchs = [torch.Generator().manual_seed(7) if generator else None for _ in UNEVEN]
    return [
        DataLoader(TensorDataset(*p), 3, shuffle=True, generator=g)
        for p, g in zip(tensors(UNEVEN), torchs, strict=True)
    ]


def shuffled_by_their_own():
    return shuffled(generator=True)


def augmenting_loaders():
    return [DataLoader(each, 3, shuffle=True) for each in augmented()]


@pytest.mark.parametrize("make", [augmented, shuffled, shuffled_by_their_own, augmenting_loaders])
@pytest.mark.parametrize("algorithm", [cv.scaffold(0.1), cv.scaffold(0.1, option="I"), cv.mime(0.1)], ids=str)
def test_the_seed_decides_what_data_sets_and_loaders_draw(make, algorithm, tmp_path):
    call = {"algorithm": algorithm, "batch_size": 4 if make is augmented else None}
    with generators_as_before():
        first = run(make(), **call)
    torch.rand(1), random.random(), np.random.rand()  # what else the process draws has no influence
    same(run(make(), **call), first)
    assert not np.array_equal(run(make(), **call, seed=1).x, first.x)
    with pytest.raises(Crash):
        run(make(), **call, checkpoint=tmp_path, checkpoint_every=1, log=crash_at(3))
    torch.rand(1), random.random(), np.random.rand()
    same(run(make(), **call, checkpoint=tmp_path, checkpoint_every=1), first)


def test_a_loader_gives_its_own_batches_again_and_again_until_the_steps_are_done():
    sizes, seen = (7, 3), []

    def loss(module, batch):
        seen.append(len(batch[0]))
        return cross_entropy(module, batch)

    loaders = [DataLoader(TensorDataset(*part), 3) for part in tensors(sizes)]
    ours = cvt.supervised(linear(), loss, loaders)

    def steps(count, **work):
        seen.clear()
        found = cv.simulate(cv.fedavg(0.1), ours, 1, **work, eval_every=1)
        return found, seen[-count - 4 :]  # at the end, the loss of all data is measured

    once = [3, 3, 1, 3]
    assert steps(4)[1] == once + once
    assert steps(8, local_epochs=2)[1] == [3, 3, 1] * 2 + [3] * 2 + once
    assert steps(8, local_steps=4)[1] == [3, 3, 1, 3] + [3] * 4 + once
    evaluated = steps(4, weights="examples")[0]
    x, y = (torch.cat(leaves) for leaves in zip(*tensors(sizes), strict=True))
    assert evaluated.history["loss"][0] == pytest.approx(cross_entropy(evaluated.model(), (x, y)).item())


def test_an_iterable_of_batches_with_a_length_is_a_loader():
    class Batches:
        def __init__(self, x, y):
            self.each = list(zip(x.split(4), y.split(4), strict=True))

        def __len__(self):
            return len(self.each)

        def __iter__(self):
            return iter(self.each)

    found = run([Batches(*part) for part in tensors()], batch_size=None)
    same(found, run([DataLoader(TensorDataset(*part), 4) for part in tensors()], batch_size=None))


# What is rejected


def optimizer():
    return torch.optim.SGD(linear().parameters(), 0.1)


def schedule():
    return torch.optim.lr_scheduler.StepLR(optimizer(), 1)


class Counting(torch.nn.Module):
    def __init__(self, persistent=True):
        super().__init__()
        self.layer = linear()
        kind = torch.int64 if persistent else torch.float64
        self.register_buffer("calls", torch.zeros((), dtype=kind), persistent=persistent)

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Locked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        import threading

        self.layer, self.lock = linear(), threading.Lock()


def with_gradient_hook():
    module = linear()
    module.weight.register_hook(lambda g: 0 * g)
    return module


def infinite():
    module = linear()
    module.weight.data[0, 0] = torch.inf
    return module


def old_weight_norm():
    module = linear()
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(module)
    return module


OUTSIDE = linear()
X, Y = tensors((12,))[0]
NO_EXAMPLES = (X[:0], Y[:0])
BAD = {
    "module": [
        (torch.nn.Linear, "module must be a torch.nn.Module; got the class Linear. Try Linear()."),
        (None, "module must be a torch.nn.Module, or a function that builds one; got NoneType"),
        (lambda: 5, "got a function of int. Return the module"),
        (optimizer(), "module must be no optimizer; got SGD. Leave it out"),
        (linear().requires_grad_(False), "module must be one with parameters to train; got none"),
        (torch.nn.ReLU(), "module must be one with parameters to train"),
        (torch.nn.LazyLinear(3), "module must be one whose parameters have shapes; got weight without one"),
        (torch.nn.Linear(D, 3, device="meta"), "got weight on the meta device. Give it numbers"),
        (torch.nn.Linear(D, 3, dtype=torch.complex64), "trained in real numbers; got weight in torch.complex64"),
        (infinite(), "module must be one whose parameters are finite; got NaN or infinity in weight"),
        (Counting(), "buffer 'calls' must be one that training does not change; got torch.int64"),
        (Counting(persistent=False), "buffer 'calls' must be one that training does not change; got torch.float64"),
        (Locked(), "module must be one that copy.deepcopy copies; got TypeError"),
        (with_gradient_hook(), "module must be one without hooks on its parameters; got a hook on weight"),
    ],
    "loss": [
        (torch.nn.CrossEntropyLoss(), "got a CrossEntropyLoss. Try lambda module, batch: criterion(module(batch[0]), "),
        (None, "loss must be a function loss(module, batch); got NoneType"),
        (optimizer(), "loss must be no optimizer; got SGD"),
        (schedule(), "loss must be no optimizer; got StepLR"),
        (lambda m, b: len(b[0]) * cross_entropy(m, b), "loss(module, batch) must be the mean over the batch"),
        (lambda m, b: cross_entropy(m, b).item(), "must be one real number; got float"),
        (lambda m, b: m(b[0]).sum(1), "must be one real number; got shape (16,)"),
        (lambda m, b: cross_entropy(m, b).detach(), "a function of the module's parameters; got no gradient"),
        (lambda m, b: cross_entropy(OUTSIDE, b), "got none of its parameters. Every worker has a copy of the module"),
        (lambda m, b: cross_entropy(m, b) / 0, "loss(module, batch) is inf at the starting point"),
        (lambda m, b: (cross_entropy(m, b) * 0).sqrt(), "The gradient of loss(module, batch) is not finite"),
        (lambda m, b: (cross_entropy(m, b), 1), "must be one real number; got tuple"),
    ],
    "data": [
        (X, "data must be the examples of at least one client; got Tensor"),
        ([], "data must be the examples of at least one client; got an empty list"),
        (TensorDataset(X, Y), "at least one client; got TensorDataset. Pass a FederatedData, or one tuple"),
        (optimizer(), "data must be no optimizer"),
        ([(X, Y), NO_EXAMPLES], "data[1] must be tensors of one length; got shapes (0, 5), (0,)."),
        ([Items(*NO_EXAMPLES)], "data[0] must be at least one example; got an empty data set"),
        ([DataLoader(Items(X, Y), 20, drop_last=True)], "data[0] must be at least one batch; got 12 examples in 0"),
        ([(X, Y[:3])], "data[0] must be tensors of one length; got shapes (12, 5), (3,)"),
        ([(X, Y), (X[:, :4], Y)], "data[1] must be like data[0]: torch.float64 of shape (rows, 5); got torch.float64"),
        ([(X, Y), (X.float(), Y)], "data[1] must be like data[0]: torch.float64 of shape (rows, 5); got torch.float32"),
        ([(X, Y), {"x": X, "y": Y}], "data[1] must be nested like data[0]"),
        ([(X, Y), TensorDataset(X, Y)], "the same for all clients: tensors or arrays, data sets, or loaders; got Ten"),
        ([(X, Y.tolist())], "got tuple of Tensor, list. Pass a FederatedData"),
        ([(X, Y), (X * torch.nan, Y)], "data[0] has NaN or infinity, first in example 0 of client 1"),
        ([(np.array(["a"] * 12), Y.numpy())], "data must be numbers; got dtype <U1"),
        ([type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})()], "a data set of a known length"),
    ],
    "test": [
        (5, "test must be a batch of tensors, or a torch.utils.data.Dataset; got int"),
        (DataLoader(Items(X, Y)), "test must be a batch of tensors, or a torch.utils.data.Dataset; got DataLoader"),
        ((X, Y[:3]), "test must be tensors of one length; got shapes (12, 5), (3,)"),
        (NO_EXAMPLES, "test must be tensors of one length"),
        ((X / 0, Y), "test[0] has NaN or infinity, first in example 0."),
    ],
    "metrics": [
        (5, "metrics must be a function metrics(module, batch); got int"),
        (lambda m, b: 1.0, "metrics(module, batch) must be a dict of numbers; got 1.0"),
        (lambda m, b: {}, "metrics(module, batch) must be a dict of numbers; got {}"),
        (lambda m, b: {"a": torch.zeros(2)}, "metrics(module, batch)['a'] must be one number, or one number per"),
        (lambda m, b: {"loss": 1.0}, "metrics must be named differently from covary's columns; got 'loss'"),
        (lambda m, b: {"average_a": 1.0}, "metrics must be named differently from covary's columns"),
    ],
}


@pytest.mark.parametrize(
    ("parameter", "value", "text"), [(name, *case) for name, cases in BAD.items() for case in cases]
)
def test_a_wrong_value_is_rejected(parameter, value, text):
    given = {"module": linear(), "loss": cross_entropy, "data": tensors(), "metrics": hits} | {parameter: value}
    with pytest.raises(InvalidInput) as error:
        cvt.supervised(**given)
    assert text in str(error.value)


def test_weight_norm_of_old_is_rejected_and_the_new_one_is_named():
    with pytest.raises(InvalidInput, match=r"parametrizations\.weight_norm can"):
        problem(old_weight_norm())


@pytest.mark.parametrize(
    ("given", "kind", "note"),
    [
        ({"data": [(X[:, :4], Y)]}, RuntimeError, "covary called loss(module, batch) with batch[0]: torch.float64 of"),
        ({"data": [(X, Y), (X, Y + 5)]}, IndexError, "labels must lie between 0 and the number of classes minus 1"),
        ({"data": [(X, Y - 1)]}, IndexError, "labels must lie between 0"),
        ({"test": (X, Y + 5)}, IndexError, "covary called metrics(module, batch)"),
        ({"data": [(X.float(), Y)]}, RuntimeError, "The module's parameters are torch.float64. Convert the data"),
        ({"loss": torch.nn.functional.cross_entropy}, TypeError, "covary called loss(module, batch) with batch[0]"),
        ({"data": [{"x": X, "y": Y}]}, KeyError, "batch['x']: torch.float64 of shape"),
        ({"loss": lambda m, b: slope_penalty(m, b)}, RuntimeError, "torch.enable_grad()"),
    ],
)
def test_an_error_in_a_users_function_gets_a_note(given, kind, note):
    measured = lambda m, b: {"nll": cross_entropy(m, b)}  # noqa: E731
    with pytest.raises(kind) as error:
        cvt.supervised(**{"module": linear(), "loss": cross_entropy, "data": tensors(), "metrics": measured} | given)
    assert any(note in each for each in error.value.__notes__)


def slope_penalty(module, batch):
    value = cross_entropy(module, batch)
    return value + 0.01 * sum(
        (g**2).sum() for g in torch.autograd.grad(value, list(module.parameters()), create_graph=True)
    )


def test_a_loss_may_take_gradients_itself():
    def loss(module, batch):
        with torch.enable_grad():
            return slope_penalty(module, batch)

    found = [run(tensors(), loss, **way) for way in ({}, {"width": 1})]
    np.testing.assert_allclose(found[0].x, found[1].x, atol=1e-12)
    assert found[0].history["loss"][-1] < found[0].history["loss"][0]


LOADERS = [DataLoader(TensorDataset(*part), 4) for part in tensors()]
BAD_RUNS = [
    ({}, {"batch_size": 13}, "batch_size=13 is larger than the data of client 0, which has 12 examples"),
    ({"data": LOADERS}, {"batch_size": 4}, "batch_size must be None for loaders, which have batches of their own"),
    ({"module": dropout()}, {"width": 2}, "width must be 1 here, because"),
    ({"module": batch_norm()}, {"width": 2}, "because the module has buffers that are averaged"),
    ({"sizes": UNEVEN}, {"width": 2, "local_epochs": 1, "local_steps": None}, "because clients differ in size"),
    ({"loss": lambda m, b: cross_entropy(m, b) * (2 if b[0].sum() > 1e9 else 1)}, {"width": 2}, "vmap cannot follow"),
    ({}, {"width": 0}, "width must be a whole number of at least 1"),
    ({}, {"devices": 0}, "devices must be a whole number of at least 1"),
    ({}, {"microbatch": 0}, "microbatch must be a whole number of at least 1"),
    ({"module": batch_norm()}, {"microbatch": 2}, "microbatch must be None"),
    ({}, {"precision": "bfloat16"}, "precision must be None for a module on a CPU; got 'bfloat16'"),
    ({}, {"debug": True}, "debug=True is for JAX models. A PyTorch module already runs in plain Python"),
    ({}, {"store": "somewhere"}, f"store must be {ALLOWED}"),
    ({}, {"x0": np.zeros(3)}, "x0 must be a state_dict of the module, or a vector of 18 numbers; got shape (3,)"),
    ({}, {"x0": 1.0}, "or a vector of 18 numbers; got shape ()"),
    ({}, {"x0": {"weight": np.zeros((3, 5))}}, "x0['bias'] must be of shape (3,); got no such entry"),
    ({}, {"x0": network(torch.nn.Linear(2, D))}, "x0['weight'] must be of shape (3, 5); got no such entry"),
    ({}, {"x0": torch.nn.Linear(4, 3)}, "x0['weight'] must be of shape (3, 5); got shape (3, 4)"),
    ({}, {"x0": np.full(18, np.nan)}, "x0 must be finite"),
    ({}, {"target": ("accuracy", 0.5)}, "accuracy"),
    ({}, {"log": 5}, "log must be a function of (round, values)"),
]


@pytest.mark.parametrize(("of_problem", "given", "text"), BAD_RUNS)
def test_a_wrong_request_is_rejected_before_the_first_round(of_problem, given, text):
    def log(r, values):
        raise AssertionError("a round was run")

    ours = problem(**of_problem)
    with pytest.raises(InvalidInput) as error:
        cv.simulate(cv.scaffold(0.1), ours, **{"rounds": 1, "local_steps": 1, "log": log, **given})
    assert text in str(error.value)


def test_builders_that_build_other_layers_are_rejected():
    widths = iter((4, 4, 5))

    def build():
        width = next(widths)
        return torch.nn.Sequential(torch.nn.Linear(D, width), torch.nn.Linear(width, CLASSES)).double()

    ours = problem(build)
    cv.simulate(cv.sgd(0.1), ours, 1, seed=1)
    with pytest.raises(InvalidInput, match="module must be built alike for every seed"):
        cv.simulate(cv.sgd(0.1), ours, 1, seed=2)


def test_step_sizes_are_numbers():
    for given in (optimizer(), schedule()):
        with pytest.raises(InvalidInput, match="eta_l must be a number, the step-size of plain SGD; got S"):
            cv.scaffold(eta_l=given)


def test_a_module_for_jax_is_pointed_to_torch():
    data = cv.FederatedData.from_clients(parts())
    for given in ((linear(), data), (linear(), cross_entropy, data)):
        with pytest.raises(InvalidInput, match=r"covary\.torch\.supervised"):
            cv.supervised(*given)


def test_equal_clients_are_not_mixed_up():
    """Every client's examples are its own, in every form: the gradients of single clients tell them apart."""
    for form in ("FederatedData", "data sets", "subsets"):
        ours = cvt.supervised(linear(), cross_entropy, FORMS[form](tensors(UNEVEN)))
        found = cv.simulate(
            cv.scaffold(0.1), ours, len(UNEVEN) + 1, clients_per_round=1, warm_start=True, local_steps=1
        )
        i = int(found.history["cohort"][-1, 0])
        for at, part in enumerate(tensors(UNEVEN)):
            module = linear()
            value = cross_entropy(module, part)
            g = torch.cat([leaf.reshape(-1) for leaf in torch.autograd.grad(value, list(module.parameters()))])
            if at != i:
                np.testing.assert_allclose(found.clients.c_i[at], g, atol=1e-12)
    assert len(EVEN) == len(UNEVEN)
