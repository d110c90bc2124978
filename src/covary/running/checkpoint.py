"""Checkpoints of a run: the last two, each verified when it is read, with client states saved as they change.

A checkpoint is a file `round-R.safetensors` with the server's state, the averages and the history, and a list of
segments `clients-R-k.safetensors`. A segment holds the states of the clients that changed since the previous
checkpoint, so a checkpoint costs what its rounds touched. Reading the segments in order gives every client's state. Now
and then covary rewrites all states into new segments, and removes the files that no checkpoint needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from covary import trees
from covary.algorithm import Algorithm
from covary.checks import path as checked_path
from covary.errors import CheckpointWarning, CovaryError, InvalidInput, refused
from covary.running.job import Job
from covary.running.state import State
from covary.runs.files import Damaged, File, held
from covary.runs.interrupt import interruptions

FORMAT = 1
KEPT = 2
SEGMENT_BYTES = 2**28  # of client states in one file
NAMES = re.compile(r"round-[0-9]{9,}\.safetensors")
SEGMENTS = re.compile(r"clients-[0-9]{9,}-[0-9]+")  # .safetensors
HEADER = 2**24  # the most bytes of a file besides its arrays
MOST_ROWS = 2  # in the segments, for each client: beyond it, all states are rewritten
MOST_SEGMENTS = 1000  # beyond it, too

SavedClients = Callable[[list[np.ndarray]], Iterator[tuple[np.ndarray, list[np.ndarray]]]]
"""Given the form of one client's states, the saved clients' numbers and states, a part at a time."""


class Resumable(Protocol):
    """What can be saved and resumed: a run, or the members of a sweep."""

    rounds: int

    @property
    def ended(self) -> bool: ...

    @property
    def done(self) -> int: ...

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None: ...

    def changes(self) -> tuple[int, np.ndarray, bool]: ...

    def arrays(self) -> dict[str, np.ndarray]: ...

    def rows(self, ids: np.ndarray) -> list[np.ndarray]: ...

    def restore(self, arrays: dict[str, np.ndarray], saved_clients: SavedClients) -> None: ...


class Saved(NamedTuple):
    """What a checkpoint holds, besides the clients."""

    round: int
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run, in a folder that no other process may use at the same time.

    `shared_bytes` is the most that is saved besides the clients, `row_bytes` the size of one client's states.
    """

    def __init__(self, folder: Path, about: dict[str, Any], n_clients: int, shared_bytes: int, row_bytes: int):
        self.folder, self.about, self.n_clients = folder, about, n_clients
        self.most = {"round": 2 * shared_bytes + HEADER, "clients": 2 * max(SEGMENT_BYTES, row_bytes) + HEADER}
        self.segments: list[str] = []  # that the next checkpoint builds on
        self.rows = 0  # in them
        self.built_on: dict[Path, list[str]] = {}  # what each checkpoint of the folder builds on, where that is known
        self.damaged: list[Path] = []
        self.run = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def newest(self) -> Saved | None:
        """The newest intact checkpoint, or None if there is none. A checkpoint of another run is rejected."""
        paths = self._rounds()
        for path in paths:
            try:
                content = File(path).read(self.most["round"])
                if content is None:
                    raise Damaged(f"{path} is missing.")
                arrays, facts = content
                self._reject_another_run(facts, path)
                segments: Any = facts.get("segments")
                number = facts.get("round")
                if not _segments(segments) or not isinstance(number, int) or path.name != _name(number):
                    raise Damaged(f"{path} has unexpected contents.")
                self.rows = sum(len(ids) for ids, _ in self._read(segments))
                if self.rows > MOST_ROWS * self.n_clients:
                    raise Damaged(f"{path} has more states than covary writes.")
            except Damaged as error:
                text = f"{error} covary falls back to the previous checkpoint, if there is one."
                warnings.warn(CheckpointWarning(text), stacklevel=4)
                self.damaged.append(path)
                continue
            self.segments = self.built_on[path] = segments
            self._clean_up(path)
            return Saved(number, arrays)
        if paths:
            raise Damaged(f"Every checkpoint in {self.folder} is damaged. Start a new run in another folder.")
        return None

    def clients(self, like: list[np.ndarray]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The saved clients' numbers and states, a part at a time, in the order in which to restore them.

        `like` has the states of one client, field by field, whose form the saved ones must have.
        """
        for ids, rows in self._read(self.segments):
            forms = [(field.shape, field.dtype) for field in rows]
            if forms != [((len(ids), *field.shape[1:]), field.dtype) for field in like]:
                raise Damaged(f"{self.folder} has client states of another form. Start a new run in another folder.")
            yield ids, rows

    def save(
        self,
        round: int,
        arrays: dict[str, np.ndarray],
        changed: np.ndarray,
        rows: Callable[[np.ndarray], list[np.ndarray]],
        all_changed: bool = False,
    ) -> None:
        """Write a checkpoint; `rows` gives the states of the clients it is asked for.

        Earlier segments are kept, unless all clients have changed.
        """
        segments, count = ([], 0) if all_changed else (list(self.segments), self.rows)
        count += len(changed)
        if count > MOST_ROWS * self.n_clients or len(segments) >= MOST_SEGMENTS:
            changed = np.unique(np.concatenate([changed, *(ids for ids, _ in self._read(segments))]))
            segments, count = [], len(changed)
        with _write_errors_explained(self.folder):
            for k, ids in enumerate(_parts(changed, rows)):
                name = f"clients-{round:09d}-{k}"
                fields = {str(n): field for n, field in enumerate(rows(ids))}
                File(self.folder / f"{name}.safetensors").write({"ids": ids, **fields}, {"format": FORMAT})
                segments.append(name)
            facts = {"format": FORMAT, "about": self.about, "round": round, "segments": segments}
            path = self.folder / _name(round)
            File(path).write(arrays, facts)
        self.segments = self.built_on[path] = segments
        self.rows = count
        self._clean_up(path)

    def _read(self, segments: list[str]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for name in segments:
            path = self.folder / f"{name}.safetensors"
            content = File(path).read(self.most["clients"])
            if content is None:
                raise Damaged(f"{path} is missing.")
            arrays, _ = content
            ids = arrays.pop("ids", np.empty(0))
            known = ids.ndim == 1 and ids.dtype.kind == "i" and len(ids) > 0
            if not known or ids.min() < 0 or ids.max() >= self.n_clients or set(arrays) != _numbers(len(arrays)):
                raise Damaged(f"{path} has unexpected contents.")
            yield ids, [arrays[str(n)] for n in range(len(arrays))]

    def _rounds(self) -> list[Path]:
        """The checkpoints, the newest first."""
        found = [path for path in self.folder.iterdir() if NAMES.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name[len("round-") : -len(".safetensors")]), reverse=True)

    def _clean_up(self, newest: Path) -> None:
        """Remove what was damaged, and what neither of the last two checkpoints needs; others' files stay."""
        whole = [path for path in self._rounds() if path == newest or path not in self.damaged]
        kept = [newest, *(path for path in whole if path != newest)][:KEPT]
        old = [path for path in self._rounds() if path not in kept]
        needed: set[str] = set()
        for path in kept:
            if path not in self.built_on:
                with contextlib.suppress(Damaged):
                    content = File(path).read(self.most["round"])
                    segments: Any = content[1].get("segments") if content else None
                    self.built_on[path] = segments if _segments(segments) else []
            needed |= set(self.built_on.get(path, []))
        for path in [*old, *_drafts(self.folder)]:
            _remove(path)
        for path in self.folder.iterdir():
            name = path.name.removesuffix(".safetensors")
            if path.name != name and SEGMENTS.fullmatch(name) and name not in needed:
                _remove(path)

    def _reject_another_run(self, facts: dict[str, Any], path: Path) -> None:
        if facts.get("format") != FORMAT:
            raise refused(
                "checkpoint",
                f"of format {FORMAT}",
                f"{str(facts.get('format'))[:20]} in {path}",
                "Use the covary that wrote it.",
            )
        then, now = facts.get("about"), self.about
        if not isinstance(then, dict):
            raise Damaged(f"{path} has unexpected contents.")
        apart = [
            f"{name} was {str(then.get(name))[:200]} and is {str(now.get(name))[:200]}"
            for name in {**now, **then}
            if then.get(name) != now.get(name)
        ]
        if apart:
            raise InvalidInput(
                f"{self.folder} holds checkpoints of another run: {'; '.join(apart)}. Resume with the same settings, "
                "the same data and the covary that wrote them, or choose another folder."
            )


def state_sizes(algorithm: Algorithm, x: np.ndarray, members: int = 1) -> tuple[int, int]:
    """Bytes of a state without the clients', and of one client's, for all members of a sweep."""
    server, client = (
        sum(np.size(leaf) for leaf in trees.leaves(init(x))) for init in (algorithm.init_server, algorithm.init_client)
    )
    return members * x.itemsize * (server + x.size + 8), members * x.itemsize * client


def state_arrays(state: State) -> dict[str, np.ndarray]:
    """A state without the clients', by name."""
    server = {f"server.{name}": array for name, array in state.server._asdict().items()}
    beside = state.control._asdict() | state.accounts._asdict()
    return server | {f"state.{name}": np.asarray(value) for name, value in beside.items()}


def state_from(like: State, arrays: dict[str, np.ndarray]) -> State:
    """The saved state, which must have the form of `like`."""
    for name, own in state_arrays(like).items():
        saved = arrays.get(name)
        counts = saved is not None and saved.dtype.kind == own.dtype.kind == "i"  # of any width
        if saved is None or saved.shape != own.shape or (saved.dtype != own.dtype and not counts):
            raise Damaged(f"A checkpoint has no {name} of shape {own.shape} and type {own.dtype}. Start a new run.")

    def read(part: Any, prefix: str) -> Any:
        return type(part)(*(arrays[f"{prefix}.{name}"] for name in part._fields))

    return State(read(like.server, "server"), None, read(like.control, "state"), read(like.accounts, "state"))


@contextlib.contextmanager
def opened(
    folder: str | Path, about: dict[str, Any], n_clients: int, shared_bytes: int, row_bytes: int, hosts: int
) -> Iterator[Checkpoints]:
    """The checkpoints of a folder, which no other process may use at the same time."""
    if hosts > 1:
        fix = "Leave it out: each host holds only a part of the states."
        raise refused("checkpoint", "None when several hosts run together", repr(str(folder)), fix)
    path = checked_path("checkpoint", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused("checkpoint", "a folder", f"{folder!r} ({error})", "Give one you can write to.") from None
    with held(path):
        yield Checkpoints(path, about, n_clients, shared_bytes, row_bytes)


def run_to_end(run: Resumable, checkpoints: Checkpoints, every: int) -> None:
    """Take a run, or the members of a sweep, from the last checkpoint to the end.

    A checkpoint is saved every so many rounds, at the end, and when the user interrupts.
    """
    saved = checkpoints.newest()
    if saved is not None:
        run.restore(saved.arrays, checkpoints.clients)
    with interruptions() as interruption:
        while not run.ended:
            run.advance(min(run.rounds, run.done + every - run.done % every), interruption.requested)
            number, changed, all_changed = run.changes()
            checkpoints.save(number, run.arrays(), changed, run.rows, all_changed)
            interruption.stop(checkpoints.folder, number)


def fingerprint(
    job: Job, algorithms: Sequence[Algorithm], settings: Mapping[str, Any], of_runtime: Mapping[str, Any]
) -> dict[str, Any]:
    """The fingerprint of a run, for JSON: only a run with the same fingerprint resumes its checkpoint.

    Devices, width and store are not part of it, so a run can be resumed on another machine. A runtime adds its own
    facts: what the model and the algorithm compute, and the runtime's settings.
    """
    problem, starts = job.problem, np.stack(job.starts)
    about: dict[str, Any] = {"algorithm": ", ".join(map(str, algorithms))}
    about |= {**settings, "clients_per_round": job.plan.cohort, **of_runtime}
    about["start"] = hashlib.sha256(starts.tobytes()).hexdigest()[:16]
    about["data"] = _hash_of_arrays(problem.data.examples, problem.data.sizes, streamed=problem.data.streamed)
    if problem.frozen is not None:
        about["frozen"] = _hash_of_arrays(problem.frozen)
    if problem.buffers is not None:
        about["buffers"] = _hash_of_arrays(problem.buffers)
    about["test"] = None if problem.test is None else _hash_of_arrays(problem.test)
    return about


def hash_of_text(text: str) -> str:
    """A fingerprint of what a runtime says in words."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_of_arrays(*arrays: Any, streamed: bool = False) -> str:
    """A fingerprint of arrays. It reads only the ends of streamed ones: the rest could take longer than the run."""
    digest = hashlib.sha256()
    for leaf in trees.leaves(arrays):
        digest.update(f"{leaf.dtype} {leaf.shape} ".encode())
        for part in (leaf[:1024], leaf[-1024:]) if streamed else (leaf,):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _name(round: int) -> str:
    return f"round-{round:09d}.safetensors"


def _segments(names: Any) -> bool:
    """Whether these are distinct names of files with client states."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return len(set(names)) == len(names) and all(SEGMENTS.fullmatch(name) for name in names)


def _drafts(folder: Path) -> list[Path]:
    """covary's own unfinished files."""
    ours = (re.compile(pattern.pattern + r"(\.safetensors)?\.draft") for pattern in (NAMES, SEGMENTS))
    return [path for pattern in ours for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _remove(path: Path) -> None:
    """Remove a file if possible; no checkpoint needs it."""
    with contextlib.suppress(OSError):
        path.unlink()


def _numbers(count: int) -> set[str]:
    return {str(n) for n in range(count)}


def _parts(ids: np.ndarray, rows: Callable[[np.ndarray], list[np.ndarray]]) -> list[np.ndarray]:
    """The clients in parts whose states fit into one file."""
    if not len(ids):
        return []
    size = sum(field[:1].nbytes for field in rows(ids[:1]))
    return np.array_split(ids, -(-len(ids) * size // SEGMENT_BYTES)) if size else []


@contextlib.contextmanager
def _write_errors_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        for draft in _drafts(folder):
            _remove(draft)
        raise CovaryError(
            f"A checkpoint could not be written to {folder} ({error.strerror}). The earlier checkpoints are intact. "
            "Free some space, or copy the folder to a larger disk, and resume from there."
        ) from error
