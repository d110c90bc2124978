"""Outsiders, hostile apps and restarts, with the processes of a deployment: a SuperLink, its gate and nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from helpers import HANGS, wait_until
from hostile import bundle, hostile

from covary.flower import outcome
from covary.flower.local import Federation, connection, make_certificates
from covary.flower.template import write_app

pytestmark = pytest.mark.nightly

NODES = ("node0", "node1")
RUN = {"eval-every": 0, "round-timeout": 60.0, "min-clients": 2}


def start_nodes(here: Federation) -> None:
    for number, name in enumerate(NODES):
        here.register(name)
        here.start_node(name, {"partition-id": number})
    for name in NODES:
        here.wait_for_node(name, HANGS)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    write_app(folder / "trial", with_torch=False)
    with Federation(folder / "here", [folder / "trial"]) as here:
        start_nodes(here)
        yield here


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "checkpoint"


def trained(here: Federation, checkpoint: Path, name: str, **config: object) -> None:
    """A run that is started now reaches its rounds."""
    here.run(here.apps[0], {**RUN, "checkpoint": str(checkpoint), "rounds": 1, **config}, name)
    here.wait(name, HANGS)
    assert outcome(checkpoint).reached, here.log(name)


def rounds_done(checkpoint: Path) -> int:
    return outcome(checkpoint).rounds_done if (checkpoint / "ledger").exists() else 0


def attempts(here: Federation, port: int, app: Path, run_id: int = 1) -> dict[str, str]:
    """What an outsider with ca.crt, a key and Flower's clients gets from a port."""
    private, public = generate_key_pairs()
    key, certificate = public_key_to_bytes(public), (here.folder / "ca.crt").read_bytes()
    where = (f"127.0.0.1:{port}", False, certificate)
    fab = fab_to_proto(Fab("", bundle(app), {}))
    with (
        ControlHttpClient.from_server_address(*where, []) as control,
        RuntimeHttpClient.from_server_address(*where, []) as runtime,
        FleetHttpClient.from_server_address(*where, [NodeAuthHttpInterceptor(private, public)]) as fleet,
    ):
        tried = {
            "register a node": lambda: control.RegisterNode(RegisterNodeRequest(public_key=key)),
            "list nodes": lambda: control.ListNodes(ListNodesRequest()),
            "list runs": lambda: control.ListRuns(ListRunsRequest()),
            "read a log": lambda: next(iter(control.StreamLogs(StreamLogsRequest(run_id=run_id)))),
            "start an app": lambda: control.StartRun(StartRunRequest(fab=fab)),
            "take a task": lambda: runtime.AcquireTask(AcquireTaskRequest(supported_task_types=list(TaskType))),
            "stop a run": lambda: control.StopRun(StopRunRequest(run_id=run_id)),
            "register itself": lambda: fleet.RegisterNode(RegisterNodeFleetRequest(public_key=key)),
            "take part": lambda: fleet.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30)),
            "be another node": lambda: fleet.PullMessages(PullMessagesRequest(node=FlowerNode(node_id=run_id))),
        }
        return {what: came_of(attempt) for what, attempt in tried.items()}


def came_of(attempt) -> str:
    try:
        attempt()
    except httpx.HTTPStatusError as error:
        at_gate = error.response.status_code == 404 and "nginx" in error.response.text
        return "not found" if at_gate else f"refused: {error.response.text}"
    return "done"


