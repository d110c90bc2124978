"""Flower apps that no owner approved."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path


def hostile(folder: Path, mark: Path, name: str = "other-app", version: str = "1.0.0") -> Path:
    """An app that writes a file as soon as it is imported."""
    package = name.replace("-", "_") or "other_app"
    (folder / package).mkdir(parents=True)
    write = f"open({str(mark)!r}, 'w').close()\n"
    (folder / package / "__init__.py").write_text(write)
    text = "from flwr.{0}app import {1}App\n{2}app = {1}App()\n"
    for side in ("Client", "Server"):
        (folder / package / f"{side.lower()}.py").write_text(text.format(side.lower(), side, write))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndescription = "d"\nlicense = "l"\n'
        f'[tool.flwr.app]\npublisher = "{"you" if name else ""}"\n[tool.flwr.app.components]\n'
        f'serverapp = "{package}.server:app"\nclientapp = "{package}.client:app"\n'
    )
    return folder


def bundle(folder: Path) -> bytes:
    """A .fab file as Flower forms it, without its checks of the version."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        lines = (f"{name},{hashlib.sha256(text).hexdigest()},{8 * len(text)}" for name, text in files.items())
        archive.writestr(".info/CONTENT", "\n".join(lines))
    return content.getvalue()
