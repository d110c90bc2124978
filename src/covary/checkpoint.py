"""Checkpoints of a run: the last two, each checked when read, client states saved as they change.

A checkpoint is a file `round-R.safetensors` with the server's state, the averages and the history, and a list of
`clients-R-k.safetensors`, each with the states of some clients: those that changed since the checkpoint before, so that
a round costs what it touches. Reading them in order gives every client's state. Now and then all are written anew, and
what no checkpoint needs any more is removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from covary.algorithm import Algorithm
from covary.durable import Damaged, File, held
from covary.errors import CovaryError, refused
from covary.problem import Problem
from covary.program import State

FORMAT = 1
KEPT = 2
SAVED = ("round", "average", "average_mass", "reached", "diverged")  # of a state, besides server and clients
SEGMENT_BYTES = 2**28  # of client states in one file
ANEW = 2  # times as many rows as there are clients: then all are written anew


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged, and the one before it was used."""


class Saved(NamedTuple):
    """What a checkpoint holds, besides the clients."""

    round: int
    arrays: dict[str, np.ndarray]
    segments: list[str]


class Checkpoints:
    """The checkpoints of one run in a folder that is held against other processes."""

    def __init__(self, folder: Path, about: dict[str, Any], n_clients: int):
        self.folder, self.about, self.n_clients = folder, about, n_clients
        self.segments: list[str] = []  # that the next checkpoint builds on
        self.rows = 0  # in them

    def newest(self) -> Saved | None:
        """The newest whole checkpoint, or None where there is none; one of another run is refused."""
        paths = sorted(self.folder.glob("round-*.safetensors"), reverse=True)
        for path in paths:
            try:
                content = File(path).read()
                assert content is not None
                arrays, facts = content
                self._refuse_another_run(facts, path)
                segments = [str(name) for name in facts["segments"]]
                self.rows = sum(len(ids) for ids, _ in self._read(segments))
            except (Damaged, FileNotFoundError) as error:
                text = f"{error} The checkpoint before it is used."
                warnings.warn(CheckpointWarning(text), stacklevel=4)
                continue
            self.segments = segments
            return Saved(int(facts["round"]), arrays, segments)
        if paths:
            raise CovaryError(f"Every checkpoint in {self.folder} is damaged. Start anew in another folder.")
        return None

    def clients(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The saved clients' numbers and states, a part at a time, in the order in which they are to be put back."""
        return self._read(self.segments)

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
        if count > ANEW * self.n_clients:
            changed = np.unique(np.concatenate([changed, *(ids for ids, _ in self._read(segments))]))
            segments, count = [], len(changed)
        with _told_where(self.folder):
            for k, ids in enumerate(_parts(changed, rows)):
                name = f"clients-{round:09d}-{k}"
                fields = {str(n): field for n, field in enumerate(rows(ids))}
                File(self.folder / f"{name}.safetensors").write({"ids": ids, **fields}, {"format": FORMAT})
                segments.append(name)
            facts = {"format": FORMAT, "about": self.about, "round": round, "segments": segments}
            File(self.folder / f"round-{round:09d}.safetensors").write(arrays, facts)
        self.segments, self.rows = segments, count
        self._clean_up()

    def _read(self, segments: list[str]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for name in segments:
            if Path(name).name != name or not name.startswith("clients-"):
                raise Damaged(f"{self.folder} names a file that no checkpoint of covary's has: {name!r}.")
            content = File(self.folder / f"{name}.safetensors").read()
            if content is None:
                raise Damaged(f"{self.folder / name}.safetensors is missing.")
            arrays, _ = content
            ids = arrays.pop("ids")
            yield ids, [arrays[str(n)] for n in range(len(arrays))]

    def _clean_up(self) -> None:
        """Remove what neither of the last two checkpoints needs."""
        paths = sorted(self.folder.glob("round-*.safetensors"), reverse=True)
        needed = set(self.segments)
        for path in paths[1:KEPT]:
            with contextlib.suppress(Damaged):
                content = File(path).read()
                needed |= set(content[1]["segments"]) if content else set()
        for path in paths[KEPT:]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob("clients-*.safetensors"):
            if path.name.removesuffix(".safetensors") not in needed:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.draft"):
            path.unlink(missing_ok=True)

    def _refuse_another_run(self, facts: dict[str, Any], path: Path) -> None:
        if facts.get("format") != FORMAT:
            raise refused(
                "checkpoint", f"of format {FORMAT}", f"{facts.get('format')} in {path}", "Use the covary that wrote it."
            )
        then, now = facts["about"], self.about
        apart = [
            f"{name} was {then.get(name)} and is {now.get(name)}" for name in now if then.get(name) != now.get(name)
        ]
        if apart:
            raise CovaryError(
                f"{self.folder} holds checkpoints of another run: {'; '.join(apart)}. Resume with the same settings "
                "and data, or give another folder."
            )


def state_arrays(small: State) -> dict[str, np.ndarray]:
    """A state without the clients', by name."""
    server = {f"server.{name}": getattr(small.server, name) for name in small.server._fields}
    return server | {f"state.{name}": np.asarray(getattr(small, name)) for name in SAVED}


def state_from(like: State, arrays: dict[str, np.ndarray]) -> State:
    """The state of another with what was saved."""
    server = type(like.server)(*(arrays[f"server.{name}"] for name in like.server._fields))
    return like._replace(server=server, **{name: arrays[f"state.{name}"] for name in SAVED})


@contextlib.contextmanager
def opened(folder: str | Path, about: dict[str, Any], n_clients: int) -> Iterator[Checkpoints]:
    """The checkpoints of a folder, held against other processes."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise refused("checkpoint", "a folder", f"{folder!r} ({error})", "Give one you can write to.") from None
    with held(path):
        yield Checkpoints(path, about, n_clients)


def description(algorithm: Algorithm, problem: Problem, x: np.ndarray, **settings: Any) -> dict[str, Any]:
    """What a run is, for JSON: two runs with one description give the same numbers on one machine."""
    about = {"algorithm": str(algorithm), **{name: _plain(value) for name, value in settings.items()}}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype), problem.data.examples)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    about["model"] = hashlib.sha256(jax.jit(problem.loss).lower(params, shapes).as_text().encode()).hexdigest()[:16]
    about["start"] = hashlib.sha256(x.tobytes()).hexdigest()[:16]
    about["data"] = _digest(problem.data.examples, problem.data.sizes, streamed=problem.data.streamed)
    about["test"] = None if problem.test is None else _digest(problem.test)
    return about


def _digest(*trees: Any, streamed: bool = False) -> str:
    """A fingerprint of arrays; of streamed ones by their ends, as reading all could take longer than the run."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype} {leaf.shape} ".encode())
        for part in (leaf[:1024], leaf[-1024:]) if streamed else (leaf,):
            digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


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
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        for draft in folder.glob("*.draft"):
            draft.unlink(missing_ok=True)
        raise CovaryError(
            f"A checkpoint could not be written to {folder} ({error.strerror}). The one before it is whole: free some "
            "space, or copy the folder to where there is more, and call again with it."
        ) from error
