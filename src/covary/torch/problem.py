"""The problem of training a PyTorch module on federated data, checked before anything runs."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from covary import trees
from covary.data.federated import FederatedData
from covary.errors import InvalidInput, refused
from covary.running.job import COLUMNS
from covary.torch.examples import (
    Examples,
    Picked,
    Rows,
    converted,
    examples_of,
    is_batch,
    moved,
    reject_non_finite,
    rows_in,
)
from covary.torch.module import Network, any_kernels, counters_that_count, loaded, uncompiled, unwrapped
from covary.torch.seeds import seeded
from covary.torch.work import Loss

Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem to minimise: f(x) = sum_i p_i f_i(x), with f_i the mean loss of a module on client i's examples."""

    engine: ClassVar[str] = "covary.torch.runtime"

    module: torch.nn.Module  # with the initial parameters of seed 0, which are never changed
    build: Callable[[], torch.nn.Module] | None  # builds one, with the initial parameters of the seed that is set
    loss: Loss
    examples: Examples
    data: FederatedData  # the same in NumPy; of loaders and data sets, the examples' numbers only
    metrics: Metrics | None = None
    test: Any = None
    metric_names: tuple[str, ...] = ()
    means: frozenset[str] = frozenset()  # the metrics that return one number per example, of which the mean is meant
    draws: bool = False  # whether the loss in training mode draws random numbers, as dropout does

    @cached_property
    def network(self) -> Network:
        return Network(self.module)

    @property
    def n_clients(self) -> int:
        return len(self.examples.sizes)

    @property
    def frozen(self) -> dict[str, np.ndarray] | None:
        """The parameters that are not trained, by name, bit by bit."""
        named = uncompiled(self.module).named_parameters()
        found = {name: _bits(p) for name, p in named if not p.requires_grad}
        return found or None

    @property
    def buffers(self) -> np.ndarray | None:
        """The averaged buffers at the start, as a vector."""
        return self.network.buffers.cpu().numpy() if self.network.averaged else None

    def without_metrics(self) -> Problem:
        """The same problem, of which only the loss is measured."""
        return replace(self, metrics=None, metric_names=(), means=frozenset())

    def few_on_device(self) -> Any:
        """A few examples, on the module's device: the same ones at every call."""
        with seeded(0, self.network.device):
            return moved(_few(self.examples), self.network.device)

    def start(self, x0: Any, seed: int) -> tuple[np.ndarray, None]:
        """The flat starting point, from `x0`, or from the module that the seed gives."""
        network = self.network
        x = network.x.cpu().numpy()
        if x0 is None:
            return (x if self.build is None or seed == 0 else self._of_seed(seed)), None
        given = dict(uncompiled(x0).state_dict()) if isinstance(x0, torch.nn.Module) else x0
        if isinstance(given, Mapping):
            given = self._trained_part(given)
        elif isinstance(given, torch.Tensor):  # such as torch.nn.utils.parameters_to_vector(module.parameters())
            given = given.detach().to("cpu", network.dtype)
        try:
            flat = np.atleast_1d(np.asarray(given)).astype(x.dtype)
        except (TypeError, ValueError, RuntimeError):
            flat = np.empty(0)
        if flat.shape != x.shape:
            shape = getattr(x0, "shape", () if np.isscalar(x0) else None)
            came = type(x0).__name__ if shape is None else f"shape {tuple(shape)}"
            allowed = f"a state_dict of the module, or a vector of {x.size} numbers"
            raise refused("x0", allowed, came, "Pass run.params, for example.")
        if not np.isfinite(flat).all():
            raise refused("x0", "finite", "NaN or infinity in it", "Start from finite parameters.")
        return flat, None

    def _of_seed(self, seed: int) -> np.ndarray:
        assert self.build is not None
        network = Network(built(self.build, seed))
        if network.sizes != self.network.sizes:
            raise refused("module", "built alike for every seed", "other parameters", "Build the same layers.")
        return network.x.cpu().numpy()

    def _trained_part(self, given: Mapping[str, Any]) -> np.ndarray:
        parts = []
        for name, p in uncompiled(self.module).named_parameters():
            found = given.get(name, given.get(f"_orig_mod.{name}"))
            if found is None or tuple(np.shape(found)) != tuple(p.shape):
                came = "no such entry" if found is None else f"shape {tuple(np.shape(found))}"
                fix = "Pass run.params or module.state_dict()."
                raise refused(f"x0[{name!r}]", f"of shape {tuple(p.shape)}", came, fix)
            found = torch.as_tensor(found).detach().to(p.device)
            if p.requires_grad:
                parts.append(found.reshape(-1).to(self.network.dtype))
            elif not bool(torch.equal(found.to(p.dtype), p)):
                fix = "Build the module with it."
                raise refused(f"x0[{name!r}]", "the module's own, as it is frozen", "other numbers", fix)
        return torch.cat(parts).cpu().numpy()

    def trained(self, x: np.ndarray, buffers: np.ndarray | None) -> torch.nn.Module:
        """A copy of the module with these parameters and averaged buffers."""
        module = copy.deepcopy(uncompiled(self.module))
        network = Network(module)
        named = None if buffers is None else network.named_buffers(buffers)
        network.restore()
        return loaded(module, x, named)


