"""A federation on this machine: a SuperLink and nodes as real processes on loopback, with TLS and registered keys.

For a trial before there are machines, for the demonstration, and for tests. What it does by hand is in docs/deploy.md.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covary.errors import CovaryError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}


class Federation:
    """A SuperLink and its nodes. Every process it starts ends with the `with` block.

    Args:
        folder: for certificates, keys, logs, the nodes' states and Flower's own files.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()
        self.bin = Path(sys.executable).parent
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.told: dict[str, int] = {}  # how much each had said when it was started
        self.nodes: dict[str, tuple[Mapping[str, Any], Path | None]] = {}
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "flwr")}
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}"

    def __enter__(self) -> Federation:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        ca = self.folder / "ca.crt"
        if not ca.is_file():
            make_certificates(self.folder)
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{ca}"\n'
        )
        self.start_link()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.kill(name, signal.SIGTERM)

    def start_link(self) -> None:
        """The SuperLink, which lets in registered keys only."""
        self._start(
            "superlink",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", str(self.folder / "ca.crt")),
            *("--ssl-certfile", str(self.folder / "server.crt"), "--ssl-keyfile", str(self.folder / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        self._wait_for_port("superlink", self.port)

    def register(self, name: str) -> None:
        """Make a key for a node and register it with the SuperLink."""
        if not self.key(name).is_file():
            make_key(self.key(name))
        self._flwr("supernode", "register", str(self.key(name).with_suffix(".pub")), "here")

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def state(self, name: str) -> Path:
        """The folder of a node's control variate."""
        return self.folder / f"{name}.state"

    def start_node(self, name: str, config: Mapping[str, Any], ca: Path | None = None) -> None:
        """A SuperNode with its key; `config` is its node configuration, beside the folder of its state."""
        self.nodes[name] = (config, ca)
        own = {"state": str(self.state(name)), **config}
        told = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in own.items())
        self._start(
            name,
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(ca or self.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(self.key(name)), "--port", str(free_port())),
            *("--node-config", told),
        )

    def wait_for_node(self, name: str, timeout: float = 150.0) -> None:
        """Wait until a node has been let in, starting it again as a supervisor would.

        The SuperLink takes a node that died for alive until two heartbeats are missing, for up to a minute, and does
        not let it in again before.
        """
        deadline = time.monotonic() + timeout
        while "SuperNode ID:" not in self.log(name)[self.told[name] :]:
            if time.monotonic() > deadline:
                raise CovaryError(f"{name} was not let in within {timeout:g} s. Its log: {self.log(name)[-2000:]}")
            if self.processes[name].poll() is not None:
                time.sleep(2.0)
                self.start_node(name, *self.nodes[name])
            time.sleep(0.1)

    def run(self, app: Path, config: Mapping[str, Any], name: str = "run") -> None:
        """Submit an app; its log goes on in `log(name)`, and `wait` waits for its end."""
        told = " ".join(
            f'{k}="{v}"' if isinstance(v, str) else f"{k}={str(v).lower() if isinstance(v, bool) else v}"
            for k, v in config.items()
        )
        self._start(name, "flwr", "run", str(app.absolute()), "here", "--stream", "--run-config", told)

    def wait(self, name: str = "run", timeout: float = 600.0) -> int:
        """The exit status of a process, when it has ended."""
        try:
            return self.processes[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise CovaryError(f"{name} did not end within {timeout:g} s. Its log: {self.log(name)[-2000:]}") from None

    def wait_for(self, text: str, name: str = "run", timeout: float = 120.0) -> None:
        """Wait until a process has said something."""
        deadline = time.monotonic() + timeout
        while text not in self.log(name):
            if time.monotonic() > deadline:
                raise CovaryError(f"{name} did not say {text!r} in {timeout:g} s. Its log: {self.log(name)[-2000:]}")
            if self.processes[name].poll() is not None and text not in self.log(name):
                raise CovaryError(f"{name} ended without saying {text!r}. Its log: {self.log(name)[-2000:]}")
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and all that it has started."""
        process = self.processes.pop(name)
        for sent in (how, signal.SIGKILL):
            try:
                os.killpg(process.pid, sent)
            except ProcessLookupError:
                break
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.told[name] = len(self.log(name))
            self.processes[name] = subprocess.Popen(
                [str(self.bin / command), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _flwr(self, *arguments: str) -> str:
        command = [str(self.bin / "flwr"), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise CovaryError(f"flwr {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def _wait_for_port(self, name: str, port: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise CovaryError(f"{name} did not come up. Its log: {self.log(name)[-2000:]}")
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(path: Path) -> None:
    """A node's key pair, as `ssh-keygen -t ecdsa -b 384` makes it; the public one ends in .pub."""
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
    """A certificate authority of one's own, and a certificate for a SuperLink on this machine."""
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
