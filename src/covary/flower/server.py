"""The server's rounds with the nodes that are online. Each round is saved before anything else is sent."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from covary import draws
from covary.algorithm import Algorithm, Exchange
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.flower.deployment import Deployment
from covary.flower.ending import ending, outcome
from covary.flower.evaluation import Measure, evaluate
from covary.flower.exchange import Collected, collect
from covary.flower.history import Record, columns
from covary.flower.log import log
from covary.flower.membership import Membership
from covary.flower.merge import Arrays, merge
from covary.flower.screening import screened
from covary.flower.settings import Settings
from covary.flower.watch import WatchedGrid
from covary.running.plan import cohort_size
from covary.runs.files import held
from covary.simulate import Run

VISITS = 3  # of a warm start to a member that does not reply, before the run continues without it
HELD = 1.0  # seconds to wait for the checkpoint, which `covary status` may be reading


def serve(
    grid: Grid,
    algorithm: Algorithm,
    model: Any,
    settings: Settings,
    evaluate: Callable[[np.ndarray], Mapping[str, float]] | None = None,
) -> Run:
    """Run the rounds over a grid and return what `simulate` would: for a ServerApp of your own, or for tests.

    >>> import covary as cv
    >>> from flwr.serverapp import ServerApp
    >>> from covary.flower import Settings, serve
    >>> app, model = ServerApp(), cv.models.logistic_regression(64, 10)
    >>> @app.main()
    ... def main(grid, context):
    ...     run = serve(grid, cv.scaffold(eta_l=0.3), model, Settings(rounds=20, local_epochs=1, checkpoint="digits"))
    ...     print(run.history["loss"][-1])
    """
    folder = Path(settings.checkpoint)
    with held(folder, HELD):
        with ending(folder, settings.rounds) as end:
            watched, deployment = WatchedGrid(grid, settings.patience), Deployment(algorithm, model, settings, folder)
            server = Server(deployment, Membership(watched, deployment), folder, evaluate)
            run = server.run()
            not_counted = server.record.not_counted()
            if run.diverged is not None:
                why = f"{algorithm} diverged in round {run.diverged}. Try a smaller eta_l."
                end("stopped", f"{why} {not_counted}".strip())
            else:
                why = "" if run.reached is None else f"The target {settings.target} is met."
                end("reached", f"{why} {not_counted}".strip())
        found = outcome(folder)
        (log.info if found.reached else log.error)("covary: %s", found)
        return run


@dataclass
class Round:
    """A round under way."""

    number: int
    exchanges: tuple[Exchange, ...]
    steps: int | None  # K, if the server can compute from it what option II does not send
    warm: bool  # it belongs to the warm start
    cohort: list[str]
    row: dict[str, Any]  # of the history
    drift: float = 0.0


class Server:
    """The rounds of one run."""

    def __init__(self, deployment: Deployment, members: Membership, folder: Path, on_server: Measure | None):
        self.deployment, self.members, self.on_server = deployment, members, on_server
        self.algorithm, self.settings, self.ledger = deployment.algorithm, deployment.settings, deployment.ledger
        self.record = Record(folder, self.ledger, self.settings)
        self.attempt = 0  # at the next round
        self.unanswered: Counter[tuple[int, str]] = Counter()  # visits of a warm start, by epoch and member

    def run(self) -> Run:
        """All rounds that are not done yet, until the target is met or the numbers are no longer finite."""
        ledger = self.ledger
        reached = self._finish(None) if ledger.round else False
        diverged = False
        progress = time.monotonic()  # the time of the last round that was counted
        while ledger.round < self.settings.rounds and not reached and not diverged:
            online = self.members.meet()
            started, before = time.monotonic(), ledger.round
            diverged = not self._round(online)
            if ledger.round > before:
                self.attempt, progress = 0, time.monotonic()
                self.members.stale.clear()
                ledger.row["seconds"] = round(progress - started, 3)
                reached = self._finish(online)
                self.members.forget()
            elif not diverged:
                self.attempt += 1
                self._check_progress(online, time.monotonic() - progress)
                time.sleep(min(1.0, self.settings.patience / 10))
        return self._result(reached, diverged)

    def _check_progress(self, online: dict[str, int], seconds: float) -> None:
        """Stop if no round can be counted."""
        round, settings = self.ledger.round, self.settings
        if self.members.stale >= set(online):
            raise CovaryError(
                f"All nodes have followed orders newer than this checkpoint's ({settings.checkpoint}, round {round}): "
                "it is an old copy, or another server is running. Use the newest checkpoint, or start a new run in "
                "another folder."
            )
        if seconds > settings.patience:
            raise CovaryError(
                f"No round could be finished for {settings.patience:g} s; the last was round {round}. The log above "
                "has what each node reported. If uploads were rejected for their numbers, eta_l is too large; if "
                "uploads were left out, see screen. The rounds that were counted are saved: when the cause is gone, "
                "start again with resume=true."
            )

    def _result(self, reached: bool, diverged: bool) -> Run:
        server, round = self.deployment.server, self.ledger.round
        if diverged:
            text = f"{self.algorithm} diverged in round {round + 1}. The last finite state is kept."
            warnings.warn(f"{text} Try a smaller eta_l.", DivergenceWarning, stacklevel=4)
        return Run(
            algorithm=self.algorithm,
            params=self.deployment.start.unravel(server.x),
            x=server.x,
            server=server,
            clients=None,  # on the clients' own disks
            history=columns(self.record.rows),
            reached=round if reached else None,
            diverged=round + 1 if diverged else None,
            buffers=self.deployment.start.tree(self.deployment.buffers),
        )

    def _finish(self, online: dict[str, int] | None) -> bool:
        """Measure the round just done, if that is due, and save it. True if the run has met its target."""

        def measure() -> dict[str, Any]:
            nodes = self.members.meet() if online is None else online
            return evaluate(self.deployment, self.members, nodes, self.on_server)

        return self.record.finish(measure)

    # One round

    def _round(self, online: dict[str, int]) -> bool:
        """One round, as far as it gets. False if its numbers are not finite."""
        this = self._begin(online)
        for number in range(self.ledger.exchanges_done + 1, len(this.exchanges) + 1):
            collected = self._collect(this, number, online)
            if len(collected.replies) < self._fewest(this):
                self._abandon(this, len(collected.replies))
                break
            exchange, weights = this.exchanges[number - 1], self.deployment.weights()
            arrays = merge(exchange, self.deployment.server, collected.replies, weights)
            if not all(np.isfinite(array).all() for array in arrays.values()):
                return False
            self._count(this, number, collected, arrays, online)
        self.members.settle_losses()
        return True

    def _begin(self, online: dict[str, int]) -> Round:
        """The next round, or the rest of one that an earlier server began."""
        ledger = self.ledger
        number = ledger.round + 1
        self.members.lost.clear()
        unvisited = [] if ledger.exchanges_done else self._unvisited(online)
        exchanges, steps = self._exchanges(bool(unvisited))
        row: dict[str, Any] = {"round": number, "epoch": ledger.epoch, "bytes_down": 0, "bytes_up": 0}
        if ledger.exchanges_done:
            cohort = [name for name in ledger.cohort if name in online]
            row |= ledger.partial
        else:
            cohort = self._cohort(number, online, unvisited)
            row |= {"asked": len(cohort), "left_out": 0, "uploads": []}
        return Round(number, exchanges, steps, bool(unvisited), cohort, row)

    def _exchanges(self, warm: bool) -> tuple[tuple[Exchange, ...], int | None]:
        """A round's exchanges, and K if the server can compute from it what option II does not send."""
        steps = {member.steps for member in self.ledger.members.values()}
        by_examples = self.settings.by_examples and len({m.size for m in self.ledger.members.values()}) > 1
        K = steps.pop() if len(steps) == 1 and not by_examples else None
        if warm:
            assert self.algorithm.warm_start is not None
            return (self.algorithm.warm_start,), K
        return self.algorithm.trips(K), K

    def _unvisited(self, online: dict[str, int]) -> list[str]:
        """Members that a warm start has still to visit."""
        if not self.settings.warm_start:
            return []
        left = [name for name in self.deployment.by_number(online) if name not in self.ledger.warm]
        return [name for name in left if self.unanswered[self.ledger.epoch, name] < VISITS]

    def _cohort(self, number: int, online: dict[str, int], unvisited: list[str]) -> list[str]:
        """Draw uniformly among the members online. If all are online, this is the simulation's draw."""
        s = self.settings
        S, N = s.clients_per_round, len(self.ledger.members)
        S = cohort_size(S if S is None or isinstance(S, float) else min(S, N), N)
        if s.min_replies > S and S < N and not self.algorithm.lockstep:
            fix = f"A round has {S} of {N} clients: raise clients_per_round."
            raise refused("min_replies", f"at most {S}", s.min_replies, fix)
        if unvisited:
            return unvisited[:S]
        names = self.deployment.by_number(online)
        key = draws.cohort_key(s.seed, number)
        if self.attempt:
            key = draws.fold_in(key, self.attempt)
        return [names[k] for k in draws.sample(key, len(names), min(S, len(names)))]

    # One exchange of a round

    def _collect(self, this: Round, number: int, online: dict[str, int]) -> Collected:
        """The uploads of an exchange that may be counted; the row gets the measurements of all of them."""
        task = self.deployment.task(this.number)._replace(trip=number, warm=this.warm, steps=this.steps)
        nodes = {name: online[name] for name in this.cohort}
        collected = collect(self.deployment, self.members, this.exchanges[number - 1], task, nodes)
        this.row["bytes_down"] += collected.bytes_down
        this.row["bytes_up"] += collected.bytes_up
        self._screen(this, number, collected)
        if this.warm:
            silent = set(this.cohort) - set(collected.replies) - self.members.lost
            self.unanswered.update((self.ledger.epoch, name) for name in silent)
        return collected

    def _screen(self, this: Round, number: int, collected: Collected) -> None:
        """Remove the uploads that are too large beside the others, and record the norms of all."""
        replies, bound = collected.replies, None if self.algorithm.lockstep else self.settings.screen
        earlier = self.record.uploads(self.ledger.epoch)
        left_out, records = screened(number, replies, self.ledger.members, self.deployment.buffers, earlier, bound)
        this.row["uploads"] = this.row["uploads"] + records
        this.row["left_out"] += len(left_out)
        for name, multiple in left_out.items():
            del replies[name]
            log.warning(
                "%s is left out: its upload has %.3g times the median norm, and screen is %g. If the node is honest, "
                "resume with a larger screen.",
                *(name, multiple, self.settings.screen),
            )

    def _fewest(self, this: Round) -> int:
        """The fewest replies with which an exchange counts."""
        if self.algorithm.lockstep:
            return len(self.ledger.members)
        return min(self.settings.min_replies, len(this.cohort)) if this.warm else self.settings.min_replies

    def _abandon(self, this: Round, replies: int) -> None:
        """Count nothing of an exchange; the round restarts from its first exchange."""
        asked = len(this.cohort)
        text = "Round %d: %d of %d nodes replied, which is too few. The round starts again."
        log.warning(text, this.number, replies, asked)
        if self.ledger.exchanges_done:
            self.ledger.count({}, self.ledger.arrays, exchanges_done=0, cohort=[])

    def _count(self, this: Round, number: int, collected: Collected, arrays: Arrays, online: dict[str, int]) -> None:
        """Count these uploads, on the disk, and with the last exchange the round."""
        ledger, replies = self.ledger, collected.replies
        this.drift += float(np.mean([reply.drift for reply in replies.values()]))
        this.cohort = list(replies)
        tokens = {name: reply.token for name, reply in replies.items()}
        if number < len(this.exchanges):
            ledger.count(tokens, arrays, exchanges_done=number, cohort=this.cohort, partial=this.row)
            return
        this.row |= {
            "drift": this.drift if math.isfinite(this.drift) else None,
            "cohort": sorted(ledger.members[name].number for name in this.cohort),
        }
        self.members.count_absences(online)
        visited = ledger.warm + (this.cohort if this.warm else [])
        ledger.count(tokens, arrays, round=this.number, exchanges_done=0, cohort=[], warm=visited, row=this.row)
