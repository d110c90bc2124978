"""Checkpoints of a run: the last two, each checked when read, client states saved as they change.

A checkpoint is a file `round-R.safetensors` with the server's state, the averages and the history, and a list of
`clients-R-k.safetensors`, each with the states of some clients: those that changed since the checkpoint before, so that
a round costs what it touches. Reading them in order gives every client's state. Now and then all are written anew, and
what no checkpoint needs any more is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from covary.algorithm import Algorithm, Exchange
from covary.client import dry_run
from covary.durable import Damaged, File, held
from covary.errors import CovaryError, refused
from covary.interrupt import interruptions
from covary.problem import Problem
from covary.program import State

FORMAT = 1
KEPT = 2
SAVED = ("round", "average", "average_mass", "reached", "diverged", "scale")  # of a state, besides server and clients
OF_JAX = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_enable_x64")
SEGMENT_BYTES = 2**28  # of client states in one file
NAMES = re.compile(r"round-[0-9]{9,}\.safetensors")
SEGMENTS = re.compile(r"clients-[0-9]{9,}-[0-9]+")  # .safetensors
HEADER = 2**24  # most bytes of a file besides its arrays
ANEW = 2  # times as many rows as there are clients: then all are written anew
MANY = 1000  # files: then too


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged, and the one before it was used."""


class Saved(NamedTuple):
    """What a checkpoint holds, besides the clients."""

    round: int
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run in a folder that is held against other processes.

    `small` and `row` are bytes: of all that is saved besides the clients, at most, and of one client's states.
    """

    def __init__(self, folder: Path, about: dict[str, Any], n_clients: int, small: int, row: int):
        self.folder, self.about, self.n_clients = folder, about, n_clients
        self.most = {"round": 2 * small + HEADER, "clients": 2 * max(SEGMENT_BYTES, row) + HEADER}
        self.segments: list[str] = []  # that the next checkpoint builds on
        self.rows = 0  # in them
        self.built_on: dict[Path, list[str]] = {}  # what each checkpoint of the folder builds on, where that is known
        self.damaged: list[Path] = []
        self.run = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def newest(self) -> Saved | None:
        """The newest whole checkpoint, or None where there is none; one of another run is refused."""
        paths = self._rounds()
        for path in paths:
            try:
                content = File(path).read(self.most["round"])
                if content is None:
                    raise Damaged(f"{path} is missing.")
                arrays, facts = content
                self._refuse_another_run(facts, path)
                segments: Any = facts.get("segments")
                number = facts.get("round")
                if not _segments(segments) or not isinstance(number, int) or path.name != _name(number):
                    raise Damaged(f"{path} is not what covary writes.")
                self.rows = sum(len(ids) for ids, _ in self._read(segments))
                if self.rows > ANEW * self.n_clients:
                    raise Damaged(f"{path} has more states than covary writes.")
            except Damaged as error:
                text = f"{error} The checkpoint before it is used, if there is one."
                warnings.warn(CheckpointWarning(text), stacklevel=4)
                self.damaged.append(path)
                continue
            self.segments = self.built_on[path] = segments
            self._clean_up(path)
            return Saved(number, arrays)
        if paths:
            raise CovaryError(f"Every checkpoint in {self.folder} is damaged. Start anew in another folder.")
        return None

    def clients(self, like: list[np.ndarray]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The saved clients' numbers and states, a part at a time, in the order in which they are to be put back.

        `like` has the states of one client, field by field, whose form the saved ones must have.
        """
        for ids, rows in self._read(self.segments):
            forms = [(field.shape, field.dtype) for field in rows]
            if forms != [((len(ids), *field.shape[1:]), field.dtype) for field in like]:
                raise Damaged(f"{self.folder} has client states of another form. Start anew in another folder.")
            yield ids, rows

    def save(
        self,
        round: int,
        arrays: dict[str, np.ndarray],
        changed: np.ndarray,
        rows: Callable[[np.ndarray], list[np.ndarray]],
        anew: bool = False,
    ) -> None:
        """Write a checkpoint; `rows` gives the states of the clients it is asked for.

        Only those of the clients that changed since the last one are written, unless all began anew.
        """
        segments, count = ([], 0) if anew else (list(self.segments), self.rows)
        count += len(changed)
        if count > ANEW * self.n_clients or len(segments) >= MANY:
            changed = np.unique(np.concatenate([changed, *(ids for ids, _ in self._read(segments))]))
            segments, count = [], len(changed)
        with _told_where(self.folder):
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
                raise Damaged(f"{path} is not what covary writes.")
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

    def _refuse_another_run(self, facts: dict[str, Any], path: Path) -> None:
        if facts.get("format") != FORMAT:
            raise refused(
                "checkpoint",
                f"of format {FORMAT}",
                f"{str(facts.get('format'))[:20]} in {path}",
                "Use the covary that wrote it.",
            )
        then, now = facts.get("about"), self.about
        if not isinstance(then, dict):
            raise Damaged(f"{path} is not what covary writes.")
        apart = [
            f"{name} was {str(then.get(name))[:200]} and is {str(now.get(name))[:200]}"
            for name in {**now, **then}
            if then.get(name) != now.get(name)
        ]
        if apart:
            raise CovaryError(
                f"{self.folder} holds checkpoints of another run: {'; '.join(apart)}. Resume with the same settings "
                "and data, or give another folder."
            )


