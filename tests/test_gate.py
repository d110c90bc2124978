"""The gate in front of a SuperLink, the checks of `covary node` at its start, and the apps that may run there."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.client
import http.server
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import HANGS, wait_until
from hostile import bundle, hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covary.errors import CovaryError
from covary.flower.local import free_port, make_certificates, make_key, nginx
from covary.flower.node import (
    Node,
    _environment,
    approve,
    check_gate,
    check_key,
    check_port,
    compare_clocks,
    node_config,
    why_ended,
)
from covary.flower.template import gate, write_app

FLEET = ["activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run"]
FLEET = [f"/v1/fleet/{name}" for name in [*FLEET, "get-fab", "push-object", "pull-object", "confirm-message-received"]]


class Server:
    """A small TLS server; `answer(method, path)` gives the status and the headers."""

    def __init__(self, folder: Path, answer=lambda method, path: (200, {}), tls: bool = True):
        self.seen: list[tuple[str, str, bytes, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.seen.append((self.command, self.path, body, self.headers.get("X-Forwarded-For", "")))
                status, headers = answer(self.command, self.path)
                self.send_response_only(status)
                for name, value in {"Date": self.date_time_string(), **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_OPTIONS = do_PATCH = reply

            def send_error(self, *arguments):  # data that is no request came through as well
                outer.seen.append(("", self.requestline, b"", ""))
                super().send_error(*arguments)

            def log_message(self, format, *arguments):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda request, address: None  # type: ignore[method-assign]
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self.http.server_address[1]
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    make_certificates(folder)
    return folder


# --- the gate -----------------------------------------------------------------------------------------------------


class Gate:
    def __init__(self, folder: Path, port: int, superlink: Server):
        self.folder, self.port, self.superlink = folder, port, superlink

    def send(self, request: bytes) -> int:
        """The status of a request, byte for byte as it is given; 0 if the gate hangs up."""
        trusted = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        plain = socket.create_connection(("127.0.0.1", self.port), HANGS)
        with plain, trusted.wrap_socket(plain, server_hostname="localhost") as line:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
                line.sendall(request)  # a request that is rejected before all of it was sent has an answer, too
            self.answer = http.client.HTTPResponse(line, method=request.split(b" ")[0].decode())
            try:
                self.answer.begin()
                self.body = self.answer.read()
            except (http.client.HTTPException, OSError):
                return 0
            return self.answer.status

    def post(self, path: str, body: bytes = b"", method: str = "POST", headers: str = "") -> int:
        head = f"{method} {path} HTTP/1.1\r\nHost: gate\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        return self.send(head.encode("latin-1") + body)


def start_gate(folder: Path, superlink: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    (folder / "nginx.conf").write_text(gate(f"127.0.0.1:{port}", superlink, ".", ".", "refused.log"))
    command = [nginx(), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr", "-g", "daemon off;"]
    with (folder / "errors").open("wb") as errors:
        running = subprocess.Popen(command, stderr=errors)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, f"nginx listens; {folder / 'errors'} has what it says", running)
    return running, port


@pytest.fixture(scope="module")
def gated(folder):
    try:
        nginx()
    except CovaryError as error:
        pytest.skip(str(error))
    with Server(folder) as superlink:
        running, port = start_gate(folder, superlink.address)
        yield Gate(folder, port, superlink)
        running.terminate()
        running.wait(HANGS)


@pytest.mark.parametrize("path", FLEET)
def test_what_a_registered_node_needs_passes_whole(gated, path):
    body = os.urandom(6 * 2**20)  # a piece of Flower's has 5 MiB
    gated.superlink.seen.clear()
    assert gated.post(path, body, headers="X-Forwarded-For: 10.0.0.1\r\n") == 200
    assert gated.body == body
    assert gated.superlink.seen == [("POST", path, body, "127.0.0.1")]


def refused_by(gated: Gate, status: int) -> None:
    assert status in (0, 400, 404, 405), status  # Flower's clients treat 401 and 403 in their own way
    assert gated.superlink.seen == []


def test_every_other_path_of_a_superlink_is_not_found(gated):
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    paths = [path for _, path in PROTOBUF_REQUEST_TYPES]
    assert set(FLEET) < set(paths)
    assert sum(path.startswith("/v1/control/") for path in paths) > 20
    gated.superlink.seen.clear()
    for path in {*paths, "/", "/docs", "/openapi.json", "/v1/responses", "/v1/fleet/"} - set(FLEET):
        for method in ("POST", "GET"):
            assert gated.post(path, method=method) == 404, path
    refused_by(gated, 404)


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "post", "X"]
)
def test_nothing_but_post_passes(gated, method):
    gated.superlink.seen.clear()
    refused_by(gated, gated.post("/v1/fleet/get-run", method=method))


START = "/v1/control/start-run"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/get-run/../../control/start-run",
        "/v1/fleet/get-run/%2e%2e/%2e%2e/control/start-run",
        "/v1/fleet/get-run%2f..%2f..%2fcontrol%2fstart-run",
        "/v1/fleet/get-run%252f..%252f..%252fcontrol%252fstart-run",
        "/v1/fleet/get-run;/../../control/start-run",
        "/v1/fleet/get-run;x=/v1/control/start-run",
        "/v1/fleet/get-run\\..\\..\\control\\start-run",
        "/v1/fleet/get-run%00/v1/control/start-run",
        "/v1/fleet/get-run%0a",
        "/v1/fleet/get-run%0d%0a%0d%0aPOST%20/v1/control/start-run",
        "/v1/fleet/get-run%20HTTP/1.1%0d%0aHost:%20x%0d%0a",
        "/v1/fleet/get-run/",
        "/V1/FLEET/GET-RUN",
        "/v1/fleet/register-node",
        f"{START}/v1/fleet/get-run",
        f"//localhost{START}",
        f"https://localhost{START}",
        f"/v1/fleet/../..{START}",
        f"{START}?/v1/fleet/get-run",
        f"{START}#/v1/fleet/get-run",
    ],
)
def test_tricks_with_the_path_reach_nothing(gated, path):
    gated.superlink.seen.clear()
    refused_by(gated, gated.post(path))


PIECES = ["/", "//", "/./", "/../", "%2f", "%2e%2e", "%2e", ";", "?", "#", "%0a", "%0d%0a", "%00", "%25", "\\", "%5c"]
WORDS = ["v1", "fleet", "control", "runtime", "get-run", "start-run", "register-node", "FLEET", "%66leet", "get%2drun"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*PIECES, *WORDS]), max_size=12))
def test_whatever_the_path_the_superlink_sees_a_fleet_method_in_plain_letters_or_nothing(gated, pieces):
    gated.superlink.seen.clear()
    gated.post("/v1/fleet/get-run".join(["", "".join(pieces)]) if len(pieces) % 2 else "/" + "".join(pieces))
    assert all(method == "POST" and path in FLEET for method, path, *_ in gated.superlink.seen)


def test_a_query_does_not_pass(gated):
    gated.superlink.seen.clear()
    assert gated.post("/v1/fleet/get-run?x=/v1/control/start-run") == 200
    assert gated.superlink.seen == [("POST", "/v1/fleet/get-run", b"", "127.0.0.1")]


def test_a_second_request_hidden_in_a_first_reaches_nothing(gated):
    hidden = f"POST {START} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    head = "POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n"
    for lengths in (
        f"Content-Length: {len(hidden) + 5}\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Content-Length: 0\r\nContent-Length: 5\r\n",
        "Content-Length: +0\r\n",
    ):
        gated.send(f"{head}{lengths}\r\n0\r\n\r\n{hidden}".encode())
    gated.send(f"{head}Content-Length: 0\r\n\r\n{hidden}".encode())  # one after the other, openly
    assert {path for _, path, *_ in gated.superlink.seen} <= set(FLEET)


def test_bodies_larger_than_flower_sends_are_rejected(gated):
    gated.superlink.seen.clear()
    assert gated.post("/v1/fleet/push-object", bytes(9 * 2**20)) == 413
    piece = b"%x\r\n%b\r\n" % (2**20, bytes(2**20))
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert gated.send(head + 9 * piece + b"0\r\n\r\n") == 413
    assert gated.superlink.seen == []


def test_the_gate_sends_the_time_but_no_version_and_logs_rejected_requests(gated):
    assert gated.post("/v1/control/list-nodes") == 404
    assert email.utils.parsedate_to_datetime(gated.answer.headers["Date"])
    assert gated.answer.headers["Server"] == "nginx"
    assert gated.post("/v1/fleet/pull-messages") == 200
    log = (gated.folder / "refused.log").read_text()
    assert '127.0.0.1 "POST /v1/control/list-nodes HTTP/1.1" 404' in log
    assert '"POST /v1/fleet/pull-messages' not in log


def test_the_gate_passes_nothing_to_a_superlink_with_a_certificate_of_others(gated, tmp_path):
    make_certificates(tmp_path)
    for name in ("server.crt", "server.key"):
        (tmp_path / name).replace(tmp_path / f"other-{name}")
    (tmp_path / "others").mkdir()
    make_certificates(tmp_path / "others")
    with Server(tmp_path / "others") as stranger:
        for name in ("ca.crt", "server.crt", "server.key"):
            (tmp_path / name).write_bytes((gated.folder / name).read_bytes())
        running, port = start_gate(tmp_path, stranger.address)
        try:
            assert Gate(gated.folder, port, stranger).post("/v1/fleet/get-run") == 502
        finally:
            running.terminate()
            running.wait(HANGS)
        assert stranger.seen == []


def test_what_new_app_writes_is_what_is_tested(tmp_path):
    write_app(tmp_path / "my-hospital", with_torch=False)
    written = (tmp_path / "my-hospital" / "deploy" / "nginx.conf").read_text()
    assert written == gate()
    assert "--app /etc/covary/my-hospital" in (tmp_path / "my-hospital" / "deploy" / "covary-node.service").read_text()


# --- checks at the start ------------------------------------------------------------------------------------------


def a_gate(method: str, path: str):
    return (200 if path == "/health" else 404), {}


def at(offset: float):
    """A gate whose clock is off."""
    date = email.utils.formatdate(time.time() + offset, usegmt=True)
    return lambda method, path: (a_gate(method, path)[0], {"Date": date})


def test_a_gate_answers(folder):
    with Server(folder, a_gate) as server:
        for host in ("127.0.0.1", "localhost"):
            place = f"{host}:{server.port}"
            assert check_gate(place, folder / "ca.crt") == (True, f"{place} answers. The clocks agree.")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_superlink_that_is_down_is_waited_for(folder, status):
    with Server(folder, lambda method, path: (status if path == "/health" else 404, {})) as server:
        answer = check_gate(server.address, folder / "ca.crt")
        assert not answer.up
        assert "the node waits for it" in answer.text


@pytest.mark.parametrize(
    ("offset", "told"), [(-60, "60 s ahead"), (-3600, "3600 s ahead"), (400, "400 s behind"), (-6.5, "7 s ahead")]
)
def test_a_clock_that_flower_rejects_is_rejected_with_both_times_and_the_fix(folder, offset, told):
    with Server(folder, at(offset)) as server, pytest.raises(CovaryError, match="timedatectl set-ntp true") as error:
        check_gate(server.address, folder / "ca.crt")
    assert told.split(" s ")[1] in str(error.value)
    assert str(error.value).count(":") >= 4


@pytest.mark.parametrize("offset", [100, 290, 60])
def test_a_clock_that_flower_tolerates_is_warned_of(folder, offset):
    with Server(folder, at(offset)) as server:
        assert "Warning: This clock is" in check_gate(server.address, folder / "ca.crt").text


def test_the_tolerance_is_flowers():
    now, date = 1e9, "Sun, 09 Sep 2001 01:46:40 GMT"
    for seconds in (-299, 4.9, 3):
        assert "Warning" in compare_clocks(now + 0.5 + seconds, date)
    for seconds in (-2, 0, 2):
        assert compare_clocks(now + 0.5 + seconds, date) == "The clocks agree."
    for seconds in (-301, 5.1):
        with pytest.raises(CovaryError, match="Set this clock"):
            compare_clocks(now + 0.5 + seconds, date)
    assert "cannot compare" in compare_clocks(now, "")


def test_each_way_not_to_reach_a_gate_has_its_own_reason(folder, tmp_path):
    make_certificates(tmp_path)
    ca = folder / "ca.crt"
    with Server(folder, a_gate) as server, pytest.raises(CovaryError, match="cannot verify the certificate"):
        check_gate(server.address, tmp_path / "ca.crt")
    with pytest.raises(CovaryError, match="Nothing listens at"):
        check_gate(f"127.0.0.1:{free_port()}", ca)
    with pytest.raises(CovaryError, match="does not resolve"):
        check_gate("superlink.invalid:443", ca)
    with Server(folder, a_gate, tls=False) as server, pytest.raises(CovaryError, match="does not speak TLS"):
        check_gate(server.address, ca)
    with Server(folder, lambda method, path: (200, {})) as server, pytest.raises(CovaryError, match="has no gate"):
        check_gate(server.address, ca)  # a SuperLink without a gate shows its documentation
    with Server(folder, lambda method, path: (404, {})) as server, pytest.raises(CovaryError, match="is not the gate"):
        check_gate(server.address, ca)
    for name in ("superlink", "https://superlink:443", "superlink:", "super link:443"):
        with pytest.raises(CovaryError, match="must be host:port"):
            check_gate(name, ca)
    (tmp_path / "empty").write_text("no certificate")
    for name, told in (("none", "No such file"), ("empty", "is not a certificate")):
        with pytest.raises(CovaryError, match=told):
            check_gate("127.0.0.1:1", tmp_path / name)


def test_a_private_key_is_private(tmp_path):
    key = tmp_path / "hospital-a"
    make_key(key)
    check_key(key)
    for mode in (0o640, 0o604, 0o610):
        key.chmod(mode)
        with pytest.raises(CovaryError, match="chmod 600"):
            check_key(key)
    key.chmod(0o600)
    key.write_text("no key")
    with pytest.raises(CovaryError, match="ssh-keygen -t ecdsa"):
        check_key(key)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    with pytest.raises(CovaryError, match="not an elliptic curve key"):
        check_key(tmp_path / "other")


def test_a_port_in_use_is_rejected():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CovaryError, match="--port must be free"):
            check_port(taken.getsockname()[1])


@pytest.mark.parametrize("config", ["nonsense", "a=b=c", "x=", "settings.toml", "state='/elsewhere'"])
def test_a_configuration_that_flower_would_misread_is_rejected(config):
    with pytest.raises(CovaryError, match="--config must be"):
        node_config(Node("x:1", Path("ca"), Path("key"), Path("/s"), (), config))


# --- approved apps ------------------------------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path):
    write_app(tmp_path / "my-hospital", with_torch=False)
    return tmp_path / "my-hospital"


def test_the_folder_of_apps_has_exactly_the_approved_ones_and_cannot_be_written(app, tmp_path):
    other, home = hostile(tmp_path / "other-app", tmp_path / "mark"), tmp_path / "home"
    assert len(approve([app, other], home)) == 2
    assert not (tmp_path / "mark").exists()
    (approved,) = approve([app], home).items()  # at the next start, one is no longer there
    assert list((home / "apps").iterdir()) == [approved[0]]
    assert approved[0].name == f"you.my-hospital.1.0.0.{approved[1][:8]}"
    for path in [home / "apps", *(home / "apps").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o555 if path.is_dir() else 0o444)
    with pytest.raises(CovaryError, match="No app may run"):
        approve([], home)


def test_parties_with_the_same_files_see_the_same_digest(app, tmp_path):
    from flwr.cli.build import build_fab_from_disk

    content = build_fab_from_disk(app)
    (tmp_path / "sent.fab").write_bytes(content)
    for place, source in (("a", app), ("b", tmp_path / "sent.fab")):
        (digest,) = approve([source], tmp_path / place).values()
        assert digest == hashlib.sha256(content).hexdigest()
    (app / "my_hospital" / "task.py").write_text("# another one")
    assert list(approve([app], tmp_path / "c").values()) != [digest]


def test_a_folder_that_is_not_an_app_is_rejected(app, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.fab").write_bytes(b"x")
    for source in (tmp_path / "none", tmp_path / "empty", tmp_path / "x.fab"):
        with pytest.raises(CovaryError, match=r"cannot be read|is not a"):
            approve([source], tmp_path / "home")
    far = hostile(tmp_path / "far", tmp_path / "mark", name="", version="/../elsewhere/it")
    (tmp_path / "far.fab").write_bytes(bundle(far))
    with pytest.raises(CovaryError, match="Do not trust it"):
        approve([tmp_path / "far.fab"], tmp_path / "home")
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "mark").exists()


LOAD = "import sys, importlib; sys.path.insert(0, sys.argv[1]); print(importlib.import_module(sys.argv[2]).__file__)"


def load(home: Path, approved: dict[Path, str], place: object, module: str) -> subprocess.CompletedProcess[str]:
    """Import a module as Flower's processes do."""
    command = [sys.executable, "-c", LOAD, str(place), module]
    return subprocess.run(command, env=_environment(home, approved), capture_output=True, text=True, timeout=HANGS)


