"""A deployed run as its server holds it: what is trained, how, and the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from covary.algorithm import Algorithm
from covary.errors import InvalidInput, refused
from covary.flower.journal import Ledger
from covary.flower.log import log
from covary.flower.merge import Arrays, named, prefixed
from covary.flower.model import start_of
from covary.flower.settings import Settings
from covary.flower.start import Start, spec_of
from covary.flower.task import Task
from covary.flower.wire import FACTS, pack
from covary.runs.files import File


class Deployment:
    """What all parts of a server share."""

    def __init__(self, algorithm: Algorithm, model: Any, settings: Settings, folder: Path):
        self.algorithm, self.settings = algorithm, settings
        self.start = start_of(model, settings.seed)
        self.spec = spec_of(algorithm)
        if algorithm.lockstep and settings.clients_per_round is not None:
            came = f"clients_per_round={settings.clients_per_round}"
            fix = "Leave it out, or use scaffold."
            raise refused("clients_per_round", f"None: {algorithm.name} needs every client every round", came, fix)
        if settings.warm_start and algorithm.warm_start is None:
            fix = f"{algorithm.name} has no control variates that a gradient can set."
            raise refused("warm_start", "False", "True", fix)
        self.ledger = open_ledger(folder, algorithm, settings, self.start)

    # What the ledger's arrays are

    @property
    def server(self) -> Any:
        """The algorithm's server state."""
        kind = type(self.algorithm.init_server(self.ledger.arrays["server.x"]))
        return kind(**{name: self.ledger.arrays[f"server.{name}"] for name in kind._fields})

    @property
    def buffers(self) -> Arrays:
        arrays = self.ledger.arrays
        return {name.removeprefix("buffers."): a for name, a in arrays.items() if name.startswith("buffers.")}

    def without_controls(self) -> Arrays:
        """The ledger's arrays with the current x, and all else in the server's state as at the start of a run."""
        return self.ledger.arrays | named("server.", self.algorithm.init_server(self.server.x))

    @property
    def keeps_state(self) -> bool:
        """Whether the algorithm keeps a state at each client."""
        return bool(self.algorithm.init_client(self.server.x))

    def weights(self) -> dict[str, float]:
        """p_i of every member."""
        return self.ledger.weights(self.settings.by_examples)

    def by_number(self, names: Any) -> list[str]:
        """Members in the order of their numbers."""
        return sorted(names, key=lambda name: self.ledger.members[name].number)

    # What nodes are sent

    def task(self, round: int) -> Task:
        return Task(self.spec, self.settings.local._asdict(), self.settings.seed, round)

    def content(self, vectors: RecordDict, facts: dict[str, Any]) -> RecordDict:
        """A message's content: vectors that are packed already, and facts with the model's fingerprint."""
        own = pack(facts | {"form": self.start.form, "about": self.start.about})
        return RecordDict({**vectors, FACTS: own[FACTS]})


def open_ledger(folder: Path, algorithm: Algorithm, settings: Settings, start: Start) -> Ledger:
    """A new ledger, or with `resume` the one of this same run."""
    disk = File(folder / "ledger")
    identity = {
        "algorithm": str(algorithm),
        "training": settings.local._asdict(),
        **settings.fixed(),
        "model": f"{start.about} ({start.form[:12]})",
        "buffers": sorted(start.buffers),
        "invariant": list(algorithm.invariant or ()),
    }
    if not settings.resume:
        if (folder / "ledger").exists() or (folder / "results.jsonl").exists():
            raise refused("checkpoint", "a new folder", str(folder), "To continue the run in it, use resume=true.")
        return Ledger.create(disk, named("server.", algorithm.init_server(start.x)) | prefixed(start.buffers), identity)
    ledger = Ledger.resume(disk)
    for name, value in identity.items():
        if ledger.settings.get(name) != value:
            raise InvalidInput(
                f"The checkpoint in {folder} was made with {name} = {ledger.settings.get(name)}, and this run has "
                f"{value}. Resume with the same settings, or start a new run in another folder."
            )
    log.info("Resumed from %s after round %d.", folder, ledger.round)
    return ledger
