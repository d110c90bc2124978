"""Downloading the official EMNIST archive: resumable, checked by sha256, never a partial file under its final name."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from covary.data.idx import Official, sha256_of
from covary.errors import CovaryError

ARCHIVE = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
BLOCK = 1 << 20
LARGEST = 2**31  # bytes of an archive; EMNIST's has 562 million
TIMEOUT = 60  # seconds without an answer
AGAIN = "The same command resumes the download."


class Step(NamedTuple):
    """Progress: `done` of `total` bytes of `what`; `total` is None if the server does not report it."""

    what: str
    done: int
    total: int | None


def fetch_emnist(root: Path, split: str, official: Mapping[str, Official], url: str = ARCHIVE) -> Iterator[Step]:
    """Download the four files of a split into `root`, and yield the progress. A second call resumes the download.

    The archive is downloaded as `emnist.zip.part`. A file gets its final name only after its sha256 matches, and the
    archive is removed only when all files are there.
    """
    wanted = {name: file for name, file in official.items() if name.startswith(f"emnist-{split}-")}
    missing = {n: f for n, f in wanted.items() if not (root / n).is_file() or sha256_of(root / n) != f.sha256}
    if not missing:
        return
    part = root / "emnist.zip.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield from _download(url, part)
        yield from _extract(part, root, missing, url)
        part.unlink()
    except OSError as error:
        raise CovaryError(
            f"{root} cannot be written ({error}). Choose another folder, or free some space. {AGAIN}"
        ) from None


def _download(url: str, part: Path) -> Iterator[Step]:
    """Complete the archive: resume it if the server can, else download a new file that replaces it at the end."""
    have = part.stat().st_size if part.exists() else 0
    fresh = part.with_suffix(".new")
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing left to send: the archive is complete
            return
        raise CovaryError(f"{url} answered {error.code} {error.reason}. {AGAIN}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CovaryError(f"{url} cannot be reached ({error}). Check the address. {AGAIN}") from None

    resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    have = have if resumed else 0
    target = part if resumed or not part.exists() else fresh
    length = answer.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    with answer, target.open("ab" if resumed else "wb") as file:
        while True:
            try:
                block = answer.read(BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise CovaryError(f"The download of {url} stopped after {have:,} bytes ({error}). {AGAIN}") from None
            if not block:
                break
            file.write(block)
            have += len(block)
            if have > LARGEST:
                raise CovaryError(
                    f"{url} sends more than {LARGEST:,} bytes, so it is not the archive. Remove {target}."
                )
            yield Step("downloading", have, total)
    if total is not None and have < total:
        raise CovaryError(f"The download of {url} stopped after {have:,} of {total:,} bytes. {AGAIN}")
    if target == fresh:
        if not zipfile.is_zipfile(fresh):
            fresh.unlink()
            raise CovaryError(f"{url} did not send the archive. The partial download is kept. {AGAIN}")
        fresh.replace(part)


def _extract(archive: Path, root: Path, wanted: Mapping[str, Official], url: str) -> Iterator[Step]:
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = {Path(info.filename).name: info for info in bundle.infolist() if not info.is_dir()}
            for name, expected in wanted.items():
                if name not in members or members[name].file_size != expected.size:
                    raise zipfile.BadZipFile(f"{name} is missing or does not have {expected.size:,} bytes")
                scratch = root / f"{name}.part"
                with bundle.open(members[name]) as source, scratch.open("wb") as target:
                    done = 0
                    while block := source.read(BLOCK):
                        done += target.write(block)
                        yield Step(f"unpacking {name}", done, expected.size)
                    target.flush()
                    os.fsync(target.fileno())
                if sha256_of(scratch) != expected.sha256:
                    raise zipfile.BadZipFile(f"the sha256 of {name} does not match")
                scratch.rename(root / name)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        archive.unlink()
        for name in wanted:
            (root / f"{name}.part").unlink(missing_ok=True)
        raise CovaryError(
            f"The archive from {url} was damaged ({error}) and is removed. The same command downloads it again."
        ) from None
