"""The protocol alone: whatever is lost, late or duplicated, and whatever dies, c = mean(c_i) and x counts the same."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import covary as cv
from covary.algorithms.common import Change
from covary.algorithms.scaffold import Up
from covary.client import client_loop
from covary.errors import CovaryError
from covary.flower import merge as honest
from covary.flower.journal import ClientJournal, Ledger, Member, Order
from covary.flower.merge import Reply, merge
from covary.flower.refusals import NotFinite, Refused, SharedState, Stale, StateLost

D, K, ALGORITHM = 2, 2, cv.scaffold(eta_l=0.1, option="I")
(TRIP,) = ALGORITHM.exchanges


class Crash(Exception):
    """The machine dies at this moment."""


class MemoryDisk:
    """A disk that keeps what was written, on a machine that may die just before or just after."""

    def __init__(self) -> None:
        self.content: Any = None
        self.die: str | None = None

    def read(self) -> Any:
        return copy.deepcopy(self.content)

    def write(self, arrays: Any, facts: Any) -> None:
        die, self.die = self.die, None
        if die == "before":
            raise Crash
        self.content = copy.deepcopy((dict(arrays), dict(facts)))
        if die == "after":
            raise Crash


class Instruction(NamedTuple):
    order: Order
    down: Any


class Answer(NamedTuple):
    name: str
    reply: Reply | None  # None: the client says that its state is lost
    token: str


class World:
    """Clients with quadratics, a server and a network between them, moved by a list of choices."""

    def __init__(self, choices: list[int]):
        self.choices = iter(())  # no fault while the first clients join
        self.rng = np.random.default_rng(1)
        self.curvature: dict[str, np.ndarray] = {}
        self.offset: dict[str, np.ndarray] = {}
        self.disks: dict[str, MemoryDisk] = {}
        self.old_disks: dict[str, Any] = {}
        self.instructions: list[tuple[str, Instruction]] = []
        self.answers: list[Answer] = []
        self.ledger_disk = MemoryDisk()
        x = np.ones(D)
        self.ledger: Ledger | None = Ledger.create(self.ledger_disk, arrays_of(ALGORITHM.init_server(x)), {})
        self.orders: dict[str, Order] = {}
        self.accepted: dict[str, Reply] = {}
        self.lost: set[str] = set()
        self.x = x  # what a run without faults over the counted uploads has
        self.faults = self.left = 0
        for _ in range(3):
            self.join()
        self.choices = iter(choices)

    def choose(self, count: int) -> int:
        return next(self.choices, 0) % count

    # What can happen

    def join(self) -> None:
        if self.ledger is None or len(self.disks) >= 6:
            return
        name = f"client {len(self.disks)}"
        self.curvature[name], self.offset[name] = self.rng.uniform(0.5, 2, D), self.rng.normal(size=D)
        self.disks[name] = MemoryDisk()
        ledger = self.ledger
        old, new = len(ledger.members), len(ledger.members) + 1
        arrays = ledger.arrays | {"server.c": ledger.arrays["server.c"] * (old / new)}
        self.accepted.clear()
        self.orders.clear()
        self.guarded(lambda: ledger.join({name: Member(old, 1, K)}, arrays), self.ledger_disk)

    def leave(self) -> None:
        if self.ledger is not None and len(self.ledger.members) > 1:
            name = list(self.ledger.members)[self.choose(len(self.ledger.members))]
            self.reset((name,))

    def ask(self) -> None:
        """A new round: orders to some of the members. Uploads that were not counted until now never will be."""
        if self.ledger is None:
            return
        self.orders, self.accepted, self.lost = {}, {}, set()
        skip = self.choose(len(self.ledger.members) + 1)
        down = TRIP.broadcast(self.server)
        for k, name in enumerate(self.ledger.members):
            if k + 1 != skip:
                self.orders[name] = self.ledger.order(name)
                self.instructions.append((name, Instruction(self.orders[name], copy.deepcopy(down))))

    def deliver(self) -> None:
        """A request arrives, in any sequence, perhaps once more later; the client may die at any step."""
        if not self.instructions:
            return
        at = self.choose(len(self.instructions))
        name, instruction = self.instructions[at]
        if self.choose(4) != 1:
            self.instructions.pop(at)
        disk = self.disks[name]
        disk.die = (None, None, None, "before", "after")[self.choose(5)]
        try:
            answer = self.work(name, instruction, disk)
        except (Crash, Refused):
            return
        finally:
            disk.die = None
        self.answers.append(answer)

    def work(self, name: str, instruction: Instruction, disk: MemoryDisk) -> Answer:
        order, down = instruction
        book = ClientJournal(disk)
        try:
            state = book.begin(order, lambda: {"c_i": np.zeros(D)})
        except StateLost:
            return Answer(name, None, order.token)
        client = type(ALGORITHM.init_client(down.x))(**state)

        def grad(y: Any) -> Any:
            return self.curvature[name] * y + self.offset[name]

        up, new, _ = client_loop(TRIP, down, client, grad, [grad] * K)
        book.prepare(order, new._asdict())
        return Answer(name, Reply(order.token, up, {}, 0.0), order.token)

    def receive(self) -> None:
        """A reply arrives, perhaps twice, perhaps much too late."""
        if not self.answers or self.ledger is None:
            return
        at = self.choose(len(self.answers))
        answer = self.answers[at]
        if self.choose(4) != 1:
            self.answers.pop(at)
        order = self.orders.get(answer.name)
        if order is None or order.token != answer.token:
            return  # not given in this round
        if answer.reply is None:
            self.lost.add(answer.name)
        else:
            self.accepted[answer.name] = answer.reply

    def close(self) -> None:
        """The server counts what it has; it may die just before or after it has saved this."""
        ledger = self.ledger
        if ledger is None:
            return
        accepted = {name: reply for name, reply in self.accepted.items() if name in ledger.members}
        lost, self.lost, self.accepted, self.orders = self.lost, set(), {}, {}
        if accepted:
            arrays = merge(TRIP, self.server, accepted, ledger.weights(False))
            tokens = {name: reply.token for name, reply in accepted.items()}
            written = self.guarded(lambda: ledger.count(tokens, arrays, round=ledger.round + 1), self.ledger_disk)
            if written:
                self.x = self.x + np.mean([reply.up.dy for reply in accepted.values()], axis=0)
        if lost and self.ledger is not None:
            self.reset()

    def reset(self, leaving: tuple[str, ...] = ()) -> None:
        ledger = self.ledger
        assert ledger is not None
        self.accepted.clear()
        self.orders.clear()
        arrays = ledger.arrays | arrays_of(ALGORITHM.init_server(self.server.x))
        self.left += self.guarded(lambda: ledger.reset(arrays, leaving), self.ledger_disk) and bool(leaving)

    def lose(self) -> None:
        for queue in (self.instructions, self.answers):
            if queue and self.choose(2):
                queue.pop(self.choose(len(queue)))

    def crash(self) -> None:
        self.ledger = None

    def resume(self) -> None:
        self.accepted, self.orders, self.lost = {}, {}, set()
        while True:
            self.ledger_disk.die = (None, None, None, "before", "after")[self.choose(5)]
            try:
                self.ledger = Ledger.resume(self.ledger_disk)
                return
            except Crash:
                continue

    def destroy(self) -> None:
        """A client's disk is lost, or comes back from an old backup."""
        if self.faults >= 2:
            return
        names = list(self.disks)
        name = names[self.choose(len(names))]
        kind = self.choose(3)
        if kind == 0:
            self.old_disks[name] = copy.deepcopy(self.disks[name].content)
        elif kind == 1 and name in self.old_disks:
            self.disks[name].content = copy.deepcopy(self.old_disks[name])
            self.faults += 1
        elif kind == 2:
            self.disks[name].content = None
            self.faults += 1

    def guarded(self, write: Callable[[], None], disk: MemoryDisk) -> bool:
        """Let the server write, and perhaps die while writing; True if the disk has what it wrote."""
        die = disk.die = (None, None, None, "before", "after")[self.choose(5)]
        try:
            write()
        except Crash:
            self.ledger = None
        return die != "before"

    # The end

    @property
    def server(self) -> Any:
        assert self.ledger is not None
        return type(ALGORITHM.init_server(np.ones(D)))(*(self.ledger.arrays[f"server.{n}"] for n in ("x", "c")))

    def play(self) -> None:
        actions = (
            self.ask,
            self.deliver,
            self.deliver,
            self.deliver,
            self.receive,
            self.receive,
            self.receive,
            self.close,
            self.close,
            self.lose,
            self.crash,
            self.resume,
            self.destroy,
            self.join,
            self.leave,
        )
        for choice in self.choices:
            actions[choice % len(actions)]()
        self.drain()

    def drain(self) -> None:
        """All machines up, every message delivered: three whole rounds, after which every loss is known."""
        self.resume()
        for _ in range(3):
            self.ask()
            while self.instructions:
                self.deliver()
            while self.answers:
                self.receive()
            self.close()

    def check(self) -> None:
        assert self.ledger is not None
        states = []
        for name, member in self.ledger.members.items():
            state = ClientJournal(self.disks[name]).state(self.ledger.epoch, member.counted)
            states.append(np.zeros(D) if state is None else state["c_i"])
        np.testing.assert_allclose(self.server.c, np.mean(states, axis=0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(self.server.x, self.x, rtol=0, atol=1e-12)
        if not self.faults:
            assert self.ledger.epoch == self.left, "controls were given up though every disk was whole"


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    return {f"server.{name}": value for name, value in state._asdict().items()}


# Each rule by itself


START, ONE, TWO = {"c_i": np.zeros(D)}, {"c_i": np.array([3.0, 4.0])}, {"c_i": np.ones(D)}


def order(seq: int, token: str = "", counted: str = "", epoch: int = 0, member: str = "a") -> Order:
    return Order("job", epoch, seq, token, counted, member)


def journal_of_two_uploads() -> ClientJournal:
    """The first is counted and committed, the second is pending."""
    journal = ClientJournal(MemoryDisk())
    for seq, counted, state in ((0, "", ONE), (1, "token 0", TWO)):
        given = order(seq, f"token {seq}", counted)
        journal.begin(given, lambda: START)
        journal.prepare(given, state)
    return journal


def known(journal: ClientJournal) -> tuple[Any, ...]:
    return journal.seq, journal.epoch, journal.token, journal.pending_token, journal.owner, journal.scale


def test_a_journal_is_on_the_disk_as_it_is_in_memory():
    journal = journal_of_two_uploads()
    arrays, facts = journal.disk.read()
    assert facts == {
        "format": 1,
        "seq": 1,
        "epoch": 0,
        "committed": "token 0",
        "pending": "token 1",
        "scale": 5.0,  # of the state that is committed
        "owner": "a",
    }
    np.testing.assert_equal(arrays, {"committed.c_i": ONE["c_i"], "pending.c_i": TWO["c_i"]})
    for same in (journal, ClientJournal(journal.disk)):
        assert known(same) == (1, 0, "token 0", "token 1", "a", 5.0)
        np.testing.assert_equal(same.state(0, "token 0"), ONE)
        np.testing.assert_equal(same.state(0, "token 1"), TWO)
        assert same.state(0, "") is same.state(1, "") is None
        for epoch, counted in ((0, "token 2"), (1, "token 0"), (1, "token 1")):
            with pytest.raises(StateLost):
                same.state(epoch, counted)


def test_a_new_journal_is_older_than_every_order():
    journal = ClientJournal(MemoryDisk())
    assert known(journal) == (-1, -1, "", "", "", 0.0)
    with pytest.raises(StateLost, match=r"token 9.*\(none\)") as lost:
        journal.begin(order(0, counted="token 9"), lambda: START)
    assert lost.value.facts == {"epoch": -1}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (order(1, counted="token 1"), Stale, "1"),
        (order(0, counted="token 1"), Stale, "0"),
        (order(2, epoch=-1), StateLost, "-1"),
        (order(2, counted="token 9"), StateLost, "token 9.*token 0"),
        (order(2), StateLost, r"\(none\).*token 0"),
        (order(2, counted="token 1", epoch=1), StateLost, "token 1"),
        (order(2, counted="token 1", member="b"), SharedState, "a.*b"),
    ],
)
def test_an_order_that_cannot_be_followed_is_rejected_and_changes_nothing(given, error, said):
    journal = ClientJournal(journal_of_two_uploads().disk)
    before = known(journal)
    with pytest.raises(error, match=said) as refused:
        journal.begin(given, lambda: START)
    assert error is not StateLost or refused.value.facts == {"epoch": 0}
    assert known(journal)[:5] == before[:5]  # all but the scale