def test_code_comes_from_approved_folders_only_wherever_others_are(app, tmp_path):
    home, mark = tmp_path / "home", tmp_path / "mark"
    approved = approve([app], home)
    (folder,) = approved
    assert str(folder) in load(home, approved, folder, "my_hospital.task").stdout
    assert load(home, approved, home / "apps" / ".." / "apps" / folder.name, "my_hospital.task").returncode == 0
    other = hostile(tmp_path / "other-app", mark)
    (other / "google").mkdir()  # google is a namespace, which Flower has loaded and which takes in every folder
    (other / "google" / "extra.py").write_text((other / "other_app" / "__init__.py").read_text())
    link = tmp_path / "link"
    link.symlink_to(other)
    for place in (other, home / "apps" / ".." / ".." / "other-app", link, folder / ".." / ".." / ".." / "other-app"):
        for module in ("other_app.client", "google.extra"):
            done = load(home, approved, place, module)
            assert "is not an app that this node's owner has approved" in done.stderr
            assert not mark.exists()
    done = load(home, approved, other, "numpy")  # nor does anything else that is imported by then
    assert done.returncode == 1


def test_an_error_at_import_and_the_path_of_another_app_stay_on_the_node(app, tmp_path):
    """Flower sends the text of such errors to the server."""
    (app / "my_hospital" / "task.py").write_text("float('patient Ada Lovelace')")
    home = tmp_path / "home"
    approved = approve([app], home)
    (folder,) = approved
    done = load(home, approved, folder, "my_hospital.client")  # which imports task
    assert done.stderr.strip().split("\n")[-1].endswith("the node's own log says why")
    assert done.stderr.count("could not convert string to float: 'patient Ada Lovelace'") == 1  # in that log
    install = "import sys; from pathlib import Path; Path(sys.argv[1]).mkdir()"
    command = [sys.executable, "-c", install, str(home / "apps" / "you.other.1.0.0.0badcafe")]
    done = subprocess.run(command, env=_environment(home, approved), capture_output=True, text=True, timeout=HANGS)
    said = done.stderr.strip().split("\n")[-1]
    assert said == "PermissionError: you.other.1.0.0.0badcafe is not an app that this node's owner has approved"