def supervised(
    module: torch.nn.Module | Callable[[], torch.nn.Module],
    loss: Loss,
    data: Any,
    test: Any = None,
    metrics: Metrics | None = None,
) -> Problem:
    """The problem of training a PyTorch module on federated data, for `cv.simulate`, `cv.sweep` and `cv.diagnose`.

    Parameters with `requires_grad=False` stay as they are, and are not part of x, c, the c_i or what is sent. Float
    buffers, such as BatchNorm's statistics, are averaged over the cohort and never corrected by control variates. What
    a module draws at random, as dropout does, is fixed by the seed, round, exchange, client and step. The module runs
    on the device it is on, and is not changed: a run's trained module is `run.model()`.

    Args:
        module: the model, or a function that builds one. A module starts every run with its own parameters; a function
            is called with PyTorch's generator set to the run's seed.
        loss: `loss(module, batch) -> scalar`, the mean over the batch.
        data: a `FederatedData`, or a list with one entry per client: tensors in a tuple or dict, a
            `torch.utils.data.Dataset`, or a `DataLoader` with batches of its own.
        test: a batch for the metrics, or a `Dataset`. Without it they are measured on the training data.
        metrics: `metrics(module, batch) -> dict`. A metric is a number, measured on all test examples at once, or a
            tensor with one number per example, whose mean is measured.

    >>> import torch, covary as cv, covary.torch as cvt
    >>> def loss(module, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.cross_entropy(module(x), y)
    >>> clients = [(torch.randn(20, 3), torch.randint(2, (20,))) for _ in range(4)]
    >>> problem = cvt.supervised(torch.nn.Linear(3, 2), loss, clients)
    >>> run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=5, clients_per_round=2, batch_size=10)
    >>> list(run.params), run.model()(torch.zeros(1, 3)).shape
    (['weight', 'bias'], torch.Size([1, 2]))
    """
    _reject_mistakes(module, loss, data, metrics)
    build = None if isinstance(module, torch.nn.Module) else module
    own = module if isinstance(module, torch.nn.Module) else built(module, 0)
    network = Network(own)
    names: tuple[str, ...] = ()
    means: frozenset[str] = frozenset()
    with seeded(0, network.device), any_kernels():
        examples = examples_of(data, network.dtype)
        reject_non_finite(examples)
        tested = None if test is None else _test_batch(test, network.dtype)
        few, trial, before = _few(examples), network.copied(), _generator_states(network.device)
        _check_loss(trial, loss, few, examples)
        if metrics is not None:
            measured = examples if tested is None else Rows(tested, [rows_in(tested)])
            _check_labels(trial, "metrics", metrics, _extreme(measured))
            names, means = _check_metrics(trial, metrics, few if tested is None else _first_rows(tested, 3))
        draws = _generator_states(network.device) != before
    return Problem(own, build, loss, examples, _in_numpy(data, examples), metrics, tested, names, means, draws)


def built(build: Callable[[], Any], seed: int) -> torch.nn.Module:
    """The module that a function builds with PyTorch's generator set to the seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        module = build()
    if not isinstance(module, torch.nn.Module):
        allowed, came = "a torch.nn.Module, or a function that builds one", f"a function of {type(module).__name__}"
        raise refused("module", allowed, came, "Return the module.")
    return module


@contextlib.contextmanager
def evaluating(network: Network) -> Iterator[torch.nn.Module]:
    """The module in evaluation mode, without gradients. It is not compiled for the shapes that come only here."""
    network.own.eval()
    try:
        with torch.no_grad():
            yield network.own
    finally:
        network.restore()


def averaged(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Metrics with the mean of those that have one number per example."""
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    return {name: value.double().mean() if value.ndim else value for name, value in tensors.items()}