def test_an_order_settles_what_is_pending():
    for following, state, scale in (
        (order(2, "token 2", "token 1"), TWO, 5.0),
        (order(2, "token 2", "token 0"), ONE, 5.0),
        (order(2, "token 2", epoch=1), START, 0.0),
        (order(2, "token 2", "token 1", member="node-7"), TWO, 5.0),  # a name that is new after every restart
    ):
        journal = ClientJournal(journal_of_two_uploads().disk)
        np.testing.assert_equal(journal.begin(following, lambda: START), state)
        journal.prepare(following, ONE)
        for same in (journal, ClientJournal(journal.disk)):
            assert known(same) == (2, following.epoch, following.counted, "token 2", following.member, scale)
            np.testing.assert_equal([same.committed, same.pending], [state, ONE])


def test_a_state_that_is_not_finite_is_neither_kept_nor_sent():
    journal = journal_of_two_uploads()
    kept = journal.disk.read()
    with pytest.raises(NotFinite):
        journal.prepare(order(2, "token 2", "token 1"), {"c_i": np.ones(D), "h_i": np.array([0.0, np.inf])})
    np.testing.assert_equal(journal.disk.read(), kept)


def on_disk(ledger: Ledger) -> dict[str, Any]:
    """The ledger's facts, after a check that the disk has the same."""
    arrays, facts = ledger.disk.read()
    np.testing.assert_equal(arrays, ledger.arrays)
    renamed = {"format": 1, "trip": ledger.exchanges_done}
    assert facts == {name: getattr(ledger, name) for name in facts if name not in renamed} | renamed
    return facts


