"""Converts docstrings to Markdown for the site: examples and formulas become code, comments of fields become text."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

SIGNS = {
    "leftarrow": "←", "approx": "≈", "in": "∈", "sum": "Σ", "nabla": "∇", "Delta": "Δ", "eta": "η", "alpha": "α",
    "mu": "μ", "lVert": "‖", "rVert": "‖", "top": "ᵀ", "arg": "arg", "min": "min", "left": "", "right": "",
    "quad": "  ", "qquad": "\n",
}  # fmt: skip


def plain(formula: str) -> str:
    r"""A formula of the docstrings in plain characters.

    >>> plain(r"c \leftarrow c + \frac{1}{K \eta_l} \sum_{i \in S} \Delta c_i")
    'c ← c + 1/(K η_l) Σ_{i∈S} Δc_i'
    """
    text = re.sub(r"\\frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\w)(\w))", _fraction, " ".join(formula.split()))
    text = text.replace(r"\quad \text{or} \quad", r"\qquad")
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\([,; ])", " ", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: SIGNS[found[1]], text)
    text = re.sub(r"\^([2T+])", lambda found: {"2": "²", "T": "ᵀ", "+": "⁺"}[found[1]], text.replace("^ᵀ", "ᵀ"))
    text = re.sub(r"([∇Δ]) +|(?<=[‖(]) +| +(?=[‖)])", r"\1", text)
    text = re.sub(r"\{i ∈ S\}", "{i∈S}", text)
    return "\n".join(re.sub(" {3,}", "   ", line).strip(" ,") for line in text.split("\n"))


def _fraction(found: re.Match[str]) -> str:
    over, under = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
    return f"{over}/({under})" if " " in under else f"{over}/{under}"


def _each(found: re.Match[str]) -> str:
    """`x, y: text. More.` as two entries, the second with the first sentence only."""
    (first, *others), text = re.split(r",\s+", found[1]), found[2]
    sentence = re.split(r"(?<=[.;])\s", text, maxsplit=1)[0]
    return "\n".join([f"    {first}: {text}", *(f"    {name}: {sentence}" for name in others)])


def as_markdown(text: str) -> str:
    """A docstring with its doctests and formulas as code blocks, and with one entry per argument."""
    text = re.sub(r"(?m)^ {4}(\w+(?:,\s+\w+)+): (.*(?:\n {5,}.*)*)", _each, text)
    text = re.sub(r"\$\$(.*?)\$\$", lambda found: f"\n```text\n{plain(found[1])}\n```\n", text, flags=re.DOTALL)
    text = re.sub(r"\$([^$\n]+)\$", lambda found: f"`{plain(found[1])}`", text)
    text = re.sub(r"(?m)^Returns:\n((?: {4}.*\n?)+)", lambda found: f"**Returns.** {dedent(found[1])}", text)
    return re.sub(r"(?m)^(>>> .*(?:\n(?!\s*$).*)*)", r"```pycon\n\1\n```", text)


class AsMarkdown(Extension):
    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Use the comment after a field as its docstring."""
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and attr.lines:
            _, _, comment = attr.lines[-1].partition("  # ")
            if comment:
                attr.docstring = Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