def _reject_mistakes(module: Any, loss: Any, data: Any, metrics: Any) -> None:
    for name, value in (("module", module), ("loss", loss), ("data", data), ("metrics", metrics)):
        if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            fix = (
                "Leave it out: the algorithm takes the local steps, with its own step-size, say cv.scaffold(eta_l=0.1)."
            )
            raise refused(name, "no optimizer", type(value).__name__, fix)
    if not isinstance(module, torch.nn.Module) and not callable(module):
        came = type(module).__name__
        raise refused("module", "a torch.nn.Module, or a function that builds one", came, "Pass the module itself.")
    if isinstance(module, type):
        raise refused("module", "a torch.nn.Module", f"the class {module.__name__}", f"Try {module.__name__}().")
    if isinstance(loss, torch.nn.Module):
        fix = "Try lambda module, batch: criterion(module(batch[0]), batch[1])."
        raise refused("loss", "a function loss(module, batch)", f"a {type(loss).__name__}", fix)
    if not callable(loss):
        raise refused("loss", "a function loss(module, batch)", type(loss).__name__, "It returns the mean loss.")
    if metrics is not None and not callable(metrics):
        raise refused("metrics", "a function metrics(module, batch)", type(metrics).__name__, "It returns a dict.")


def _few(examples: Examples) -> Any:
    """A few examples, from all over the data where that costs nothing."""
    if isinstance(examples, Rows):
        return examples.at(np.unique(np.linspace(0, examples.sizes.sum() - 1, 16).astype(int)))
    if isinstance(examples, Picked):
        return examples.pick(0, np.arange(min(16, int(examples.sizes[0]))))
    return next(iter(examples.everything(0, 1)))


def _extreme(examples: Examples) -> Any:
    """The examples with the smallest and the largest whole number of every field: a wrong label is among them."""
    if not isinstance(examples, Rows):
        return None
    rows: list[int] = []
    for leaf in trees.leaves(examples.examples):
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.uint8:
            flat = leaf.reshape(len(leaf), -1)
            rows += [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())]
    return examples.at(np.array(sorted(set(rows)))) if rows else None


def _check_loss(network: Network, loss: Loss, few: Any, examples: Examples) -> None:
    """Reject a loss that cannot be trained with. The network is a copy of the user's."""
    _check_labels(network, "loss", loss, _extreme(examples))
    # In training mode: what comes out, and what it changes on the way
    counters = {name: b.clone() for name, b in counters_that_count(network.module).items()}
    value = _called("loss", loss, network, few)
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        came = f"shape {tuple(value.shape)}, {value.dtype}" if hasattr(value, "shape") else type(value).__name__
        raise refused("loss(module, batch)", "one real number", came, "Return the mean over the batch.")
    if not value.requires_grad:
        fix = "Compute it from module(...), without no_grad, detach or .item()."
        raise refused("loss(module, batch)", "a function of the module's parameters", "no gradient", fix)
    if not bool(value.isfinite()):
        raise InvalidInput(
            f"loss(module, batch) is {value.item()} at the starting point. Check the scale of the data, the "
            "initialisation, and the loss for divisions by zero and logarithms of zero."
        )
    found = torch.autograd.grad(value, network.trained, allow_unused=True)
    if all(slope is None for slope in found):
        fix = "Every worker has a copy of the module: use the function's argument, not a module from outside."
        raise refused("loss(module, batch)", "computed with the module that it gets", "none of its parameters", fix)
    if not bool(network.flat(found).isfinite().all()):
        raise InvalidInput("The gradient of loss(module, batch) is not finite at the starting point.")
    for name, before in counters.items():
        if not torch.equal(dict(network.own.named_buffers())[name], before):
            fix = "Only real numbers in the state_dict are averaged over clients. Keep counters out of the module."
            raise refused(f"buffer {name!r}", "one that training does not change", f"{before.dtype}", fix)
    # In evaluation mode: a mean, not a sum
    with evaluating(network):
        before = _generator_states(network.device)
        once = float(_called("loss", loss, network, few))
        noisy = _generator_states(network.device) != before  # as a variational autoencoder's is
        twice = float(_called("loss", loss, network, _repeated(few)))
    coarsest = max(torch.finfo(kind).eps for kind in {value.dtype, *(p.dtype for p in network.trained)})
    if abs(once - twice) > (0.5 if noisy else max(1e-3, 4 * coarsest)) * max(abs(once), 1e-6):
        raise InvalidInput(
            "loss(module, batch) must be the mean over the batch, but repeating the same examples changes it from "
            f"{once:.4g} to {twice:.4g}. Return a mean, not a sum (reduction='mean'), so that gradients on batches "
            "and on all data have the same scale."
        )