def ledger_of_two() -> Ledger:
    ledger = Ledger.create(MemoryDisk(), {"server.x": np.ones(D)}, {"weights": "uniform"})
    ledger.join({"a": Member(0, 12, 3), "b": Member(1, 4, 2)}, ledger.arrays)
    ledger.count(
        {"a": "token"},
        {"server.x": np.zeros(D)},
        round=7,
        exchanges_done=1,
        cohort=["a"],
        warm=["b"],
        row={"loss": 1.0},
    )
    return ledger


def test_a_ledger_is_on_the_disk_as_it_is_in_memory():
    before = int(1000 * time.time())
    ledger = Ledger.create(MemoryDisk(), {"server.x": np.ones(D)}, {"weights": "uniform"})
    assert before <= ledger.fence <= 1000 * time.time()
    facts = {"job": ledger.job, "fence": ledger.fence, "epoch": 0, "round": 0, "trip": 0, "cohort": [], "warm": []}
    facts |= {"members": {}, "settings": {"weights": "uniform"}, "partial": {}, "row": {}, "format": 1}
    assert on_disk(ledger) == facts
    ledger = ledger_of_two()
    facts |= {"job": ledger.job, "fence": ledger.fence, "round": 7, "trip": 1, "cohort": ["a"], "warm": ["b"]}
    facts |= {"members": {"a": (0, 12, 3, "token", 0), "b": (1, 4, 2, "", 0)}, "row": {"loss": 1.0}}
    assert on_disk(ledger) == facts
    ledger.partial = {"drift": 2.0}
    ledger.write()
    resumed = Ledger.resume(ledger.disk)
    assert resumed.fence > ledger.fence
    assert on_disk(resumed) == facts | {"fence": resumed.fence, "partial": {"drift": 2.0}}