def test_an_outsider_with_the_ca_certificate_gets_nothing_during_training(here, checkpoint, tmp_path):
    app = hostile(tmp_path / "other-app", tmp_path / "mark")
    (app / "other_app" / "__init__.py").write_text("")  # the outsider's own flwr imports it
    here.run(here.apps[0], {**RUN, "rounds": 6, "checkpoint": str(checkpoint)}, "watched")
    here.wait_for("Successfully started run", "watched", HANGS)
    run_id = int(here.log("watched").split("Successfully started run ")[1].split()[0])
    wait_until(lambda: rounds_done(checkpoint) >= 1, "a round is done")

    told = attempts(here, here.gate_port, app, run_id)
    assert "Failed to activate SuperNode" in told.pop("take part")
    assert "Invalid SuperNode authentication" in told.pop("be another node")
    assert set(told.values()) == {"not found"}, told

    home = tmp_path / "stranger"
    home.mkdir()
    (home / "config.toml").write_text(connection("gate", here.gate_port, here.folder / "ca.crt"))
    for command in (
        ["supernode", "register", str(here.key("node0").with_suffix(".pub")), "gate"],
        *(["run", str(app), "gate"], ["list", "gate"], ["stop", str(run_id), "gate"], ["supernode", "list", "gate"]),
        ["log", str(run_id), "gate"],
    ):
        done = subprocess.run(
            [str(here.bin / "flwr"), *command],
            env={**here.environment, "FLWR_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=HANGS,
        )
        assert done.returncode, (command, done.stdout)

    here.wait("watched", HANGS)
    assert outcome(checkpoint).reached, here.log("watched")
    assert not (tmp_path / "mark").exists()
    assert "POST /v1/control/start-run" in (here.folder / "refused.log").read_text()


def test_without_the_gate_the_same_outsider_controls_the_federation(here, tmp_path):
    """Why there is a gate. When Flower authenticates its Control API, this test fails."""
    app = hostile(tmp_path / "other-app", tmp_path / "mark")
    told = attempts(here, here.port, app)
    for what in ("register a node", "list nodes", "list runs", "start an app", "take a task"):
        assert told[what] == "done", told
    assert not any(came == "not found" for came in told.values()), told


@pytest.mark.parametrize("kind", ["another app", "an app whose version is a path"])
def test_a_node_runs_no_app_that_is_not_approved(here, kind, checkpoint, tmp_path):
    mark = tmp_path / "mark"
    if kind == "another app":
        app = hostile(tmp_path / "other-app", mark)
    else:  # it is installed where the node may write, which the folder of apps does not stop
        app = hostile(tmp_path / "app", mark, name="", version=f"{12 * '/..'}{tmp_path}/installed/it")
    (package,) = {path.parent for path in app.glob("*/client.py")}
    (package / "__init__.py").write_text("")  # the server, which is the attacker's, imports it too
    (package / "server.py").write_text(SERVER)
    before = {name: len(here.log(name)) for name in NODES}
    if kind == "another app":
        here.run(app, {}, kind)
    else:
        start_unchecked(here, app)
    refused = "is not an app that this node's owner has approved"
    for name in NODES:
        wait_until(lambda name=name: refused in here.log(name)[before[name] :], f"{name} rejects the app")
    assert not mark.exists()
    assert (tmp_path / "installed").exists() == (kind != "another app")
    trained(here, checkpoint, f"after {kind}")


SERVER = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    content = RecordDict({"x": ConfigRecord({"a": 1})})
    grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()], timeout=60)
"""


def start_unchecked(here: Federation, app: Path) -> None:
    """As the operator of a hostile SuperLink: without `flwr run`, which rejects odd names."""
    where = (f"127.0.0.1:{here.port}", False, (here.folder / "ca.crt").read_bytes())
    with ControlHttpClient.from_server_address(*where, []) as control:
        control.StartRun(StartRunRequest(fab=fab_to_proto(Fab("", bundle(app), {}))))


def test_a_killed_superlink_comes_back_with_its_nodes(here, checkpoint):
    here.run(here.apps[0], {**RUN, "rounds": 30, "checkpoint": str(checkpoint)}, "cut off")
    wait_until(lambda: rounds_done(checkpoint) >= 1, "a round is done")
    here.kill("superlink")
    here.kill("cut off")
    wait_until(lambda: outcome(checkpoint).state == "killed", "the outcome says that the run was killed")
    for name in NODES:  # they wait, and print for what
        here.wait_for("The SuperLink behind it is down: the node waits for it", name, HANGS)
    here.start_link()
    trained(here, checkpoint, "gone on", resume=True, rounds=outcome(checkpoint).rounds_done + 1)
    assert all(here.processes[name].poll() is None for name in NODES)


def test_a_node_says_why_it_ends(here, checkpoint, tmp_path):
    # The gate is gone: the node waits, and prints for what.
    here.kill("gate")
    here.wait_for("Nothing listens at", "node0", HANGS)
    here.start_gate()

    # The gate has a certificate of another CA.
    here.kill("gate")
    kept = {name: (here.folder / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key")}
    make_certificates(tmp_path)
    for name in ("server.crt", "server.key"):
        (here.folder / name).write_bytes((tmp_path / name).read_bytes())
    here.start_gate()
    for name in NODES:
        assert here.wait(name, HANGS) == 1
        assert "cannot verify the certificate" in here.log(name).strip().split("\n")[-1]
    here.kill("gate")
    for name, content in kept.items():
        (here.folder / name).write_bytes(content)
    here.start_gate()

    # A key that was not registered, and one that the SuperLink has forgotten.
    for name in NODES:
        here.start_node(name, *here.nodes[name])
        here.wait_for_node(name, HANGS)
    here.kill("superlink")
    for path in here.folder.glob("superlink.db*"):
        path.unlink()
    here.start_link()
    for name in NODES:
        assert here.wait(name, HANGS) == 1
        assert "flwr supernode register" in here.log(name).strip().split("\n")[-1]
    here.start_node("node0", *here.nodes["node0"])
    assert here.wait("node0", HANGS) == 1
    assert "does not admit" in here.log("node0").strip().split("\n")[-1]

    # After SIGTERM it exits with 0.
    here.register("node0")
    here.start_node("node0", *here.nodes["node0"])
    here.wait_for_node("node0", HANGS)
    for how in (signal.SIGTERM, signal.SIGINT):
        told = len(here.log("node0"))
        os.kill(here.processes["node0"].pid, how)
        assert here.wait("node0", HANGS) == 0
        assert "covary node:" not in here.log("node0")[told:]
        here.start_node("node0", *here.nodes["node0"])
        here.wait_for_node("node0", HANGS)
