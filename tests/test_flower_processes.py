"""Deployment with real processes on loopback, TLS and keys: machines are killed, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers import HANGS, wait_until

from covary.flower import audit, outcome
from covary.flower.local import Federation, make_certificates, make_key
from covary.flower.template import write_app
from covary.runs.files import File

pytestmark = pytest.mark.nightly

NODES = ("node0", "node1", "node2")
RUN = {"eval-every": 0, "round-timeout": 60.0, "min-replies": 2}  # so that both others count without node1


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    write_app(folder / "trial", with_torch=False)
    with Federation(folder / "here", [folder / "trial"]) as here:
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


def test_killed_nodes_a_killed_server_and_a_deleted_disk(federation):
    here, app = federation, federation.folder.parent / "trial"
    checkpoint = here.folder.parent / "checkpoint"

    def seq(name: str) -> int:
        """The last order whose outcome is on a node's disk."""
        found = [File(path).read() for path in here.state(name).glob("*/journal")]
        return found[0][1]["seq"] if found and found[0] else -1

    # Not admitted: a node whose key is not registered, and one that does not trust the SuperLink's certificate.
    make_key(here.key("stranger"))
    here.start_node("stranger", {"partition-id": 0})
    other = here.folder / "other"
    other.mkdir()
    make_certificates(other)
    here.register("doubter")
    here.start_node("doubter", {"partition-id": 0}, ca=other / "ca.crt")

    # SIGKILL of a node when its new state is on its disk, about when its reply is sent.
    here.run(app, {**RUN, "rounds": 9, "checkpoint": str(checkpoint)})
    wait_until(lambda: seq("node1") >= 0, "node1 has followed an order")
    here.kill("node1")
    wait_until(lambda: rounds_done(checkpoint) >= 1, "a round is done without node1")

    # SIGKILL of a node in the middle of its work, and of the server in the middle of a round.
    first = seq("node0")
    wait_until(lambda: here.log("node2").count("Receiving: train") >= 2, "node2 has a second order")
    here.kill("node2")
    wait_until(lambda: seq("node0") > first, "node0 has followed another order")
    os.kill(int((checkpoint / "lock").read_text()), signal.SIGKILL)
    here.kill("run")
    before = audited(here, checkpoint)
    assert (before.epoch, before.members) == (0, 3)
    assert before.round >= 1

    for name, told in (("stranger", "does not admit"), ("doubter", "cannot verify the certificate")):
        assert here.wait(name, HANGS) != 0
        assert told in here.log(name)
        assert not list(here.state(name).glob("*/journal"))
    assert "No SuperNode found with the given public key" in here.log("superlink")

    # All come back, one without its disk: that is detected, a new epoch starts, and c is the mean again.
    for job in here.state("node0").glob("*/journal"):  # its approved apps stay: a new disk gets them at the next start
        shutil.rmtree(job.parent)
    for number, name in enumerate(NODES[1:], start=1):
        here.start_node(name, {"partition-id": number})
    for name in NODES[1:]:
        here.wait_for_node(name, HANGS)
    last = before.round + 3
    everyone = {"min-replies": 3}  # however late one of them replies
    here.run(app, {**RUN, **everyone, "rounds": last, "resume": True, "checkpoint": str(checkpoint)}, "resumed")
    here.wait("resumed", HANGS)
    assert outcome(checkpoint).reached, here.log("resumed")
    assert "Epoch 1 begins" in here.log("resumed")
    after = audited(here, checkpoint)
    assert (after.round, after.epoch, after.members, after.missing) == (last, 1, 3, ())
    assert len(after.norms) == 3, here.log("resumed")
