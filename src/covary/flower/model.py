"""The model of a deployed run: where it starts, and as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covary.errors import InvalidInput, refused
from covary.flower.start import Start, built
from covary.runs.files import File


def start_of(model: Any, seed: int) -> Start:
    """Where a model starts: a module, a model with `init`, parameters, or a function that builds one of these."""
    if not hasattr(model, "named_parameters") and not hasattr(model, "init") and callable(model):
        return start_of(built(model, seed), seed)
    if hasattr(model, "named_parameters"):
        from covary.torch.module import Network, form_of_module

        network = Network(model)
        x = network.x.cpu().numpy()
        return Start(x, network.named_buffers(), form_of_module(model), lambda x: x, dict)
    from covary.flower.jax_model import start_of_params  # here, because PyTorch alone needs no JAX

    return start_of_params(model, seed)


def load_model(model: Any, checkpoint: str | Path) -> Any:
    """The model after the last round that the server counted.

    Args:
        model: what `server_app` was given: a PyTorch module, which gets the parameters and the averaged buffers and is
            returned; or a covary model, problem or params, for which params are returned, and for a model with buffers
            a pair of params and buffers.
        checkpoint: the server's folder.

    >>> import covary as cv
    >>> from covary.flower import load_model
    >>> load_model(cv.models.logistic_regression(64, 10), "/no/such/folder")
    Traceback (most recent call last):
    covary.errors.InvalidInput: There is no checkpoint in /no/such/folder. Give the server's checkpoint folder.
    """
    found = File(Path(checkpoint) / "ledger").read()
    if found is None:
        raise InvalidInput(f"There is no checkpoint in {checkpoint}. Give the server's checkpoint folder.")
    arrays, facts = found
    x, trained = arrays["server.x"], facts["settings"]["model"]

    def same(form: str) -> None:
        if form[:12] not in trained:
            fix = "Build it as for server_app."
            raise refused("model", f"the one that was trained, {trained}", f"another ({form[:12]})", fix)

    if hasattr(model, "named_parameters"):
        from covary.torch.module import form_of_module, loaded

        same(form_of_module(model))
        return loaded(model, x, {k.removeprefix("buffers."): v for k, v in arrays.items() if k.startswith("buffers.")})
    from covary.flower.jax_model import params_of  # here, because PyTorch alone needs no JAX

    return params_of(model, arrays, same)
