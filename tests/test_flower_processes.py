"""Deployment with real processes on loopback, TLS and keys: machines are killed, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from covary.durable import File
from covary.flower import audit
from covary.flower.local import Federation, make_certificates, make_key
from covary.flower.template import write_app

NODES = ("node0", "node1", "node2")
RUN = {"local-steps": 3, "batch-size": 16, "eval-every": 0, "round-timeout": 40.0, "patience": 120.0}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    write_app(folder / "trial", with_torch=False)
    with Federation(folder / "here") as here:
        for number, name in enumerate(NODES):
            here.register(name)
            here.start_node(name, {"partition-id": number})
        yield here


def audited(here: Federation, checkpoint: Path):
    found = audit(checkpoint, [here.state(name) for name in NODES])
    assert found.holds, found
    assert found.gap < 1e-6  # float32
    return found


def rounds_done(checkpoint: Path) -> int:
    found = File(checkpoint / "ledger").read()
    return 0 if found is None else found[1]["round"]


def wait_until(what, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_killed_nodes_a_killed_server_and_a_deleted_disk(federation):
    here, app = federation, federation.folder.parent / "trial"
    checkpoint = here.folder.parent / "checkpoint"
    journal = {name: (lambda name=name: list(here.state(name).glob("*/journal"))) for name in NODES}

    # Not let in: a node whose key nobody registered, and one that does not trust the SuperLink's certificate.
    make_key(here.key("stranger"))
    here.start_node("stranger", {"partition-id": 0})
    other = here.folder / "other"
    other.mkdir()
    make_certificates(other)
    here.register("doubter")
    here.start_node("doubter", {"partition-id": 0}, ca=other / "ca.crt")

    here.run(app, {**RUN, "rounds": 3, "min-replies": 2, "checkpoint": str(checkpoint)})
    # SIGKILL a node as soon as its new state is on its disk: after its work, about when its reply is sent.
    wait_until(lambda: journal["node1"]())
    here.kill("node1")
    wait_until(lambda: rounds_done(checkpoint) >= 1)
    here.start_node("node1", {"partition-id": 1})
    assert here.wait() == 0, here.log("run")
    found = audited(here, checkpoint)
    assert (found.round, found.epoch, found.members) == (3, 0, 3)

    for name in ("stranger", "doubter"):
        assert not here.state(name).exists()
        here.kill(name)
    assert re.search(r"(?i)certificate", here.log("doubter"))

    # SIGKILL the server app in the middle of a round, and a node in the middle of its work; then go on.
    here.run(app, {**RUN, "rounds": 5, "resume": True, "checkpoint": str(checkpoint)}, "second")
    wait_until(lambda: "Resumed" in here.log("second"))
    old = File(journal["node0"]()[0]).read()[1]["seq"]
    wait_until(lambda: File(journal["node0"]()[0]).read()[1]["seq"] > old)
    os.kill(int((checkpoint / "lock").read_text()), signal.SIGKILL)
    here.kill("node2")
    here.kill("second")
    here.start_node("node2", {"partition-id": 2})
    assert audited(here, checkpoint).round >= 3

    # A deleted disk is noticed, a new epoch begins, and c is the mean again.
    shutil.rmtree(here.state("node0"))
    here.run(app, {**RUN, "rounds": 6, "resume": True, "checkpoint": str(checkpoint)}, "third")
    assert here.wait("third") == 0, here.log("third")
    assert "Epoch 1 begins" in here.log("third")
    found = audited(here, checkpoint)
    assert (found.round, found.epoch, found.members, found.missing) == (6, 1, 3, ())
