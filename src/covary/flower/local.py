"""A federation on this machine: a SuperLink, its gate and nodes as real processes on loopback, with TLS and keys.

For a trial before there are machines, for the demonstration, and for tests. docs/deploy.md has the same steps by hand.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covary.errors import CovaryError
from covary.flower.node import descendants
from covary.flower.template import gate

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}


class Federation:
    """A SuperLink, its gate and its nodes. All their processes end with the `with` block.

    The SuperLink's own port is for this machine's `flwr`. Nodes connect to the gate, as they do across machines.

    Args:
        folder: for certificates, keys, logs, the nodes' states and Flower's own files.
        apps: what the nodes may run.
    """

    def __init__(self, folder: str | Path, apps: Sequence[Path]):
        self.folder, self.apps = Path(folder).absolute(), apps
        self.bin = Path(sys.executable).parent
        self.port, self.gate_port = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log_start: dict[str, int] = {}  # the length of each log when its process was started
        self.nodes: dict[str, tuple[Mapping[str, Any], Path | None, Sequence[Path] | None]] = {}
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "flwr")}
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}"

    def __enter__(self) -> Federation:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "flwr").mkdir(exist_ok=True)
        ca = self.folder / "ca.crt"
        if not ca.is_file():
            make_certificates(self.folder)
        (self.folder / "flwr" / "config.toml").write_text(connection("here", self.port, ca))
        try:
            self.start_link()
            self.start_gate()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name, signal.SIGTERM)

    def start_link(self) -> None:
        """The SuperLink, which admits registered keys only, and remembers them when it restarts."""
        self._start(
            "superlink",
            *(self._program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.folder / "superlink.db")),
            *("--ssl-ca-certfile", str(self.folder / "ca.crt")),
            *("--ssl-certfile", str(self.folder / "server.crt"), "--ssl-keyfile", str(self.folder / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        self._wait_for_port("superlink", self.port)

    def start_gate(self) -> None:
        """nginx, with the configuration that `covary new-app` writes."""
        settings = gate(f"127.0.0.1:{self.gate_port}", f"127.0.0.1:{self.port}", ".", ".", "refused.log")
        (self.folder / "nginx.conf").write_text(settings)
        where = ("-p", str(self.folder), "-c", str(self.folder / "nginx.conf"))
        self._start("gate", nginx(), "-e", "stderr", *where, "-g", "daemon off;")
        self._wait_for_port("gate", self.gate_port)

    def register(self, name: str) -> None:
        """Make a key for a node and register it with the SuperLink."""
        if not self.key(name).is_file():
            make_key(self.key(name))
        self._flwr("supernode", "register", str(self.key(name).with_suffix(".pub")), "here")

    def key(self, name: str) -> Path:
        return self.folder / name

    def state(self, name: str) -> Path:
        """The folder of a node's control variate."""
        return self.folder / f"{name}.state"

    def start_node(
        self, name: str, config: Mapping[str, Any], ca: Path | None = None, apps: Sequence[Path] | None = None
    ) -> None:
        """Start a node as `covary node` does; `config` is its configuration."""
        self.nodes[name] = (config, ca, apps)
        self._start(
            name,
            *(self._program("covary"), "node", "--superlink", f"127.0.0.1:{self.gate_port}"),
            *("--root-certificates", str(ca or self.folder / "ca.crt"), "--key", str(self.key(name))),
            *("--state", str(self.state(name)), "--port", str(free_port()), "--config", pairs(config)),
            *(word for app in apps or self.apps for word in ("--app", str(app.absolute()))),
        )

    def wait_for_node(self, name: str, timeout: float = 150.0) -> None:
        """Wait until the SuperLink has admitted a node, starting the node again as a supervisor would.

        The SuperLink takes a dead node for alive until two heartbeats are missing, for up to a minute, and does not
        admit it again before.
        """
        deadline = time.monotonic() + timeout
        while "SuperNode ID:" not in self.log(name)[self.log_start[name] :]:
            if time.monotonic() > deadline:
                raise CovaryError(f"{name} was not admitted within {timeout:g} s. Its log: {self.log(name)[-2000:]}")
            if self.processes[name].poll() is not None:
                time.sleep(2.0)
                self.start_node(name, *self.nodes[name])
            time.sleep(0.1)

    def run(self, app: Path, config: Mapping[str, Any], name: str = "run") -> None:
        """Start a run of an app. `log(name)` has its log, and `wait` waits for its end."""
        command = (self._program("flwr"), "run", str(app.absolute()), "here", "--stream")
        self._start(name, *command, "--run-config", pairs(config))

    def wait(self, name: str = "run", timeout: float = 600.0) -> int:
        """The exit status of a process, when it has ended."""
        try:
            return self.processes[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise CovaryError(f"{name} did not end within {timeout:g} s. Its log: {self.log(name)[-2000:]}") from None

    def wait_for(self, text: str, name: str = "run", timeout: float = 120.0) -> None:
        """Wait until a process has logged a text."""
        deadline = time.monotonic() + timeout
        while text not in self.log(name):
            if time.monotonic() > deadline:
                raise CovaryError(
                    f"{name} did not log {text!r} within {timeout:g} s. Its log: {self.log(name)[-2000:]}"
                )
            if self.processes[name].poll() is not None and text not in self.log(name):
                raise CovaryError(f"{name} ended and did not log {text!r}. Its log: {self.log(name)[-2000:]}")
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and all that it has started."""
        process = self.processes.pop(name)
        family = descendants(process.pid)  # some are in sessions of their own, and would outlive it
        if how != signal.SIGKILL and process.poll() is None:
            process.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for number in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()

    def _program(self, name: str) -> str:
        return str(self.bin / name)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.log_start[name] = len(self.log(name))
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                umask=0o077,
                start_new_session=True,
            )

    def _flwr(self, *arguments: str) -> str:
        command = [self._program("flwr"), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise CovaryError(f"flwr {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def _wait_for_port(self, name: str, port: int, timeout: float = 600.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise CovaryError(f"{name} did not start. Its log: {self.log(name)[-2000:]}")
            time.sleep(0.1)


def nginx() -> str:
    """The path of nginx, also where /usr/sbin is not on the PATH."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
    if found is None:
        raise CovaryError("The gate needs nginx. Install it: apt-get install nginx-light")
    return found


def connection(name: str, port: int, ca: Path) -> str:
    """The part of a Flower configuration that names a SuperLink on this machine."""
    head = f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\n'
    return f'{head}address = "127.0.0.1:{port}"\nroot-certificates = "{ca}"\n'


def pairs(config: Mapping[str, Any]) -> str:
    """A configuration in the form of Flower's commands.

    >>> pairs({"rounds": 3, "resume": True, "target": "loss <= 1"})
    'rounds=3 resume=true target="loss <= 1"'
    """

    def written(value: Any) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)

    return " ".join(f"{name}={written(value)}" for name, value in config.items())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(path: Path) -> None:
    """Make a node's key pair, as `ssh-keygen -t ecdsa -b 384` does; the public key's file ends in .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    _private(
        path,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def make_certificates(folder: Path) -> None:
    """Make a certificate authority, and a certificate for a SuperLink on this machine."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covary trial CA")])
    ca = _certificate(ca_name, ca_key.public_key(), ca_name, ca_key, ca=True)
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    server = _certificate(server_name, server_key.public_key(), ca_name, ca_key, ca=False)
    for name, certificate in (("ca", ca), ("server", server)):
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _private(
        folder / "server.key",
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _certificate(subject: x509.Name, key: Any, issuer: x509.Name, signer: Any, ca: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if ca:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    else:
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
