"""Two ready-made models: softmax regression and a two-layer network, the models of the paper's experiments.

Any object with `init(key) -> params`, `loss(params, batch) -> scalar` and, if wanted, `metrics(params, batch) -> dict`
is a model. `loss` is the mean over the examples of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary.checks import whole
from covary.errors import CovaryError, refused


@dataclass(frozen=True)
class Model:
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    check: Callable[[Any], None]  # refuses examples that do not fit the model


def logistic_regression(n_features: int, n_classes: int) -> Model:
    """Multinomial logistic regression, started at zero. Batches are `(x, y)` with integer labels.

    >>> import jax, numpy as np, covary as cv
    >>> model = cv.models.logistic_regression(n_features=64, n_classes=10)
    >>> loss = model.loss(model.init(jax.random.key(0)), (np.ones((5, 64)), np.arange(5)))
    >>> round(float(loss), 4)  # log(10): all classes are equally likely at zero
    2.3026
    """
    whole("n_features", n_features, 1)
    whole("n_classes", n_classes, 2)

    def init(key: Any) -> dict[str, Any]:
        return {"w": jnp.zeros((n_classes, n_features)), "b": jnp.zeros(n_classes)}

    return Model(init, _linear_loss, _linear_metrics, _fits(n_features, n_classes))


def mlp(n_features: int, hidden: int, n_classes: int) -> Model:
    """A fully connected network with one hidden layer of ReLUs, the paper's "2 layer" network.

    >>> import jax, covary as cv
    >>> model = cv.models.mlp(n_features=64, hidden=32, n_classes=10)
    >>> model.init(jax.random.key(0))["w1"].shape
    (32, 64)
    """
    whole("n_features", n_features, 1)
    whole("hidden", hidden, 1)
    whole("n_classes", n_classes, 2)

    def init(key: Any) -> dict[str, Any]:
        key1, key2 = jax.random.split(key)
        return {
            "w1": jax.random.normal(key1, (n_features, hidden)).T * np.sqrt(2 / n_features),
            "b1": jnp.zeros(hidden),
            "w2": jax.random.normal(key2, (hidden, n_classes)).T * np.sqrt(1 / hidden),
            "b2": jnp.zeros(n_classes),
        }

    return Model(init, _mlp_loss, _mlp_metrics, _fits(n_features, n_classes))


def _flat(x: Any, like: Any) -> Any:
    """Rows of features; images in unsigned bytes are scaled to [0, 1] here, inside the step, and stored as bytes."""
    x = jnp.asarray(x).reshape(len(x), -1)
    return x.astype(like.dtype) / 255 if x.dtype == jnp.uint8 else x


def _linear(params: Any, x: Any) -> Any:
    return _flat(x, params["w"]) @ params["w"].T + params["b"]


def _two_layers(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(_flat(x, params["w1"]) @ params["w1"].T + params["b1"])
    return hidden @ params["w2"].T + params["b2"]


def _cross_entropy(logits: Any, y: Any) -> Any:
    y = jnp.asarray(y, int)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])


def _accuracy(logits: Any, y: Any) -> dict[str, Any]:
    return {"accuracy": jnp.mean(jnp.argmax(logits, axis=1) == y)}


# At module level, so that two models of one kind share one compiled program.
def _linear_loss(params: Any, batch: Any) -> Any:
    return _cross_entropy(_linear(params, batch[0]), batch[1])


def _linear_metrics(params: Any, batch: Any) -> dict[str, Any]:
    return _accuracy(_linear(params, batch[0]), batch[1])


def _mlp_loss(params: Any, batch: Any) -> Any:
    return _cross_entropy(_two_layers(params, batch[0]), batch[1])


def _mlp_metrics(params: Any, batch: Any) -> dict[str, Any]:
    return _accuracy(_two_layers(params, batch[0]), batch[1])


def _fits(n_features: int, n_classes: int) -> Callable[[Any], None]:
    def check(examples: Any) -> None:
        if not (isinstance(examples, tuple) and len(examples) == 2):
            raise refused("examples", "a pair (x, y)", type(examples).__name__, "Put the features first, then labels.")
        x, y = (np.asarray(a) for a in examples)
        features = int(np.prod(x.shape[1:]))
        if features != n_features:
            raise refused(
                "x",
                f"of {n_features} features an example",
                f"{features} (shape {x.shape})",
                "Match the model to the data.",
            )
        if y.ndim != 1 or y.dtype.kind not in "biu":
            raise refused(
                "y", "one whole number a row", f"shape {y.shape}, dtype {y.dtype}", "Encode labels as 0, 1, ..."
            )
        wrong = np.flatnonzero((y < 0) | (y >= n_classes))
        if wrong.size:
            larger = f" or build the model with n_classes={int(y.max()) + 1}" if y.min() >= 0 else ""
            raise CovaryError(
                f"y must be labels from 0 to {n_classes - 1}; got {y[wrong[0]]} in row {wrong[0]} ({wrong.size} such "
                f"rows). Renumber the labels from 0{larger}."
            )

    return check
