"""The command-line program `covary`."""

from __future__ import annotations

import inspect
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from covary import algorithms
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.report.folder import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console(highlight=False)
ALGORITHMS = {name: getattr(algorithms, name) for name in algorithms.__all__}


@app.callback()
def covary() -> None:
    """Federated learning that does not drift: SCAFFOLD and its family."""


@app.command()
def compare(
    rounds: Annotated[int, typer.Option(help="Most rounds of a run.")] = 300,
    target: Annotated[float, typer.Option(help="Test accuracy to reach.")] = 0.95,
    seeds: Annotated[int, typer.Option(help="Seeds to average over while tuning.")] = 3,
    out: Annotated[Path, typer.Option(help="Where to make the run folder.")] = Path("runs"),
) -> None:
    """Compare SGD, FedAvg, FedProx and SCAFFOLD on handwritten digits, each with its step-size tuned.

    20 clients of 0, 10 and 100 % similarity, 20 % of them sampled a round, 5 epochs of 5 steps: the paper's setup on a
    data set that needs no download.

    Example: covary compare --seeds 1 --rounds 100
    """
    from covary.experiments.digits import Settings
    from covary.plan import whole

    if not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    settings = Settings(
        rounds=whole("--rounds", rounds, 1), target=target, seeds=tuple(range(whole("--seeds", seeds, 1)))
    )
    folder = RunFolder.create("compare", out)
    try:
        finished = _compare(settings, folder)
    except KeyboardInterrupt:
        console.print(f"\nStopped. The runs that had ended are in {folder.results}.")
        raise typer.Exit(130) from None
    _show(settings, finished, folder)


def _compare(settings: Any, folder: RunFolder) -> list[Any]:
    from covary.experiments.digits import compare as trials

    folder.append({"kind": "settings", **asdict(settings)})
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
    finished = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=settings.runs)
        for trial in trials(settings):
            what = f"{100 * trial.similarity:3g} % similarity  {trial.algorithm:<9} eta_l={trial.eta_l:<4g}"
            progress.update(task, advance=1, description=what)
            record = {k: v for k, v in vars(trial).items() if k != "run"}
            record |= {"kind": "curve" if trial.tuned else "tuning", "diverged": trial.run.diverged}
            if trial.tuned:
                record["history"] = {name: trial.run.history[name] for name in ("round", "loss", "accuracy", "drift")}
                finished.append(trial)
            folder.append(record)
    return finished


def _show(settings: Any, finished: list[Any], folder: RunFolder) -> None:
    from covary.experiments.digits import ALGORITHMS as compared
    from covary.report.plots import save_curves
    from covary.report.tables import rounds_table

    headings = {s: f"{100 * s:g} % similarity" for s in settings.similarities}
    rounds = {headings[s]: {t.algorithm: t.rounds_to_target for t in finished if t.similarity == s} for s in headings}
    curves = {
        headings[s]: {t.algorithm: t.run.history["accuracy"] for t in finished if t.similarity == s} for s in headings
    }
    rounds = {k: {a: None if v is None else round(v) for a, v in column.items()} for k, column in rounds.items()}
    sampled = f"{100 * settings.clients_per_round:g} % sampled"
    setup = f"{settings.n_clients} clients, {sampled}, {settings.local_epochs} local epochs"
    title = f"Rounds to {settings.target:g} test accuracy on digits ({setup}; mean of {len(settings.seeds)} seeds)"
    console.print(rounds_table(title, list(compared), rounds, settings.rounds, baseline="sgd"))
    console.print("[dim](n×): speed-up over SGD. eta_l tuned for each cell, eta_g = 1. Bold: fewest rounds.[/dim]")
    picture = folder.path / "curves.png"
    save_curves(picture, curves, "test accuracy", settings.target, f"Logistic regression on digits: {setup}")
    console.print(f"Curves: {picture}\nRaw results: {folder.results}")