def test_orders_rise_with_every_server_though_a_clock_is_wrong():
    ledger = ledger_of_two()
    first, second = ledger.order("a"), ledger.order("b")
    assert first == Order(ledger.job, 0, ledger.fence * 2**20 + 1, first.token, "token", "a")
    assert second == Order(ledger.job, 0, ledger.fence * 2**20 + 2, second.token, "", "b")
    assert first.token != second.token
    ledger.fence = 10**15  # far in the future
    ledger.write()
    assert Ledger.resume(ledger.disk).fence == 10**15 + 1


def test_a_new_epoch_is_later_than_all_known_ones():
    ledger, arrays = ledger_of_two(), {"server.x": np.full(D, 2.0)}
    ledger.reset(arrays)
    assert ledger.epoch == 1
    ledger.count({"b": "token"}, arrays, exchanges_done=1, cohort=["a"], warm=["b"])
    ledger.reset(arrays, leaving=("a",), after=5)
    facts = on_disk(ledger)
    assert facts["members"] == {"b": Member(0, 4, 2)}
    assert (facts["epoch"], facts["trip"], facts["cohort"], facts["warm"]) == (6, 0, [], [])


def test_a_join_keeps_what_was_counted_of_the_others_unless_an_epoch_starts():
    newcomer, arrays = {"c": Member(2, 5, 1)}, {"server.x": np.full(D, 2.0)}
    for new_epoch in (False, True):
        ledger = ledger_of_two()
        ledger.join(newcomer, arrays, **({"new_epoch": True} if new_epoch else {}))
        facts = on_disk(ledger)
        assert facts["epoch"] == int(new_epoch)
        assert facts["members"]["a"].counted == ("" if new_epoch else "token")
        assert facts["members"]["c"] == Member(2, 5, 1)
        assert ledger.arrays is arrays


