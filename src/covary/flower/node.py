"""`covary node`: a node that runs approved apps only, and says why when it ends.

It first checks its files, the gate's certificate and the clock. Then it runs `flower-supernode` as a child process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import typer
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore.error import ApiErrorCode

from covary.errors import CovaryError, refused
from covary.runs.files import held

AHEAD, BEHIND = float(SYSTEM_TIME_TOLERANCE), float(TIMESTAMP_TOLERANCE)  # seconds by which Flower lets a clock differ
WARN = 2.0  # seconds by which clocks differ before there is a warning
SET_CLOCK = "Set this clock: timedatectl set-ntp true."
# Without `os._exit`, Flower's server thread keeps the process alive, and idle, after its main thread has ended.
SUPERNODE = [
    sys.executable,
    "-c",
    "import os\nfrom flwr.supernode.cli.flower_supernode import flower_supernode\nflower_supernode()\nos._exit(1)",
]
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36  # <linux/prctl.h>
CAP_DAC_OVERRIDE = 1  # <linux/capability.h>


@dataclass(frozen=True)
class Node:
    """The arguments of `covary node`.

    Args:
        superlink: host:port of the gate.
        ca: the certificate of the authority that signed the gate's.
        key: this node's private key.
        state: the folder of its control variate, and of `flower/`, whose apps are installed again at each start.
        apps: folders or .fab files of the apps that may run here.
        config: what the apps find in `context.node_config`, such as "partition-id=0".
        port: a free port of this machine, for Flower's own processes.
    """

    superlink: str
    ca: Path
    key: Path
    state: Path
    apps: Sequence[Path]
    config: str = ""
    port: int = 9094


def run_node(node: Node) -> int:
    """Run a node. Returns 0 when it was asked to stop, and 1 when it ended by itself."""
    if sys.platform != "linux":
        raise CovaryError("covary node needs Linux: it blocks other apps with Linux system calls. Run it on Linux.")
    asked: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: asked.append(number))
    check_key(node.key)
    check_port(node.port)
    settings = node_config(node)
    state = private_folder(node.state)
    typer.echo(check_gate(node.superlink, node.ca).text)
    with held(private_folder(state / "flower")):
        approved = approve(node.apps, state / "flower")
        for folder, digest in approved.items():
            typer.echo(f"Approved: {folder.name}, SHA-256 {digest}")
        command = [
            *(*SUPERNODE, "--superlink", node.superlink, "--root-certificates", str(node.ca)),
            *("--auth-supernode-private-key", str(node.key), "--port", str(node.port), "--node-config", settings),
        ]
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        child = subprocess.Popen(
            command,
            env=_environment(state / "flower", approved),
            umask=0o077,
            preexec_fn=_confine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        last = _supervise(child, node, asked)
        for orphan in descendants(os.getpid()):  # a ClientApp would wait for its SuperNode for ever
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
    if asked:
        return 0
    typer.echo(f"covary node: {why_ended(node, last, child.returncode)}", err=True)
    return 1


# --- what is checked first -----------------------------------------------------------------------------------------


def check_key(path: Path) -> None:
    """Check that a file is a node's private key: an elliptic curve key in OpenSSH form that only its user can read.

    >>> check_key(Path("hospital-z"))
    Traceback (most recent call last):
    covary.errors.CovaryError: hospital-z cannot be read (No such file or directory). Give the node's private key.
    """
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise CovaryError(f"{path} cannot be read ({error.strerror}). Give the node's private key.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise CovaryError(f"Others can read the private key {path}. Run: chmod 600 {path}")
    try:
        key = load_ssh_private_key(content, None)
    except Exception as error:  # of many kinds
        raise CovaryError(f"{path} is not a private key that Flower can read: {error}. {MAKE_KEY}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CovaryError(f"{path} is not an elliptic curve key. {MAKE_KEY}")


MAKE_KEY = 'Make one: ssh-keygen -t ecdsa -b 384 -N "" -C "" -f FILE'


def check_port(port: int) -> None:
    """Reject a port that is not free for the SuperNode's own processes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise refused("--port", "free on this machine", f"{port} ({error.strerror})", "Try another one.") from None


