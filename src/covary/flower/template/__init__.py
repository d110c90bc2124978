"""The app that `covary new-app` writes."""

from __future__ import annotations

import importlib.util
import re
from importlib import resources
from pathlib import Path
from string import Template

from covary.errors import InvalidInput, refused

SYSLOG = "syslog:server=unix:/dev/log,nohostname,tag=covary_gate"
UNITS = ("covary-superlink.service", "covary-gate.service", "covary-node.service")


class _AtWords(Template):
    """A template for files that use $ themselves."""

    delimiter = "@"


def gate(
    listen: str = "443",
    superlink: str = "127.0.0.1:8000",
    certificates: str = "/etc/covary",
    run: str = "/run/covary-gate",
    log: str = SYSLOG,
) -> str:
    """The nginx configuration of the gate between the network and a SuperLink.

    Args:
        listen: the public port, or address and port.
        superlink: where the SuperLink listens, on this machine.
        certificates: the folder of ca.crt, server.crt and server.key.
        run: a folder where nginx may write.
        log: where rejected requests are logged: a file, or syslog.

    >>> "listen 8443 ssl;" in gate(listen="8443")
    True
    """
    return _AtWords(_text("deploy/nginx.conf.txt")).substitute(locals())


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def write_app(folder: Path, with_torch: bool) -> Path:
    """Write a Flower app into a new folder, and return the folder of its Python files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as here:
    ...     written = write_app(Path(here) / "my-hospital", with_torch=False)
    ...     sorted(path.name for path in written.iterdir())
    ['__init__.py', 'client.py', 'server.py', 'task.py']
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise refused("DIR", "named by a letter, then letters and digits", folder.name, "Try my-hospital.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refused("DIR", "a new or empty folder", str(folder), "Choose another name.")
    package = name.replace("-", "_")
    if importlib.util.find_spec(package) is not None:
        raise refused("DIR", "a name that no installed package has", name, "Try my-hospital.")
    needs = ["covary[flower]", *(["torch"] if with_torch else [])]
    words = {
        "name": name,
        "package": package,
        "model": "network" if with_torch else "model",
        "dependencies": ", ".join(f'"{need}"' for need in needs),
        "install": " ".join(f"'{need}'" for need in needs),
    }
    kind = "torch" if with_torch else "jax"
    files = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        f"{package}/server.py": "server.py.txt",
        f"{package}/client.py": f"{kind}/client.py.txt",
        f"{package}/task.py": f"{kind}/task.py.txt",
    }
    texts = {written: Template(_text(source)).substitute(words) for written, source in files.items()}
    texts |= {f"deploy/{unit}": _AtWords(_text(f"deploy/{unit}.txt")).substitute(words) for unit in UNITS}
    texts["deploy/nginx.conf"] = gate()
    try:
        (folder / package).mkdir(parents=True)
        (folder / "deploy").mkdir()
        (folder / package / "__init__.py").touch()
        for written, text in texts.items():
            (folder / written).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written ({error.strerror}). Choose another place.") from None
    return folder / package
