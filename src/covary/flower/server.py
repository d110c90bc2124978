"""The server's part: rounds among the nodes that are there, written down before anything more is sent."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from covary._engine.cohort import sample
from covary._engine.plan import cohort_size
from covary.algorithm import Algorithm, Exchange
from covary.checks import whole
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.flower.ending import ending, outcome
from covary.flower.history import Record, columns, is_metric
from covary.flower.journal import Ledger, Member, Order
from covary.flower.merge import Arrays, Reply, merge, named, prefixed, upload_like
from covary.flower.post import console, exchange, identity
from covary.flower.refusals import OtherSteps, Stale, StateLost
from covary.flower.screening import screened
from covary.flower.settings import Settings
from covary.flower.start import spec_of, start_of
from covary.flower.watch import WatchedGrid
from covary.flower.wire import FACTS, bytes_of, nbytes, pack, vectors_of
from covary.runs.files import File, held
from covary.simulate import Run

VISITS = 3  # in vain, before a warm start goes on without a member
HELD = 1.0  # seconds to wait for the checkpoint, at which `covary status` may be looking
LOSSES = 3  # losses of a member's state before it is no longer asked


def serve(
    grid: Grid,
    algorithm: Algorithm,
    model: Any,
    settings: Settings,
    evaluate: Callable[[np.ndarray], Mapping[str, float]] | None = None,
) -> Run:
    """Run the rounds over a grid and return what `simulate` would: for a ServerApp of your own, or for tests."""
    folder = Path(settings.checkpoint)
    with held(folder, HELD):
        with ending(folder, settings.rounds) as end:
            server = Server(WatchedGrid(grid, settings.patience), algorithm, model, settings, evaluate, folder)
            run = server.run()
            told = server.record.not_counted()
            if run.diverged is not None:
                why = f"{algorithm} left the finite numbers in round {run.diverged}. Try a smaller eta_l."
                end("stopped", f"{why} {told}".strip())
            else:
                why = "" if run.reached is None else f"The target {settings.target} is met."
                end("reached", f"{why} {told}".strip())
        console.print(f"covary: {outcome(folder)}")
        return run


class Server:
    """One server at work on one checkpoint."""

    def __init__(
        self,
        grid: WatchedGrid,
        algorithm: Algorithm,
        model: Any,
        settings: Settings,
        evaluate: Callable[[np.ndarray], Mapping[str, float]] | None,
        folder: Path,
    ):
        self.grid, self.algorithm, self.settings, self.measure_here = grid, algorithm, settings, evaluate
        x, buffers, self.form, self.unravel = start_of(model, settings.seed)
        self.spec = spec_of(algorithm)
        if algorithm.lockstep and settings.clients_per_round is not None:
            came = f"clients_per_round={settings.clients_per_round}"
            fix = "Leave it out, or use scaffold."
            raise refused("clients_per_round", f"None: {algorithm.name} needs every client every round", came, fix)
        if settings.warm_start and algorithm.warm_start is None:
            raise refused("warm_start", "False", "True", f"{algorithm.name} has no controls that a gradient can set.")
        self.ledger = self._ledger(folder, x, buffers)
        self.record = Record(folder, self.ledger, settings)
        self.refused: dict[str, tuple[float, float]] = {}  # not let in: when to ask again, and the next wait
        self.attempt = 0
        self.newest = -1  # epoch that a client has seen
        self.stale: set[str] = set()  # those that have followed a newer server
        self.vain: dict[str, int] = {}  # how often a warm start has visited a member in vain
        self.losses: dict[str, int] = {}  # how often a member has lost its state, while this server runs
        self.lost: set[str] = set()  # those that report it in this round

    def _ledger(self, folder: Path, x: np.ndarray, buffers: Arrays) -> Ledger:
        disk, s = File(folder / "ledger"), self.settings
        identity = {
            "algorithm": str(self.algorithm),
            "training": s.training,
            "clients_per_round": s.clients_per_round,
            "seed": s.seed,
            "warm_start": s.warm_start,
            "weights": s.weights,
            "model": f"{len(x)} numbers of {x.dtype} ({self.form[:12]})",
            "buffers": sorted(buffers),
            "invariant": list(self.algorithm.invariant or ()),
        }
        if not s.resume:
            if (folder / "ledger").exists() or (folder / "results.jsonl").exists():
                raise refused(
                    "checkpoint", "a new folder", str(folder), "To go on from what is there, use resume=true."
                )
            return Ledger.create(disk, named("server.", self.algorithm.init_server(x)) | prefixed(buffers), identity)
        ledger = Ledger.resume(disk)
        for name, value in identity.items():
            if ledger.settings.get(name) != value:
                raise CovaryError(
                    f"The checkpoint in {folder} was made with {name} = {ledger.settings.get(name)}, and this run has "
                    f"{value}. Resume with the same settings, or start anew in another folder."
                )
        console.print(f"Resumed from {folder} after round {ledger.round}.")
        return ledger

    # What the ledger's arrays are

    @property
    def server(self) -> Any:
        kind = type(self.algorithm.init_server(self.ledger.arrays["server.x"]))
        return kind(**{name: self.ledger.arrays[f"server.{name}"] for name in kind._fields})

    @property
    def buffers(self) -> Arrays:
        arrays = self.ledger.arrays
        return {name.removeprefix("buffers."): a for name, a in arrays.items() if name.startswith("buffers.")}

    # Rounds

    def run(self) -> Run:
        s, ledger = self.settings, self.ledger
        reached = self._finish(None) if ledger.round else False
        diverged = False
        since = time.monotonic()
        while ledger.round < s.rounds and not reached and not diverged:
            online = self._meet()
            started, before = time.monotonic(), ledger.round
            diverged = not self._round(online)
            if ledger.round > before:
                self.attempt, since = 0, time.monotonic()
                self.stale.clear()
                ledger.row["seconds"] = round(since - started, 3)
                reached = self._finish(online)
                self._forget()
            elif not diverged:
                self.attempt += 1
                if self.stale >= set(online):
                    raise CovaryError(
                        f"All nodes have followed orders newer than this checkpoint's ({s.checkpoint}, round "
                        f"{ledger.round}): it is an old copy, or another server is at work. Use the newest checkpoint, "
                        "or start anew in another folder."
                    )
                if time.monotonic() - since > s.patience:
                    raise CovaryError(
                        f"No round could be finished for {s.patience:g} s; the last was round {ledger.round}. The log "
                        "above has what each node said. Uploads refused for their numbers mean that eta_l is too "
                        "large; for uploads left out, see screen. What is counted is on the disk: when the cause is "
                        "gone, start again with resume=true."
                    )
                time.sleep(min(1.0, s.patience / 10))
        server = self.server
        if diverged:
            text = f"{self.algorithm} left the finite numbers in round {ledger.round + 1}. The last good state is kept."
            warnings.warn(f"{text} Try a smaller eta_l.", DivergenceWarning, stacklevel=2)
        return Run(
            algorithm=self.algorithm,
            params=self.unravel(server.x),
            x=server.x,
            server=server,
            clients=None,  # on the clients' own disks
            history=columns(self.record.rows),
            reached=ledger.round if reached else None,
            diverged=ledger.round + 1 if diverged else None,
        )

    def _round(self, online: dict[str, int]) -> bool:
        """One round, as far as it goes. False if it left the finite numbers."""
        ledger, s = self.ledger, self.settings
        r = ledger.round + 1
        warm = [] if ledger.trip else self._unvisited(online)
        trips, steps = self._trips(bool(warm))
        cohort = [name for name in ledger.cohort if name in online] if ledger.trip else self._cohort(r, online, warm)
        row: dict[str, Any] = {"round": r, "epoch": ledger.epoch, "bytes_down": 0, "bytes_up": 0, "asked": len(cohort)}
        row |= {"left_out": 0, "uploads": []}
        if ledger.trip:
            row |= ledger.partial
        drift = 0.0
        self.lost.clear()
        for number in range(ledger.trip + 1, len(trips) + 1):
            trip = trips[number - 1]
            facts = {"seed": s.seed, "round": r, "trip": number, "warm": bool(warm), "steps": steps}
            replies, traffic = self._ask(trip, facts, {name: online[name] for name in cohort})
            for name, count in zip(("bytes_down", "bytes_up"), traffic, strict=True):
                row[name] += count
            self._screen(number, replies, row)
            for name in set(cohort) - set(replies) - self.lost if warm else ():
                self.vain[name] = self.vain.get(name, 0) + 1
            if len(replies) < self._least(cohort, bool(warm)):
                console.print(f"Round {r}: {len(replies)} of {len(cohort)} replied, too few. It is tried again.")
                if ledger.trip:
                    ledger.count({}, ledger.arrays, trip=0, cohort=[])
                break
            arrays = merge(trip, self.server, replies, ledger.weights(s.weighted))
            if not all(np.isfinite(array).all() for array in arrays.values()):
                return False
            drift += float(np.mean([reply.drift for reply in replies.values()]))
            cohort = list(replies)
            tokens = {name: reply.token for name, reply in replies.items()}
            if number < len(trips):
                ledger.count(tokens, arrays, trip=number, cohort=cohort, partial=row)
                continue
            row |= {
                "drift": drift if math.isfinite(drift) else None,
                "cohort": sorted(ledger.members[name].number for name in cohort),
            }
            for name, member in ledger.members.items():
                ledger.members[name] = member._replace(absent=0 if name in online else member.absent + 1)
            visited = ledger.warm + (cohort if warm else [])
            ledger.count(tokens, arrays, round=r, trip=0, cohort=[], warm=visited, row=row)
        if self.lost:
            lost = sorted(self.lost)
            for name in lost:
                self.losses[name] = self.losses.get(name, 0) + 1
            out = tuple(name for name in lost if self.losses[name] > LOSSES)
            for name in out:  # it would cost everybody's controls again and again
                self.refused[name] = (math.inf, math.inf)
                console.print(f"{name} has lost its state more than {LOSSES} times and is not asked again.")
            self._reset(f"control variates were lost by {', '.join(lost)}", out)
        return True

    def _least(self, cohort: list[str], warm: bool) -> int:
        """The fewest replies with which a trip counts."""
        if self.algorithm.lockstep:
            return len(self.ledger.members)
        return min(self.settings.min_replies, len(cohort)) if warm else self.settings.min_replies

    def _trips(self, warm: bool) -> tuple[tuple[Exchange, ...], int | None]:
        """This round's trips, and K where the server can form from it what option II leaves unsent."""
        steps = {member.steps for member in self.ledger.members.values()}
        by_examples = self.settings.weighted and len({m.size for m in self.ledger.members.values()}) > 1
        K = steps.pop() if len(steps) == 1 and not by_examples else None
        if warm:
            assert self.algorithm.warm_start is not None
            return (self.algorithm.warm_start,), K
        return self.algorithm.trips(K), K

    def _unvisited(self, online: dict[str, int]) -> list[str]:
        """Members that a warm start has still to visit."""
        if not self.settings.warm_start:
            return []
        waiting = [name for name in self._by_number(online) if name not in self.ledger.warm]
        return [name for name in waiting if self.vain.get(name, 0) < VISITS]

    def _by_number(self, names: Any) -> list[str]:
        return sorted(names, key=lambda name: self.ledger.members[name].number)

    def _cohort(self, r: int, online: dict[str, int], warm: list[str]) -> list[str]:
        """Uniform among those that are there: when all are, simulation's own draw."""
        s = self.settings
        S, N = s.clients_per_round, len(self.ledger.members)
        S = cohort_size(S if S is None or isinstance(S, float) else min(S, N), N)
        if s.min_replies > S and S < N and not self.algorithm.lockstep:
            fix = f"A round has {S} of {N} clients: raise clients_per_round."
            raise refused("min_replies", f"at most {S}", s.min_replies, fix)
        if warm:
            return warm[:S]
        there = self._by_number(online)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(s.seed), r), 0)
        if self.attempt:
            key = jax.random.fold_in(key, self.attempt)
        return [there[k] for k in np.asarray(sample(key, len(there), min(S, len(there))))]

    def _screen(self, trip: int, replies: dict[str, Reply], row: dict[str, Any]) -> None:
        """Take out the uploads that are too large beside the others, and note what all of them were like."""
        ledger = self.ledger
        bound = None if self.algorithm.lockstep else self.settings.screen
        earlier = self.record.uploads(ledger.epoch)
        left_out, records = screened(trip, replies, ledger.members, self.buffers, earlier, bound)
        row["uploads"] = row["uploads"] + records
        row["left_out"] += len(left_out)
        for name, multiple in left_out.items():
            del replies[name]
            console.print(
                f"{name} is left out: its upload has {multiple:.3g} times the median norm, and screen is "
                f"{self.settings.screen:g}. If it is honest, resume with a larger screen."
            )

    def _ask(
        self, trip: Exchange, facts: dict[str, Any], nodes: dict[str, int]
    ) -> tuple[dict[str, Reply], tuple[int, int]]:
        """One trip: the replies that may be counted, and the bytes down and up."""
        server, members = self.server, self.ledger.members
        down = trip.broadcast(server)
        orders = {name: self.ledger.order(name) for name in nodes}
        like = upload_like(trip, self.algorithm, server)
        shared = pack({}, down=down._asdict(), buffers=self.buffers)
        contents = {}
        for name, order in orders.items():
            task = facts | {"algorithm": self.spec, "training": self.settings.training, "number": members[name].number}
            own = {"task": task | {"cohort": len(nodes)}, "order": order._asdict()}
            contents[name] = self._instruction(shared, own)
        up = 0

        def look(name: str, message: Message, facts: dict[str, Any]) -> Reply:
            nonlocal up
            up += bytes_of(message.content)
            return self._checked(message, facts, orders[name], like)

        expected = {"up": nbytes(like._asdict()), "buffers": nbytes(self.buffers)}
        replies = self._exchange("train", nodes, contents, look, str(facts["round"]), expected)
        counted = {name: replies[name] for name in self._by_number(replies)}
        return counted, (sum(bytes_of(content) for content in contents.values()), up)

    def _checked(self, message: Message, answer: dict[str, Any], order: Order, like: Any) -> Reply:
        if answer.get("token") != order.token:
            raise CovaryError(f"its token is {str(answer.get('token'))[:40]!r}, which it was not given")
        up = type(like)(**vectors_of(message, "up", like._asdict(), self.settings.largest))
        buffers = vectors_of(message, "buffers", self.buffers, self.settings.largest)
        if any(name.endswith("running_var") and (array < 0).any() for name, array in buffers.items()):
            raise CovaryError("it has a variance below zero")
        drift = answer.get("drift")
        return Reply(order.token, up, buffers, drift if isinstance(drift, float) else math.nan)

    def _instruction(self, shared: RecordDict, facts: dict[str, Any]) -> RecordDict:
        x = self.ledger.arrays["server.x"]
        own = pack(facts | {"form": self.form, "about": f"{len(x)} numbers of {x.dtype}"})
        return RecordDict({**shared, FACTS: own[FACTS]})

    def _exchange(
        self,
        kind: str,
        nodes: Mapping[str, int],
        contents: Mapping[str, RecordDict],
        look: Callable[[str, Message, dict[str, Any]], Any],
        group: str = "",
        expected: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        time_left = self.settings.round_timeout
        return exchange(self.grid, kind, nodes, contents, look, self._heed, time_left, group, expected)

    def _heed(self, name: str, facts: dict[str, Any]) -> None:
        """Draw the consequences of a refusal."""
        why, member = facts["refused"], self.ledger.members.get(name)
        if why == Stale.__name__:
            self.stale.add(name)
        if why == OtherSteps.__name__ and member is not None and not self.algorithm.lockstep:
            self.ledger.members[name] = member._replace(steps=whole("steps", facts.get("steps"), 1))
            self.ledger.write()
        if why == StateLost.__name__ and member is not None:
            epoch = whole("epoch", facts.get("epoch"), -1, most=2**62)
            known = member.counted or epoch >= self.ledger.epoch
            if not known or not self.algorithm.init_client(self.server.x):
                raise CovaryError("it reports losing a state that the server never counted")
            self.newest = max(self.newest, epoch)
            self.lost.add(name)

    # Members

    def _meet(self) -> dict[str, int]:
        """Let new nodes in, and wait until enough are there."""
        s, deadline, told = self.settings, time.monotonic() + self.settings.patience, False
        while True:
            nodes, now = {identity(info): info.node_id for info in self.grid.get_nodes()}, time.monotonic()
            strangers = {
                name: node
                for name, node in nodes.items()
                if name not in self.ledger.members and self.refused.get(name, (0.0, 0.0))[0] <= now
            }
            if strangers:
                self._let_in(strangers)
            online = {name: node for name, node in nodes.items() if name in self.ledger.members}
            least = len(self.ledger.members) if self.algorithm.lockstep else s.min_replies
            enough = max(least, s.min_clients if not self.ledger.round else 1)
            if len(online) >= enough:
                return online
            if not told:
                console.print(f"{len(online)} nodes are there; waiting for {enough}.")
                told = True
            if time.monotonic() > deadline:
                absent = tuple(name for name in self.ledger.members if name not in online)
                if self.algorithm.lockstep and s.forget_after is not None and online and absent:
                    self._reset(f"{', '.join(absent)} did not come back", absent)
                    return online
                out = f" {len(self.refused)} answered and were refused, see above." if self.refused else ""
                raise CovaryError(
                    f"{len(online)} nodes are there, {enough} are needed, after {s.patience:g} s.{out} Check that the "
                    "nodes are up and registered. What is counted is on the disk: start again with resume=true."
                )
            time.sleep(0.5)

    def _let_in(self, strangers: dict[str, int]) -> None:
        """Ask nodes that nobody knows yet for their number of examples and steps, and make them members."""
        task = {"algorithm": self.spec, "training": self.settings.training, "seed": self.settings.seed}
        task |= {"round": self.ledger.round, "trip": 1, "warm": False, "steps": None, "number": 0, "cohort": 0}
        question = self._instruction(RecordDict(), {"task": task})
        for name in strangers:
            wait = 2 * self.refused.get(name, (0.0, 30.0))[1]
            self.refused[name] = (time.monotonic() + wait, min(wait, 3600.0))

        def look(name: str, message: Message, facts: dict[str, Any]) -> tuple[Any, str, int, int]:
            size, steps = whole("size", facts.get("size"), 1), whole("steps", facts.get("steps"), 1)
            if facts.get("buffers") != sorted(self.buffers):
                raise CovaryError(f"its buffers are {facts.get('buffers')}, the server's are {sorted(self.buffers)}")
            known = {member.steps for member in self.ledger.members.values()}
            if self.algorithm.lockstep and known - {steps}:
                raise CovaryError(f"{self.algorithm.name} needs the same steps on all clients, and it takes {steps}")
            partition = facts.get("partition")
            return partition if isinstance(partition, int) else math.inf, name, size, steps

        found = list(self._exchange("query", strangers, dict.fromkeys(strangers, question), look).values())
        found.sort()
        first = len(self.ledger.members)
        newcomers = {name: Member(first + k, size, steps) for k, (_, name, size, steps) in enumerate(found)}
        if not newcomers:
            return
        steps = {member.steps for member in newcomers.values()}
        if self.algorithm.lockstep and len(steps) > 1 and not first:
            raise CovaryError(
                f"{self.algorithm.name} needs the same number of local steps on all clients; they take from "
                f"{min(steps)} to {max(steps)}. Use local_steps, or scaffold."
            )
        for name in newcomers:
            del self.refused[name]
        arrays = dict(self.ledger.arrays)
        invariant = self.algorithm.invariant
        by_examples = self.settings.weighted
        old, new = (
            float(sum(m.size if by_examples else 1 for m in group.values()))
            for group in (self.ledger.members, self.ledger.members | newcomers)
        )
        if invariant is not None:  # c is the mean over more clients, of which the new ones have zero
            field = f"server.{invariant[0]}"
            arrays[field] = arrays[field] * arrays[field].dtype.type(old / new)
        has_state = bool(self.algorithm.init_client(self.server.x))
        anew = bool(first and invariant is None and has_state)
        if anew:
            arrays |= named("server.", self.algorithm.init_server(self.server.x))
        self.ledger.join(newcomers, arrays, new_epoch=anew)
        told = " A new epoch begins, as this algorithm's states depend on all." if anew else ""
        console.print(f"{', '.join(newcomers)} joined: {len(self.ledger.members)} members.{told}")
        weights = self.ledger.weights(by_examples)
        heaviest = max(weights, key=lambda name: weights[name])
        if by_examples and len(weights) > 1 and weights[heaviest] > 0.5:
            console.print(f"{heaviest} weighs {weights[heaviest]:.0%}, by the number of examples that it claims.")

    def _reset(self, why: str, leaving: tuple[str, ...] = ()) -> None:
        server = named("server.", self.algorithm.init_server(self.server.x))
        self.ledger.reset(self.ledger.arrays | server, leaving, self.newest)
        self.vain.clear()
        console.print(f"Epoch {self.ledger.epoch} begins: {why}. All control variates start again from zero.")

    def _forget(self) -> None:
        limit = self.settings.forget_after
        gone = tuple(name for name, m in self.ledger.members.items() if limit is not None and m.absent >= limit)
        if gone and self.algorithm.init_client(self.server.x):
            self._reset(f"{', '.join(gone)} left for good", gone)
        elif gone:
            self.ledger.reset(self.ledger.arrays, gone)
            console.print(f"{', '.join(gone)} left for good: {len(self.ledger.members)} members.")

    # Measurements

    def _finish(self, online: dict[str, int] | None) -> bool:
        """Measure the round just done, if that is due, and write it down. True if the run has met its target."""
        return self.record.finish(lambda: self._evaluate(self._meet() if online is None else online))

    def _evaluate(self, online: dict[str, int]) -> dict[str, Any]:
        """Loss and metrics: their means, what each node says, and how many were asked."""
        x = self.server.x
        p = self.ledger.weights(self.settings.weighted)
        online = {name: node for name, node in online.items() if name in p}
        content = self._instruction(pack({}, down={"x": x}, buffers=self.buffers), {})
        totals: dict[str, list[float]] = {}
        by_node: dict[str, list[tuple[int, float]]] = {}

        def look(name: str, message: Message, facts: dict[str, Any]) -> None:
            tested, found = whole("tested", facts.get("tested"), 1), facts.get("values")
            if not isinstance(found, dict) or len(found) > 100:
                raise CovaryError("what it measured is not up to 100 numbers by their names")
            for metric, value in found.items():
                if not is_metric(metric, value):
                    console.print(f"{name}: a metric that is no finite number, or has no proper name, is left out.")
                    continue
                weight = p[name] if metric == "loss" else float(tested)
                by_node.setdefault(metric, []).append((self.ledger.members[name].number, value))
                total = totals.setdefault(metric, [0.0, 0.0])
                total[0], total[1] = total[0] + weight * value, total[1] + weight

        self._exchange("evaluate", online, dict.fromkeys(online, content), look)
        values = {metric: total / weight for metric, (total, weight) in totals.items()}
        if self.measure_here is not None:
            here = {name: float(value) for name, value in self.measure_here(x).items()}
            values |= here
            by_node = {name: reports for name, reports in by_node.items() if name not in here}
        return {**values, "by_node": by_node, "evaluated": len(online)}
