"""Downloading the official EMNIST archive: resumable, checked, and never half a file under a whole file's name."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from covary.data.idx import Official, sha256_of
from covary.errors import CovaryError

ARCHIVE = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
BLOCK = 1 << 20
TIMEOUT = 60  # seconds without an answer
AGAIN = "Run the same command again: it goes on from there."


class Step(NamedTuple):
    """How far the work is: of `what`, `done` out of `total` bytes (or None where the server does not say)."""

    what: str
    done: int
    total: int | None


def fetch_emnist(root: Path, split: str, official: Mapping[str, Official], url: str = ARCHIVE) -> Iterator[Step]:
    """Bring the four files of a split into `root`; yields its progress. Called again, it goes on where it stopped.

    The archive grows as `emnist.zip.part`. A file gets its own name only once its sha256 is the official one, and the
    archive is removed only when all files are there.
    """
    wanted = {name: file for name, file in official.items() if name.startswith(f"emnist-{split}-")}
    missing = {n: f for n, f in wanted.items() if not (root / n).is_file() or sha256_of(root / n) != f.sha256}
    if not missing:
        return
    root.mkdir(parents=True, exist_ok=True)
    part = root / "emnist.zip.part"
    yield from _download(url, part)
    yield from _extract(part, root, missing, url)
    part.unlink()


def _download(url: str, part: Path) -> Iterator[Step]:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            if answer.status != 206:  # the server sends the whole file
                have = 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length else None
            with part.open("ab" if have else "wb") as file:
                while block := answer.read(BLOCK):
                    file.write(block)
                    have += len(block)
                    yield Step("downloading", have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing left to send: it was all there
            return
        raise CovaryError(
            f"{url} answered {error.code} {error.reason}. Try again later; the download will resume."
        ) from None
    except (OSError, ValueError) as error:
        raise CovaryError(f"The download of {url} stopped after {have:,} bytes ({error}). {AGAIN}") from None
    if total is not None and have < total:
        raise CovaryError(f"The download of {url} stopped after {have:,} of {total:,} bytes. {AGAIN}")


def _extract(archive: Path, root: Path, wanted: Mapping[str, Official], url: str) -> Iterator[Step]:
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = {Path(info.filename).name: info for info in bundle.infolist() if not info.is_dir()}
            for name, expected in wanted.items():
                if name not in members or members[name].file_size != expected.size:
                    raise zipfile.BadZipFile(f"{name} is not in it, or not of {expected.size:,} bytes")
                scratch = root / f"{name}.part"
                with bundle.open(members[name]) as source, scratch.open("wb") as target:
                    done = 0
                    while block := source.read(BLOCK):
                        done += target.write(block)
                        yield Step(f"unpacking {name}", done, expected.size)
                    target.flush()
                    os.fsync(target.fileno())
                if sha256_of(scratch) != expected.sha256:
                    raise zipfile.BadZipFile(f"the sha256 of {name} is not the official one")
                scratch.rename(root / name)
    except zipfile.BadZipFile as error:
        archive.unlink()
        for name in wanted:
            (root / f"{name}.part").unlink(missing_ok=True)
        raise CovaryError(
            f"The archive from {url} is damaged ({error}) and was removed. Run the same command again to fetch it anew."
        ) from None
