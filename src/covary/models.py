"""Built-in models: softmax regression and a two-layer network, as in the paper's experiments, and a small CNN.

A model is any object with `init(key) -> params`, `loss(params, batch) -> scalar` and, optionally,
`metrics(params, batch) -> dict`. `loss` is the mean over the examples of the batch. A metric is a number, or one number
per example, of which covary takes the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary.checks import whole
from covary.errors import InvalidInput, refused


@dataclass(frozen=True)
class Model:
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    check: Callable[[Any], None]  # raises an error for examples that do not fit the model


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

    return Model(_linear_init(n_features, n_classes), _linear_loss, _linear_metrics, _fits(n_features, n_classes))


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

    return Model(_mlp_init(n_features, hidden, n_classes), _mlp_loss, _mlp_metrics, _fits(n_features, n_classes))


def cnn(n_classes: int, side: int = 28) -> Model:
    """The usual convolutional network for handwritten characters: 5x5 convolutions to 32 and 64 channels, each followed
    by a ReLU and 2x2 max-pooling, then 512 hidden units. Images are square and gray; `side` is a multiple of 4.

    >>> import jax, covary as cv
    >>> params = cv.models.cnn(n_classes=62).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    1690046
    """
    whole("n_classes", n_classes, 2)
    if whole("side", side, 4) % 4:
        raise refused("side", "a multiple of 4", side, "Pad the images.")
    return Model(_cnn_init(n_classes, side), _cnn_loss, _cnn_metrics, _fits(side * side, n_classes))


def _flat(x: Any, like: Any) -> Any:
    """Rows of features. Images are stored as unsigned bytes and scaled to [0, 1] here, inside the step."""
    x = jnp.asarray(x).reshape(len(x), -1)
    return x.astype(like.dtype) / 255 if x.dtype == jnp.uint8 else x


def _linear(params: Any, x: Any) -> Any:
    return _flat(x, params["w"]) @ params["w"].T + params["b"]


def _two_layers(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(_flat(x, params["w1"]) @ params["w1"].T + params["b1"])
    return hidden @ params["w2"].T + params["b2"]


def _convolutional(params: Any, x: Any) -> Any:
    x = _flat(x, params["w1"])
    side = int(np.sqrt(x.shape[1]))
    x = _pooled(_convolved(x.reshape(-1, side, side, 1), params["w1"], params["b1"]))
    x = _pooled(_convolved(x, params["w2"], params["b2"]))
    hidden = jax.nn.relu(x.reshape(len(x), -1) @ params["w3"].T + params["b3"])
    return hidden @ params["w4"].T + params["b4"]


def _convolved(x: Any, w: Any, b: Any) -> Any:
    """A 5x5 convolution of the same size, with ReLU."""
    return jax.nn.relu(
        jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
    )


def _pooled(x: Any) -> Any:
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def _wide(logits: Any) -> Any:
    """In float32 at least, as a softmax needs more digits than a product."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


@jax.custom_jvp
def _cross_entropy(logits: Any, y: Any) -> Any:
    picked = jnp.take_along_axis(logits, jnp.asarray(y, int)[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


@_cross_entropy.defjvp
def _cross_entropy_slope(primals: Any, tangents: Any) -> Any:
    """Softmax minus the one-hot label. This is one kernel; the derivative of picking an entry would be a scatter."""
    logits, y = primals
    slope = jax.nn.softmax(logits) - (y[:, None] == jnp.arange(logits.shape[1]))
    return _cross_entropy(logits, y), jnp.sum(slope * tangents[0]) / len(logits)


def _accuracy(logits: Any, y: Any) -> dict[str, Any]:
    return {"accuracy": jnp.argmax(logits, axis=1) == y}


# One function for models of the same kind and size, so that they share compiled programs.
@functools.lru_cache(maxsize=64)
def _linear_init(n_features: int, n_classes: int) -> Callable[[Any], Any]:
    def init(key: Any) -> dict[str, Any]:
        return {"w": jnp.zeros((n_classes, n_features)), "b": jnp.zeros(n_classes)}

    return init


@functools.lru_cache(maxsize=64)
def _mlp_init(n_features: int, hidden: int, n_classes: int) -> Callable[[Any], Any]:
    def init(key: Any) -> dict[str, Any]:
        key1, key2 = jax.random.split(key)
        return {
            "w1": jax.random.normal(key1, (n_features, hidden)).T * np.sqrt(2 / n_features),
            "b1": jnp.zeros(hidden),
            "w2": jax.random.normal(key2, (hidden, n_classes)).T * np.sqrt(1 / hidden),
            "b2": jnp.zeros(n_classes),
        }

    return init


@functools.lru_cache(maxsize=64)
def _cnn_init(n_classes: int, side: int) -> Callable[[Any], Any]:
    flat = (side // 4) ** 2 * 64
    shapes = {"w1": (5, 5, 1, 32), "w2": (5, 5, 32, 64), "w3": (512, flat), "w4": (n_classes, 512)}

    def init(key: Any) -> dict[str, Any]:
        params = {}
        for k, (name, shape) in zip(jax.random.split(key, 4), shapes.items(), strict=True):
            inputs, outputs = (np.prod(shape[:3]), shape[3]) if len(shape) == 4 else (shape[1], shape[0])
            params[name] = jax.random.normal(k, shape) * np.sqrt(2 / inputs)
            params[f"b{name[1]}"] = jnp.zeros(outputs)
        return params

    return init


def _linear_loss(params: Any, batch: Any) -> Any:
    return _cross_entropy(_wide(_linear(params, batch[0])), batch[1])


def _linear_metrics(params: Any, batch: Any) -> dict[str, Any]:
    return _accuracy(_linear(params, batch[0]), batch[1])


def _mlp_loss(params: Any, batch: Any) -> Any:
    return _cross_entropy(_wide(_two_layers(params, batch[0])), batch[1])


def _mlp_metrics(params: Any, batch: Any) -> dict[str, Any]:
    return _accuracy(_two_layers(params, batch[0]), batch[1])


def _cnn_loss(params: Any, batch: Any) -> Any:
    return _cross_entropy(_wide(_convolutional(params, batch[0])), batch[1])


def _cnn_metrics(params: Any, batch: Any) -> dict[str, Any]:
    return _accuracy(_convolutional(params, batch[0]), batch[1])


def _fits(n_features: int, n_classes: int) -> Callable[[Any], None]:
    def check(examples: Any) -> None:
        if not (isinstance(examples, tuple) and len(examples) == 2):
            raise refused(
                "examples", "a pair (x, y)", type(examples).__name__, "Pass the features first, then the labels."
            )
        x, y = (np.asarray(a) for a in examples)
        features = int(np.prod(x.shape[1:]))
        if features != n_features:
            raise refused(
                "x",
                f"examples with {n_features} features",
                f"{features} (shape {x.shape})",
                "Match the model to the data.",
            )
        if y.ndim != 1 or y.dtype.kind not in "biu":
            raise refused(
                "y", "one whole number per row", f"shape {y.shape}, dtype {y.dtype}", "Encode the labels as 0, 1, ..."
            )
        wrong = np.flatnonzero((y < 0) | (y >= n_classes))
        if wrong.size:
            larger = f" or build the model with n_classes={int(y.max()) + 1}" if y.min() >= 0 else ""
            raise InvalidInput(
                f"y must be labels from 0 to {n_classes - 1}; got {y[wrong[0]]} in row {wrong[0]} ({wrong.size} such "
                f"rows). Renumber the labels from 0{larger}."
            )

    return check