def private_folder(path: Path) -> Path:
    """The folder, made if it does not exist, with access for this user only."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        return path.resolve(strict=True)
    except OSError as error:
        fix = "Give a folder that belongs to this user."
        raise CovaryError(f"{path} cannot be used ({error.strerror}). {fix}") from None


def node_config(node: Node) -> str:
    """The node's configuration, with the folder of its state.

    >>> node_config(Node("localhost:443", Path("ca.crt"), Path("key"), Path("/var/lib/covary"), (), "partition-id=0"))
    "state='/var/lib/covary' partition-id=0"
    """
    import click
    from flwr.common.config import parse_config_args

    state = str(node.state.absolute())
    if re.search(r"['\n:]", state):
        raise refused("--state", "a path without quotes and colons", state, "Give another folder.")
    try:
        given = parse_config_args([node.config]) if node.config else {}
    except (click.ClickException, ValueError, OSError):
        given = None
    if node.config and (not given or node.config.endswith(".toml") or "state" in given):
        fix = "Strings have quotes: 'partition-id=0 ward=\"north\"'. --state sets state."
        raise refused("--config", "pairs of names and values, without state", repr(node.config), fix)
    return f"state='{state}' {node.config}".strip()


class Answer(NamedTuple):
    """Whether the SuperLink behind the gate is up, and what the log says about it."""

    up: bool
    text: str


def check_gate(superlink: str, ca: Path) -> Answer:
    """Check that the gate answers and is a gate, and compare clocks.

    >>> check_gate("localhost", Path("ca.crt"))
    Traceback (most recent call last):
    covary.errors.InvalidInput: --superlink must be host:port; got localhost. Try superlink.example.org:443.
    """
    if not re.fullmatch(r"[^\s/:]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}", superlink):
        raise refused("--superlink", "host:port", superlink, "Try superlink.example.org:443.")
    try:
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as Flower makes it
        trusted.load_verify_locations(cadata=ca.read_text(encoding="ascii"))
    except (ssl.SSLError, ValueError):
        raise CovaryError(f"{ca} is not a certificate. Give the CA's certificate.") from None
    except OSError as error:
        raise CovaryError(f"{ca} cannot be read ({error.strerror}). Give the CA's certificate.") from None
    try:
        with httpx.Client(verify=trusted, timeout=10.0) as client:
            open_door = client.get(f"https://{superlink}/openapi.json").status_code != 404
            asked = time.time()
            answer = client.get(f"https://{superlink}/health")
            now = (asked + time.time()) / 2
    except httpx.HTTPError as error:
        raise CovaryError(_unreachable(superlink, ca, error)) from None
    if open_door:
        what = "has no gate: whoever reaches it can run programs on its nodes"
        raise CovaryError(f"{superlink} {what}. Ask its operator to run the gate of the app's deploy folder.")
    up = answer.status_code == 200
    if not up and answer.status_code not in (502, 503, 504):
        what = f"is not the gate of a SuperLink: it answers /health with {answer.status_code}"
        raise CovaryError(f"{superlink} {what}. Check --superlink.")
    clock = compare_clocks(now, answer.headers.get("date", ""))
    waits = "" if up else " The SuperLink behind it is down: the node waits for it."
    return Answer(up, f"{superlink} answers.{waits} {clock}")


def compare_clocks(now: float, date: str) -> str:
    """Reject a clock that Flower rejects. It signs requests with the time, which may be 5 s ahead or 300 s behind.

    >>> compare_clocks(1e9, "Sun, 09 Sep 2001 01:46:40 GMT")
    'The clocks agree.'
    >>> compare_clocks(1e9 + 60, "Sun, 09 Sep 2001 01:46:40 GMT")
    Traceback (most recent call last):
    covary.errors.CovaryError: This clock is 60 s ahead: it says 01:47:40 and the gate says 01:46:40 (UTC). Flower \