def test_a_journal_of_another_format_is_rejected():
    for disk, read in ((journal_of_two_uploads().disk, ClientJournal), (ledger_of_two().disk, Ledger.resume)):
        arrays, facts = disk.read()
        disk.write(arrays, facts | {"format": 2})
        with pytest.raises(CovaryError, match="format 2"):
            read(disk)
    with pytest.raises(CovaryError, match="no checkpoint"):
        Ledger.resume(MemoryDisk())


@pytest.mark.parametrize(
    ("algorithm", "kind", "weights"),
    [
        (cv.fedavg(0.1), Change, (0.75, 0.3)),  # N / |S| times p_i
        (cv.scaffold(0.1, option="I"), Up, (0.75, 0.3)),
        (cv.mime(0.1), Change, (0.75 / 1.05, 0.3 / 1.05)),  # all follow one direction: these sum to one
    ],
    ids=str,
)
def test_a_merge_is_the_weighted_mean_of_those_that_replied(algorithm, kind, weights):
    exchange, rng = algorithm.exchanges[-1], np.random.default_rng(0)
    server = algorithm.init_server(np.ones(D, np.float32))
    ups = {name: kind(*rng.normal(size=(len(kind._fields), D)).astype(np.float32)) for name in "ac"}
    replies = {name: Reply("token", up, {"mean": up.dy}, 0.0) for name, up in ups.items()}
    merged = merge(exchange, server, replies, {"a": 0.5, "b": 0.3, "c": 0.2})
    mean = kind(*(weights[0] * a + weights[1] * c for a, c in zip(ups["a"], ups["c"], strict=True)))
    expected = arrays_of(exchange.aggregate(server, mean, 2 / 3))
    expected["buffers.mean"] = (0.75 * ups["a"].dy + 0.3 * ups["c"].dy) / 1.05
    assert merged.keys() == expected.keys()
    for name, array in merged.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected[name], rtol=1e-5)


# All of them together


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.integers(0, 59), max_size=120))
def test_any_schedule_of_faults_leaves_c_the_mean_of_its_clients(choices):
    world = World(choices)
    world.play()
    world.check()


def committed_at_once(self, order, start):
    """A client that commits its new state before the server has counted it, as other SCAFFOLD implementations do."""
    state = ClientJournal.__dict__["honest_begin"](self, order, start)
    return self.pending or state


def without_epochs(self, arrays, leaving=()):
    for name in leaving:
        del self.members[name]
    self.arrays = arrays
    self.write()


def forgetting_tokens(self, tokens, arrays, **position):
    Ledger.__dict__["honest_count"](self, {}, arrays, **position)


def writing_late(self, tokens, arrays, **position):
    """A server that continues before its disk has the round."""
    disk, self.disk = self.disk, MemoryDisk()
    Ledger.__dict__["honest_count"](self, tokens, arrays, **position)
    self.disk = disk


def never_stale(self, order, start):
    self.seq = -1
    return ClientJournal.__dict__["honest_begin"](self, order, start)


def over_all_asked(exchange, replied_to, replies, p):
    """A server that takes the fraction of all members, though only some replied."""
    new = honest.merge(exchange, replied_to, replies, p)
    mean = np.mean([reply.up.dc for reply in replies.values()], axis=0)
    return new | {"server.c": replied_to.c + mean}


BROKEN = {
    "stale orders are followed": (ClientJournal, "begin", never_stale),
    "a client commits before it is counted": (ClientJournal, "begin", committed_at_once),
    "a reset without a new epoch": (Ledger, "reset", without_epochs),
    "counted tokens are not written down": (Ledger, "count", forgetting_tokens),
    "the server goes on before its disk has the round": (Ledger, "count", writing_late),
    "the fraction is not of those that replied": (None, "merge", over_all_asked),
}


@pytest.mark.parametrize("how", BROKEN)
def test_the_schedules_find_a_protocol_that_is_broken_on_purpose(how, monkeypatch):
    owner, name, broken = BROKEN[how]
    if owner is None:
        monkeypatch.setitem(globals(), name, broken)
    else:
        monkeypatch.setattr(owner, f"honest_{name}", getattr(owner, name), raising=False)
        monkeypatch.setattr(owner, name, broken)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        world = World(rng.integers(0, 60, 80).tolist())
        try:
            world.play()
            world.check()
        except (AssertionError, StateLost):
            return
    pytest.fail(f"{how}: 3,000 schedules did not notice")