def test_the_marks_would_appear_without_the_guard(app, tmp_path):
    """The test above can fail."""
    other = hostile(tmp_path / "other-app", tmp_path / "mark")
    assert load(tmp_path, {}, other, "other_app.client").returncode == 0
    assert (tmp_path / "mark").exists()


def test_apps_are_installed_wherever_their_version_says(tmp_path):
    """Why not only the folder of apps is guarded. When Flower rejects such versions, this test fails."""
    from flwr.cli.install import install_from_fab

    (tmp_path / "home" / "apps").mkdir(parents=True)
    far = hostile(tmp_path / "far", tmp_path / "mark", name="", version="/../elsewhere/it")
    installed = install_from_fab(bundle(far), tmp_path / "home", skip_prompt=True)
    assert installed.resolve().parent == tmp_path / "elsewhere"


# --- why it ends --------------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from covary.flower import node

node.SUPERNODE = [sys.argv[1]]
superlink, ca, key, state, app = sys.argv[2:]
sys.exit(node.run_node(node.Node(superlink, Path(ca), Path(key), Path(state), [Path(app)], "", int(sys.argv.pop()))))
"""


def started(folder: Path, app: Path, superlink: str, script: str) -> subprocess.Popen[str]:
    """`covary node` with a script in place of the SuperNode."""
    make_key(folder / "hospital-a")
    (folder / "supernode").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "supernode").chmod(0o755)
    code = CHILD.replace("sys.argv.pop()", f'"{free_port()}"')
    words = (folder / "supernode", superlink, folder / "ca.crt", folder / "hospital-a", folder / "state", app)
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_node_that_ends_by_itself_prints_why_and_a_stopped_one_exits_with_0(app, tmp_path):
    make_certificates(tmp_path)
    with Server(tmp_path, a_gate) as server:
        out, told = (node := started(tmp_path, app, server.address, "echo hello; exit 0")).communicate(timeout=HANGS)
        assert node.returncode == 1
        assert re.search(r"Approved: you.my-hospital.1.0.0.\w{8}, SHA-256 \w{64}\nhello", out)
        assert "no longer accepts" in told
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        script = "trap 'echo farewell; exit 0' TERM; echo ready; umask; while :; do sleep 0.1; done"
        node = started(tmp_path, app, server.address, script)
        assert node.stdout is not None
        for line in node.stdout:
            if line == "0077\n":
                break
        node.terminate()
        out, told = node.communicate(timeout=HANGS)
        assert (node.returncode, out, told) == (0, "farewell\n", "")


def test_no_process_outlives_its_node(app, tmp_path):
    make_certificates(tmp_path)
    with Server(tmp_path, a_gate) as server:
        script = f"setsid sleep 1000 & echo $! > {tmp_path}/orphan; exit 1"
        node = started(tmp_path, app, server.address, script)
        node.communicate(timeout=HANGS)
    orphan = Path("/proc") / (tmp_path / "orphan").read_text().strip() / "stat"
    assert not orphan.exists() or orphan.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_reason_is_the_nearest_one(tmp_path):
    make_certificates(tmp_path)
    with Server(tmp_path, a_gate) as server:
        node = Node(server.address, tmp_path / "ca.crt", tmp_path / "hospital-a", tmp_path / "state", ())
        assert "flwr supernode register hospital-a.pub" in why_ended(node, ["[code: 2004] Failed to activate"], 1)
        assert "no longer accepts" in why_ended(node, ["SuperNode terminated gracefully."], 0)
        assert why_ended(node, ["ERROR: the disk is full", "Bye"], 1) == "ERROR: the disk is full"
        assert why_ended(node, ["Bye"], -9) == "flower-supernode ended with status -9. Its last line: Bye"
    assert "Nothing listens at" in why_ended(node, ["ERROR: the disk is full"], 1)
    with Server(tmp_path, at(-60)) as server:
        late = Node(server.address, tmp_path / "ca.crt", tmp_path / "hospital-a", tmp_path / "state", ())
        assert "This clock is 6" in why_ended(late, ["SuperNode terminated gracefully."], 0)
