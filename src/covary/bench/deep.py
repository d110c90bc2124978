"""Two deep networks as plain JAX models, and rounds of them: a ResNet-18 on images and a GPT on tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary.data.federated import FederatedData
from covary.problem import Problem, supervised


@dataclass(frozen=True)
class ResNet:
    """A ResNet of two basic blocks a stage, with GroupNorm, for images of 32 x 32 pixels.

    >>> model = ResNet(widths=(8, 16), classes=10)
    >>> images, labels = np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2, int)
    >>> float(model.loss(model.init(jax.random.key(0)), (images, labels))) > 0
    True
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)  # 11.2 million parameters
    classes: int = 10
    groups: int = 2  # of every norm

    def init(self, key: Any) -> Any:
        keys = iter(jax.random.split(key, 64))

        def conv(size: int, n_in: int, n_out: int) -> Any:
            return jax.random.normal(next(keys), (size, size, n_in, n_out)) * math.sqrt(2 / (size * size * n_in))

        def norm(n: int) -> dict[str, Any]:
            return {"scale": jnp.ones(n), "shift": jnp.zeros(n)}

        params: dict[str, Any] = {"stem": conv(3, 3, self.widths[0]), "stem_norm": norm(self.widths[0])}
        n_in = self.widths[0]
        for stage, n_out in enumerate(self.widths):
            for number in range(2):
                block = {"conv1": conv(3, n_in, n_out), "norm1": norm(n_out)}
                block |= {"conv2": conv(3, n_out, n_out), "norm2": norm(n_out)}
                if number == 0 and stage > 0:
                    block |= {"short": conv(1, n_in, n_out), "short_norm": norm(n_out)}
                params[f"block{stage}{number}"], n_in = block, n_out
        w = jax.random.normal(next(keys), (n_in, self.classes)) / math.sqrt(n_in)
        return params | {"head": {"w": w, "b": jnp.zeros(self.classes)}}

    def scores(self, params: Any, images: Any) -> Any:
        x = jnp.asarray(images).astype(params["stem"].dtype) / 128 - 1
        x = jax.nn.relu(self._norm(params["stem_norm"], _convolved(x, params["stem"])))
        for stage in range(len(self.widths)):
            for number in range(2):
                p, stride = params[f"block{stage}{number}"], 2 if number == 0 and stage > 0 else 1
                h = jax.nn.relu(self._norm(p["norm1"], _convolved(x, p["conv1"], stride)))
                h = self._norm(p["norm2"], _convolved(h, p["conv2"]))
                short = self._norm(p["short_norm"], _convolved(x, p["short"], stride)) if "short" in p else x
                x = jax.nn.relu(h + short)
        return x.mean(axis=(1, 2)) @ params["head"]["w"] + params["head"]["b"]

    def _norm(self, p: Any, x: Any) -> Any:
        """GroupNorm, with statistics in float32: sums over places, then over a group's channels."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))

        def of_group(moment: Any) -> Any:  # (n, channels) -> the same, each the mean over its group
            means = moment.reshape(len(x), self.groups, -1).mean(axis=2)
            return jnp.repeat(means, x.shape[3] // self.groups, axis=1)

        mean = of_group(wide.mean(axis=(1, 2)))
        var = of_group((wide**2).mean(axis=(1, 2))) - mean**2
        slope = p["scale"] * jax.lax.rsqrt(var + 1e-5)  # (n, channels)
        return (wide * slope[:, None, None] + (p["shift"] - mean * slope)[:, None, None]).astype(x.dtype)

    def loss(self, params: Any, batch: Any) -> Any:
        return -jnp.mean(_log_likelihood(self.scores(params, batch[0]), batch[1]))

    def metrics(self, params: Any, batch: Any) -> dict[str, Any]:
        return {"accuracy": self.scores(params, batch[0]).argmax(axis=1) == batch[1]}


@dataclass(frozen=True)
class GPT:
    """A GPT with tied embeddings, on rows of tokens. It predicts each token from those before it.

    >>> one, other = (GPT(layers=2, width=16, heads=2, vocabulary=50, length=8, looped=looped) for looped in (0, 1))
    >>> tokens = (np.arange(18).reshape(2, 9),)
    >>> losses = [model.loss(model.init(jax.random.key(0)), tokens) for model in (one, other)]
    >>> bool(abs(losses[0] - losses[1]) < 1e-5)
    True
    """

    layers: int = 6  # 13.9 million parameters
    width: int = 384
    heads: int = 6
    vocabulary: int = 8192
    length: int = 128
    looped: bool = False  # the layers as a loop, of which XLA compiles one only

    def init(self, key: Any) -> Any:
        d, keys = self.width, iter(jax.random.split(key, 2 + 4 * self.layers))

        def dense(n_in: int, n_out: int) -> Any:
            return {"w": 0.02 * jax.random.normal(next(keys), (n_in, n_out)), "b": jnp.zeros(n_out)}

        def norm() -> dict[str, Any]:
            return {"scale": jnp.ones(d), "shift": jnp.zeros(d)}

        def layer() -> dict[str, Any]:
            attention = {"norm1": norm(), "qkv": dense(d, 3 * d), "out": dense(d, d)}
            return attention | {"norm2": norm(), "up": dense(d, 4 * d), "down": dense(4 * d, d)}

        layers = [layer() for _ in range(self.layers)]
        return {
            "tokens": 0.02 * jax.random.normal(next(keys), (self.vocabulary, d)),
            "places": 0.02 * jax.random.normal(next(keys), (self.length, d)),
            "layers": jax.tree.map(lambda *each: jnp.stack(each), *layers) if self.looped else layers,
            "norm": norm(),
        }

    def scores(self, params: Any, tokens: Any) -> Any:
        n, length = tokens.shape

        def layer(x: Any, p: Any) -> tuple[Any, None]:
            qkv = _dense(p["qkv"], _layer_norm(p["norm1"], x)).reshape(n, length, 3, self.heads, -1)
            h = jax.nn.dot_product_attention(*(qkv[:, :, k] for k in range(3)), is_causal=True)
            x = x + _dense(p["out"], h.reshape(n, length, self.width))
            return x + _dense(p["down"], jax.nn.gelu(_dense(p["up"], _layer_norm(p["norm2"], x)))), None

        x = params["tokens"][tokens] + params["places"][:length]
        if self.looped:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for p in params["layers"]:
                x, _ = layer(x, p)
        return _layer_norm(params["norm"], x) @ params["tokens"].T

    def _each(self, params: Any, batch: Any) -> Any:
        (tokens,) = batch
        return -_log_likelihood(self.scores(params, tokens[:, :-1]), tokens[:, 1:])  # (rows, length)

    def loss(self, params: Any, batch: Any) -> Any:
        return jnp.mean(self._each(params, batch))

    def metrics(self, params: Any, batch: Any) -> dict[str, Any]:
        return {"nll": jnp.mean(self._each(params, batch), axis=1)}


def _convolved(x: Any, w: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _dense(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _layer_norm(p: Any, x: Any) -> Any:
    """LayerNorm, with statistics in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = wide.mean(axis=-1, keepdims=True), wide.var(axis=-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"]).astype(x.dtype)


def _log_likelihood(scores: Any, labels: Any) -> Any:
    """The log-probability of each label, in float32."""
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    picked = jnp.take_along_axis(wide, jnp.asarray(labels)[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(wide, axis=-1)


@dataclass(frozen=True)
class DeepWorkload:
    """A round of S of N clients, each with K steps on batches of `batch` examples."""

    name: str
    model: Any
    n_clients: int = 50
    cohort: int = 10
    steps: int = 25
    batch: int = 50
    size: int = 500  # examples of each client

    @cached_property
    def examples(self) -> tuple[np.ndarray, ...]:
        """All clients' examples: images with labels, or rows of tokens. Speed does not depend on what they show."""
        rng, rows = np.random.default_rng(0), self.n_clients * self.size
        if isinstance(self.model, GPT):
            return (rng.integers(0, self.model.vocabulary, (rows, self.model.length + 1), dtype=np.int32),)
        images = rng.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
        return images, rng.integers(0, self.model.classes, rows, dtype=np.int32)

    def problem(self) -> Problem:
        data = FederatedData(self.examples, [self.size] * self.n_clients)
        return supervised(self.model, data, test=tuple(a[: 2 * self.batch] for a in self.examples))


RESNET = DeepWorkload("ResNet-18", ResNet())
RESNET_ON_CPU = DeepWorkload("ResNet-18, 10 steps", ResNet(), n_clients=4, cohort=2, steps=10, batch=16, size=32)
GPT_14M = DeepWorkload("GPT, 14 M", GPT(), batch=32, size=200)
GPT_14M_LOOPED = DeepWorkload("GPT, 14 M, looped layers", GPT(looped=True), batch=32, size=200)
GPT_124M = DeepWorkload(
    "GPT, 124 M",
    GPT(layers=12, width=768, heads=12, vocabulary=50_257, length=512, looped=True),
    n_clients=16,
    cohort=4,
    steps=10,
    batch=8,
    size=32,
)
SMALL_RESNET = DeepWorkload(
    "small ResNet", ResNet(widths=(16, 32, 64)), n_clients=8, cohort=4, steps=4, batch=10, size=40
)