def sizes(algorithm: Algorithm, x: np.ndarray, members: int = 1) -> tuple[int, int]:
    """Bytes of a state without the clients', and of one client's, for all members of a sweep."""
    server, client = (
        sum(np.size(leaf) for leaf in jax.tree.leaves(init(x)))
        for init in (algorithm.init_server, algorithm.init_client)
    )
    return members * x.itemsize * (server + x.size + 8), members * x.itemsize * client


def state_arrays(small: State) -> dict[str, np.ndarray]:
    """A state without the clients', by name."""
    server = {f"server.{name}": getattr(small.server, name) for name in small.server._fields}
    return server | {f"state.{name}": np.asarray(getattr(small, name)) for name in SAVED}


def state_from(like: State, arrays: dict[str, np.ndarray]) -> State:
    """The state of another with what was saved."""
    for name, own in state_arrays(like).items():
        saved = arrays.get(name)
        counts = saved is not None and saved.dtype.kind == own.dtype.kind == "i"  # of whatever width
        if saved is None or saved.shape != own.shape or (saved.dtype != own.dtype and not counts):
            raise Damaged(f"A checkpoint has no {name} of shape {own.shape} and type {own.dtype}. Start anew.")
    server = type(like.server)(*(arrays[f"server.{name}"] for name in like.server._fields))
    return like._replace(server=server, **{name: arrays[f"state.{name}"] for name in SAVED})


@contextlib.contextmanager
def opened(folder: str | Path, about: dict[str, Any], n_clients: int, small: int, row: int) -> Iterator[Checkpoints]:
    """The checkpoints of a folder, held against other processes."""
    if jax.process_count() > 1:
        fix = "Leave it out: each of the hosts has a part of the states."
        raise refused("checkpoint", "None when several hosts run together", repr(str(folder)), fix)
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise refused("checkpoint", "a folder", f"{folder!r} ({error})", "Give one you can write to.") from None
    with held(path):
        yield Checkpoints(path, about, n_clients, small, row)


def drive(going: Any, checkpoints: Checkpoints, every: int) -> None:
    """Take a run, or the members of a sweep, from their last checkpoint to their end.

    They are saved every so many rounds, at the end, and when someone asks to stop.
    """
    saved = checkpoints.newest()
    if saved is not None:
        going.restore(saved.arrays, checkpoints.clients)
    with interruptions() as interruption:
        while not going.ended:
            going.advance(min(going.rounds, going.done + every - going.done % every), interruption.heard)
            number, touched, anew = going.news()
            checkpoints.save(number, going.arrays(), touched, going.rows, anew)
            interruption.stop(checkpoints.folder, number)


def description(
    algorithms: list[Algorithm], problem: Problem, x: np.ndarray, trips: tuple[Exchange, ...], **settings: Any
) -> dict[str, Any]:
    """What a run is, for JSON. How it is run (devices, width, store) is not part of it: it can go on elsewhere."""
    about: dict[str, Any] = {"algorithm": ", ".join(map(str, algorithms))}
    about |= {name: _plain(value) for name, value in settings.items()}
    about["code"] = _hash(_code(algorithms[0], trips, x.reshape(-1, x.shape[-1])[0]))
    about["model"] = _hash(problem.lowered())
    about["jax"] = [str(getattr(jax.config, name, None)) for name in OF_JAX]
    about["start"] = hashlib.sha256(x.tobytes()).hexdigest()[:16]
    about["data"] = _fingerprint(problem.data.examples, problem.data.sizes, streamed=problem.data.streamed)
    about["test"] = None if problem.test is None else _fingerprint(problem.test)
    return about


def _code(algorithm: Algorithm, trips: tuple[Exchange, ...], x: np.ndarray) -> str:
    """What an algorithm computes, for one that was made by hand and changed since; numbers are part of it."""

    def round_of_one(server: Any, client: Any) -> Any:
        for trip in (*trips, *([algorithm.warm_start] if algorithm.warm_start else [])):
            _, up, client = dry_run(trip, server, client)
            server = trip.aggregate(server, up, 0.5)
        return server, client

    states = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), (algorithm.init_server(x), algorithm.init_client(x)))
    return jax.jit(round_of_one).lower(*states).as_text()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint(*trees: Any, streamed: bool = False) -> str:
    """A fingerprint of arrays; of streamed ones by their ends, as reading all could take longer than the run."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype} {leaf.shape} ".encode())
        for part in (leaf[:1024], leaf[-1024:]) if streamed else (leaf,):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _name(round: int) -> str:
    return f"round-{round:09d}.safetensors"


def _segments(names: Any) -> bool:
    """Whether these are different names of files of clients' states."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return len(set(names)) == len(names) and all(SEGMENTS.fullmatch(name) for name in names)


def _drafts(folder: Path) -> list[Path]:
    """Files of ours that were not finished."""
    ours = (re.compile(pattern.pattern + r"(\.safetensors)?\.draft") for pattern in (NAMES, SEGMENTS))
    return [path for pattern in ours for path in folder.iterdir() if pattern.fullmatch(path.name)]


def _remove(path: Path) -> None:
    """Remove a file; one that cannot be stays, as no checkpoint needs it."""
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
def _told_where(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        for draft in _drafts(folder):
            _remove(draft)
        raise CovaryError(
            f"A checkpoint could not be written to {folder} ({error.strerror}). Those that were are whole: free some "
            "space, or copy the folder to where there is more, and call again with it."
        ) from error