rejects nodes that are 5 s ahead or 300 s behind. Set this clock: timedatectl set-ntp true.
    """
    try:
        theirs = parsedate_to_datetime(date)
    except ValueError:
        return "It sends no date, so covary cannot compare the clocks."
    ours = datetime.fromtimestamp(now, UTC)
    apart = (ours - theirs - timedelta(seconds=0.5)).total_seconds()  # the header has whole seconds, cut off
    if abs(apart) <= WARN:
        return "The clocks agree."
    text = f"This clock is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}"
    text += f": it says {ours:%H:%M:%S} and the gate says {theirs:%H:%M:%S} (UTC)."
    if -BEHIND < apart < AHEAD:
        return f"Warning: {text} {SET_CLOCK}"
    raise CovaryError(f"{text} Flower rejects nodes that are {AHEAD:.0f} s ahead or {BEHIND:.0f} s behind. {SET_CLOCK}")


def _unreachable(superlink: str, ca: Path, error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 20:
        causes.append(cause)
    for each in causes:
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"{ca} cannot verify the certificate of {superlink}: {each.verify_message}. {ASK_CERTIFICATE}"
        if isinstance(each, ssl.SSLError):
            return f"{superlink} does not speak TLS ({each.reason}). Check --superlink: give the gate's port."
        if isinstance(each, socket.gaierror):
            return f"The name of {superlink} does not resolve. Check --superlink, and this machine's DNS."
        if isinstance(each, ConnectionRefusedError):
            return f"Nothing listens at {superlink}. Check --superlink, or ask its operator if the gate is running."
    if isinstance(error, httpx.TimeoutException):
        return f"{superlink} does not answer within 10 s. Ask whether a firewall blocks it from this machine."
    return f"{superlink} cannot be reached ({error}). Check --superlink, and this machine's network."


ASK_CERTIFICATE = "Ask its operator for the current ca.crt, and whether the certificate has this name."


# --- approved apps ------------------------------------------------------------------------------------------------


def approve(apps: Sequence[Path], home: Path) -> dict[Path, str]:
    """Install apps as Flower does, into a folder that then holds exactly these and is read-only.

    Args:
        apps: folders or .fab files.
        home: the node's own FLWR_HOME.

    Returns:
        each app's folder, and the SHA-256 of its .fab file, by which parties compare apps.

    >>> import tempfile
    >>> from covary.flower.template import write_app
    >>> with tempfile.TemporaryDirectory() as here:
    ...     written = write_app(Path(here) / "my-hospital", with_torch=False)
    ...     approved = approve([Path(here) / "my-hospital"], Path(here) / "home")
    ...     for folder, digest in approved.items():
    ...         folder.name.removesuffix(digest[:8])
    'you.my-hospital.1.0.0.'
    """
    import click
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.cli.install import install_from_fab

    if not apps:
        raise CovaryError("No app may run here. Name the apps that may run: --app my-hospital")
    shutil.rmtree(_writable(home / "apps"), ignore_errors=True)
    approved = {}
    for app in apps:
        content = _fab(app)
        try:
            name, version = get_fab_metadata(content)
            if name.count("/") != 1 or "/" in version:
                raise CovaryError(f"{app} has the version {version}, which is a path. Do not trust it.")
            with contextlib.redirect_stdout(io.StringIO()):
                folder = install_from_fab(content, install_dir=home, skip_prompt=True)
        except (click.ClickException, zipfile.BadZipFile, KeyError, OSError) as error:
            raise CovaryError(f"{app} is not an app that Flower installs: {_text(error)}") from None
        approved[folder.resolve()] = hashlib.sha256(content).hexdigest()
    for path in _below(home / "apps"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return approved


def _fab(app: Path) -> bytes:
    """An app's bundle. Equal files give equal bytes."""
    import click
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.utils import AppPathDepthError

    try:
        return build_fab_from_disk(app) if app.is_dir() else app.read_bytes()
    except OSError as error:
        raise CovaryError(f"{app} cannot be read ({error.strerror}). Give an app's folder or .fab file.") from None
    except (AppPathDepthError, click.ClickException, ValueError) as error:
        raise CovaryError(f"{app} is not a Flower app: {_text(error)}") from None