def _check_labels(network: Network, name: str, function: Callable[..., Any], extreme: Any) -> None:
    """Call a function on the smallest and largest labels, on the CPU: a wrong one would end a GPU's program."""
    if extreme is None:
        return
    if network.device.type == "cpu":
        with evaluating(network):
            _called(name, function, network, extreme)
        return
    own = Network(copy.deepcopy(network.own).cpu())
    with evaluating(own), contextlib.suppress(RuntimeError):  # the CPU may lack an operation of a GPU
        _called(name, function, own, extreme)


def _called(name: str, function: Callable[..., Any], network: Network, batch: Any) -> Any:
    """What a user's function returns. An error inside it gets a note with what it was called with."""
    try:
        return unwrapped(function)(network.own, moved(batch, network.device))
    except Exception as error:
        shown = ", ".join(
            f"batch{path}: {leaf.dtype} of shape {tuple(leaf.shape)}"
            for path, leaf in trees.leaves_with_path(batch)
            if hasattr(leaf, "shape")
        )
        error.add_note(f"covary called {name}(module, batch) with {shown or type(batch).__name__}.")
        if isinstance(error, IndexError) or "out of bounds" in str(error):
            error.add_note(
                "The examples with the smallest and largest labels were among them: labels must lie between 0 and the "
                "number of classes minus 1."
            )
        elif "does not require grad" in str(error):
            error.add_note("covary evaluates without gradients. If the loss takes one, use torch.enable_grad() there.")
        elif "dtype" in str(error) or "scalar type" in str(error):
            error.add_note(f"The module's parameters are {network.dtype}. Convert the data, or the module.")
        raise


def _check_metrics(network: Network, metrics: Metrics, batch: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    with evaluating(network):
        values = _called("metrics", metrics, network, batch)
    if not isinstance(values, Mapping) or not values or not all(isinstance(name, str) for name in values):
        fix = "Return {'accuracy': ...}, for example."
        raise refused("metrics(module, batch)", "a dict of numbers", repr(values)[:80], fix)
    rows, means = rows_in(batch), set()
    for name, value in values.items():
        shape = tuple(torch.as_tensor(value).shape)
        if shape not in ((), (rows,)):
            allowed = f"one number, or one number per example ({rows})"
            raise refused(f"metrics(module, batch)[{name!r}]", allowed, f"shape {shape}", "Take the mean.")
        if shape:
            means.add(name)
        if name in COLUMNS or name.startswith("average_"):
            raise refused("metrics", "named differently from covary's columns", repr(name), "Choose another name.")
    return tuple(values), frozenset(means)


def _test_batch(test: Any, dtype: torch.dtype) -> Any:
    """The test examples as one batch of tensors."""
    if is_batch(test):
        batch = trees.map(lambda leaf: converted(leaf, dtype), test)
        if len({len(leaf) if leaf.ndim else -1 for leaf in trees.leaves(batch)}) != 1 or not rows_in(batch):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in trees.leaves(batch))
            raise refused("test", "tensors of one length", f"shapes {shapes}", "Each row is one example.")
        reject_non_finite(Rows(batch, [rows_in(batch)]), "test")
        return batch
    if hasattr(test, "__len__") and hasattr(test, "__getitem__"):
        rows = examples_of([test], dtype)
        assert isinstance(rows, Picked)
        return rows.pick(0, np.arange(int(rows.sizes[0])))
    fix = "Pass (x, y), for example."
    raise refused("test", "a batch of tensors, or a torch.utils.data.Dataset", type(test).__name__, fix)


def _in_numpy(data: Any, examples: Examples) -> FederatedData:
    """The data as other rooms of covary know it."""
    if isinstance(data, FederatedData):
        return data
    sizes = examples.sizes
    if not isinstance(examples, Rows):
        return FederatedData((np.arange(sizes.sum()),), sizes)
    return FederatedData(trees.map(_array, examples.examples), sizes)


def _array(leaf: torch.Tensor) -> np.ndarray:
    return (leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf).cpu().numpy()


def _bits(p: torch.Tensor) -> np.ndarray:
    return p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _first_rows(batch: Any, count: int) -> Any:
    return trees.map(lambda leaf: leaf[:count], batch)


def _repeated(batch: Any) -> Any:
    def twice(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    if hasattr(batch, "keys") and not isinstance(batch, dict):  # such as the BatchEncoding of transformers
        return type(batch)({name: twice(leaf) for name, leaf in batch.items()})
    return trees.map(twice, batch)


def _generator_states(device: torch.device) -> tuple[Any, ...]:
    """What changes when a module draws random numbers of PyTorch, Python or NumPy."""
    _, words, *rest = np.random.get_state()
    own = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return (random.getstate(), np.asarray(words).tobytes(), *rest, *(state.numpy().tobytes() for state in own))