@app.command()
def run(
    algorithm: Annotated[str, typer.Argument(help="One of: " + ", ".join(ALGORITHMS) + ".")],
    eta_l: Annotated[float, typer.Option(help="Local step-size.")] = 0.3,
    eta_g: Annotated[float | None, typer.Option(help="Global step-size.")] = None,
    mu: Annotated[float | None, typer.Option(help="Proximal strength (fedprox, dane).")] = None,
    alpha: Annotated[float | None, typer.Option(help="Regulariser (feddyn).")] = None,
    eta: Annotated[float | None, typer.Option(help="Weight of the global gradient (dane).")] = None,
    option: Annotated[str | None, typer.Option(help="Control variate, I or II (scaffold).")] = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 100,
    clients: Annotated[int, typer.Option(help="Number of clients N.")] = 20,
    similarity: Annotated[float, typer.Option(help="I.i.d. share of each client's data, 0 to 1.")] = 0.0,
    clients_per_round: Annotated[float, typer.Option(help="Clients a round: a number, or a fraction in (0, 1).")] = 0.2,
    local_steps: Annotated[int | None, typer.Option(help="Steps K of each client.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Passes over the local data instead. [default: 5]")] = None,
    batch_size: Annotated[float, typer.Option(help="Examples a batch, a fraction in (0, 1), or 0 for all.")] = 0.2,
    hidden: Annotated[int, typer.Option(help="Hidden units of a 2-layer network; 0: logistic regression.")] = 0,
    warm_start: Annotated[bool, typer.Option(help="Set c_i = g_i(x^0) first.")] = False,
    weights: Annotated[str, typer.Option(help="uniform or examples.")] = "uniform",
    target: Annotated[float | None, typer.Option(help="Stop at this test accuracy.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to make the run folder.")] = Path("runs"),
) -> None:
    """Run one algorithm on handwritten digits and show how it goes.

    Example: covary run scaffold --eta-l 1 --rounds 50 --similarity 0.1
    """
    import covary as cv

    given = {"eta_l": eta_l, "eta_g": eta_g, "mu": mu, "alpha": alpha, "eta": eta, "option": option}
    chosen = _build(algorithm, given)
    (x, y), test = cv.datasets.digits()
    model = cv.models.mlp(64, hidden, 10) if hidden else cv.models.logistic_regression(64, 10)
    problem = cv.supervised(model, cv.partition.by_similarity(x, y, clients, similarity), test)
    folder: RunFolder | None = None
    last: dict[str, float] = {}
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
    )
    started = time.perf_counter()
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", DivergenceWarning)
        task = progress.add_task("compiling", total=rounds)

        def log(number: int, values: dict[str, float]) -> None:
            nonlocal folder
            folder = folder or RunFolder.create(f"run-{algorithm}", out)
            folder.append({"round": number, **values})
            last.update(values, round=number)
            what = f"{algorithm}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.4f}"
            progress.update(task, completed=number, description=what)

        try:
            result = cv.simulate(
                chosen,
                problem,
                rounds=rounds,
                clients_per_round=_number_or_fraction(clients_per_round),
                local_steps=local_steps,
                local_epochs=5 if local_epochs is None and local_steps is None else local_epochs,
                batch_size=_number_or_fraction(batch_size) or None,
                seed=seed,
                warm_start=warm_start,
                weights=weights,
                target=None if target is None else ("accuracy", target),
                log=log,
            )
        except KeyboardInterrupt:
            where = f" The {last['round']:g} rounds done are in {folder.results}." if folder else ""
            console.print(f"\nStopped.{where}")
            raise typer.Exit(130) from None
    for warning in caught:
        console.print(f"[yellow]{warning.message}[/yellow]")
    if folder is not None:
        console.print(
            f"{chosen}: {result.rounds} rounds in {time.perf_counter() - started:.1f} s, "
            f"loss {last['loss']:.4f}, test accuracy {last['accuracy']:.4f}"
        )
        if result.reached:
            console.print(f"Reached test accuracy {target:g} in round {result.reached}.")
        console.print(f"Rounds: {folder.results}")
    if result.diverged:
        raise typer.Exit(1)


def _build(name: str, given: dict[str, Any]) -> Any:
    """The algorithm with the options that were given; one that it does not have is refused."""
    if name not in ALGORITHMS:
        raise refused("ALGORITHM", f"one of {', '.join(ALGORITHMS)}", name, "Try: covary run scaffold.")
    parameters = inspect.signature(ALGORITHMS[name]).parameters
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in parameters:
            own = ", ".join("--" + p.replace("_", "-") for p in parameters)
            raise CovaryError(f"--{key.replace('_', '-')} is not an option of {name}. Its options are {own}.")
    return ALGORITHMS[name](**given)


def _number_or_fraction(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def main() -> None:
    """Entry point: covary's own refusals are one line on the terminal and exit code 2, never a traceback."""
    try:
        app()
    except CovaryError as error:
        Console(stderr=True, highlight=False).print(f"[red]Error:[/red] {error}", soft_wrap=True)
        raise SystemExit(2) from None