def _text(error: Exception) -> str:
    return getattr(error, "message", None) or str(error)


def _below(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if not path.is_symlink())
    yield folder


def _writable(folder: Path) -> Path:
    """The folder, which an earlier start made read-only."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    return folder


# --- the child ----------------------------------------------------------------------------------------------------


def _environment(home: Path, approved: dict[Path, str]) -> dict[str, str]:
    guard = Path(__file__).parent / "guard"
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        # For guard/sitecustomize.py. Without PYTHONSAFEPATH, Python adds a script's folder to the path after it ran.
        "PYTHONPATH": os.pathsep.join([str(guard), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",
        "COVARY_APPS": os.pathsep.join(map(str, approved)),
    }


def _supervise(child: subprocess.Popen[bytes], node: Node, asked: list[int]) -> deque[str]:
    """Pass the SuperNode's output on until it ends or is asked to stop. Returns its last lines."""
    last: deque[str] = deque(maxlen=100)
    cut_off = threading.Event()
    reader = threading.Thread(target=_pass_on, args=(child, last, cut_off), daemon=True)
    reader.start()
    explained = -60.0  # when this node last said why it cannot connect
    while child.poll() is None and not asked:
        time.sleep(0.2)
        if cut_off.is_set() and time.monotonic() > explained + 60.0:  # Flower retries for ever, and does not say why
            explained = time.monotonic()
            cut_off.clear()
            if trouble := _trouble(node):
                typer.echo(f"covary node: {trouble}", err=True)
    if asked and not (asked[0] == signal.SIGINT and _from_terminal()):
        child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    reader.join(2)
    return last


def _confine() -> None:
    """Run in the child: it ends with its parent, and even root cannot write to read-only folders, to install apps."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.geteuid() == 0:
        LIBC.prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def _pass_on(child: subprocess.Popen[bytes], last: deque[str], cut_off: threading.Event) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
        last.append(re.sub(r"\x1b\[[0-9;]*m", "", line.decode(errors="replace")).strip())
        if "Connection attempt failed" in last[-1]:
            cut_off.set()


def _from_terminal() -> bool:
    """Whether Ctrl-C reached the child as well: a second signal would interrupt its shutdown."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def why_ended(node: Node, last: Sequence[str], status: int) -> str:
    """One line on why a SuperNode ended by itself."""
    try:
        check_gate(node.superlink, node.ca)
    except CovaryError as error:
        return str(error)
    public = f"{node.key.name}.pub"
    if any(NOT_ADMITTED in line for line in last):
        return (
            f"The SuperLink does not admit {node.key}. If the key is not registered, its operator runs: flwr "
            f"supernode register {public} here. If this node was cut off, it is admitted again within a minute."
        )
    if status == 0:  # what Flower does when a signature is rejected
        return (
            f"The SuperLink no longer accepts {node.key}: the key was unregistered, or the SuperLink was started "
            f"without its --database. Its operator runs: flwr supernode register {public} here"
        )
    error = next((line for line in reversed(last) if re.search("ERROR|Error|error", line)), "")
    return error or f"flower-supernode ended with status {status}. Its last line: {last[-1] if last else 'none'}"


NOT_ADMITTED = f"[code: {ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED.value}]"


def _trouble(node: Node) -> str:
    try:
        answer = check_gate(node.superlink, node.ca)
    except CovaryError as error:
        return f"{error} The node keeps trying."
    return "" if answer.up else answer.text


def descendants(process: int) -> list[int]:
    """The ids of all processes that a process has started, directly or through others."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    return [each for child in children.get(process, ()) for each in (child, *descendants(child))]
