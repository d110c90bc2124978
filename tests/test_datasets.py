"""Reading data sets: the real files if they are available, and files with unexpected contents."""

import gzip
import hashlib
import http.server
import io
import struct
import threading
import zipfile

import numpy as np
import pytest
from helpers import DATA, needs_data

import covary as cv
from covary.data import datasets, download
from covary.data.download import fetch_emnist
from covary.data.idx import Official, read_idx, read_pair


@needs_data
def test_emnist_byclass_is_upright_and_whole():
    (x, y), (x_test, y_test) = cv.datasets.emnist_cut(DATA)
    assert (x.shape, x_test.shape) == ((97_523, 28, 28), (18_800, 28, 28))
    assert x.dtype == np.uint8
    assert set(y) == set(range(62))
    one = np.concatenate([x, x_test])[np.concatenate([y, y_test]) == 1].mean(axis=0)
    assert one.sum(axis=0).std() > 2 * one.sum(axis=1).std()  # a one is a vertical stroke, not a horizontal one


@needs_data
def test_paper_white_is_the_same_picture_inverted():
    ink, _ = datasets.emnist_cut(DATA)[1]
    paper, _ = datasets.emnist_cut(DATA, paper_white=True)[1]
    np.testing.assert_array_equal(paper, 255 - ink)


@needs_data
def test_a_model_sees_bytes_as_numbers_between_0_and_1():
    (x, y), _ = datasets.emnist_cut(DATA)
    model = cv.models.logistic_regression(784, 62)
    params = {"w": np.random.default_rng(0).normal(size=(62, 784)), "b": np.zeros(62)}
    as_bytes, as_numbers = (model.loss(params, (images[:50], y[:50])) for images in (x, x / 255))
    np.testing.assert_allclose(as_bytes, as_numbers, rtol=1e-12)


@needs_data
def test_a_file_under_anothers_name_is_recognised(tmp_path):
    images = (DATA / "emnist-mnist-test-images-idx3-ubyte.gz").read_bytes()
    labels = (DATA / "emnist-mnist-test-labels-idx1-ubyte.gz").read_bytes()
    (tmp_path / "emnist-mnist-train-images-idx3-ubyte.gz").write_bytes(images)
    (tmp_path / "emnist-mnist-train-labels-idx1-ubyte.gz").write_bytes(labels)
    with pytest.raises(cv.CovaryError, match=r"it is the official emnist-mnist-test-images.* under another name"):
        cv.datasets.emnist(tmp_path, "mnist")
    (tmp_path / "emnist-mnist-train-images-idx3-ubyte.gz").write_bytes(images[:-1000])
    with pytest.raises(cv.CovaryError, match=r"it has 2,483,884 bytes, the official file has 14,873,795"):
        cv.datasets.emnist(tmp_path, "mnist")


@needs_data
def test_the_four_hospitals():
    (x, y, hospital), (x_test, y_test) = cv.datasets.heart_disease(DATA / "fed-heart-disease.npz")
    data = cv.partition.by_group(x, y, hospital)
    assert data.sizes.tolist() == [243, 236, 99, 160]
    assert len(y_test) == 182
    assert set(y) == {0, 1}
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-4)
    assert np.isfinite(x_test).all()
    problem = cv.supervised(cv.models.logistic_regression(13, 2), data, (x_test, y_test))
    run = cv.simulate(cv.scaffold(0.1), problem, 30, local_epochs=2, batch_size=0.2)
    assert run.history["accuracy"][-1] > 0.75


def idx(shape, data=None, magic=None):
    magic = magic or (0x0803 if len(shape) == 3 else 0x0801)
    body = bytes(int(np.prod(shape))) if data is None else bytes(data)
    return gzip.compress(struct.pack(f">{1 + len(shape)}I", magic, *shape) + body)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated or not a gzip file"),
        (b"not gzip at all", "truncated or not a gzip file"),
        (idx((3, 2, 2))[:-12], "truncated or not a gzip file"),
        (idx((3, 2, 2), data=[1] * 11), "truncated.*1 bytes are missing"),
        (idx((3, 2, 2), data=[1] * 13), "longer than its header declares"),
        (idx((3,)), "is not a file of images: it holds labels; the files may be swapped"),
        (idx((3, 2, 2), magic=0x1234), "it starts with 0x00001234, not 0x00000803"),
        (idx((60_000, 60_000, 60_000), data=b""), "declares 216,000,000,000,000 bytes"),
    ],
    ids=["empty", "text", "truncated", "short", "long", "swapped", "magic", "huge"],
)
def test_a_file_with_unexpected_contents(tmp_path, content, says):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(cv.CovaryError, match=says):
        read_idx(path, "images", "Fetch it again.")


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(struct.pack(">II", 0x0801, 5) + bytes(200_000_000)))
    with pytest.raises(cv.CovaryError, match="longer than its header declares"):
        read_idx(path, "labels", "Fetch it again.")


def test_images_and_labels_of_different_length(tmp_path):
    (tmp_path / "i.gz").write_bytes(idx((3, 2, 2)))
    (tmp_path / "l.gz").write_bytes(idx((4,)))
    with pytest.raises(cv.CovaryError, match=r"has 3 images but .* has 4 labels"):
        read_pair(tmp_path / "i.gz", tmp_path / "l.gz", "Fetch both again.")


def test_folders_without_files_and_unknown_splits(tmp_path):
    with pytest.raises(
        cv.CovaryError, match=r"is missing. Fetch it with: covary data emnist --root .* --split byclass"
    ):
        cv.datasets.emnist(tmp_path)
    with pytest.raises(cv.CovaryError, match="split must be one of"):
        cv.datasets.emnist(tmp_path, "cursive")
    with pytest.raises(cv.CovaryError, match=r"is missing. On Debian: apt-get install dataset-fashion-mnist"):
        cv.datasets.fashion_mnist(tmp_path)
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(cv.CovaryError, match="cannot be read"):
        cv.datasets.heart_disease(tmp_path / "bad.npz")


def test_fashion_mnist_in_its_official_form(tmp_path):
    for part, count in (("train", 6), ("t10k", 2)):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx((count, 28, 28)))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx((count,), data=range(count)))
    (x, y), (x_test, _) = cv.datasets.fashion_mnist(tmp_path)
    assert (x.shape, y.tolist(), x_test.shape) == ((6, 28, 28), [0, 1, 2, 3, 4, 5], (2, 28, 28))


# --- the download, against a server on loopback ---


FILES = {f"emnist-mnist-{name}-ubyte.gz": name.encode() * 50_000 for name in ("train-images-idx3", "train-labels-idx1")}
OFFICIAL = {name: Official(hashlib.sha256(data).hexdigest(), len(data)) for name, data in FILES.items()}


def archive(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, data in files.items():
            bundle.writestr(f"gzip/{name}", data)
    return buffer.getvalue()


def damaged_stream():
    """A zip whose first compressed byte is not one that deflate knows."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in FILES.items():
            bundle.writestr(f"gzip/{name}", data)
    content = bytearray(buffer.getvalue())
    content[30 + len("gzip/") + len(next(iter(FILES)))] = 0x07
    return bytes(content)


class Server:
    """Serves one file; `limit` cuts an answer short, as a broken connection does."""

    def __init__(self, content, ranges=True):
        outer = self
        self.content, self.ranges, self.limit, self.asked = content, ranges, None, []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                start = 0
                asked = self.headers.get("Range")
                outer.asked.append(asked)
                if asked and outer.ranges:
                    start = int(asked.removeprefix("bytes=").removesuffix("-"))
                    if start >= len(outer.content):
                        self.send_error(416)
                        return
                self.send_response(206 if asked and outer.ranges else 200)
                self.send_header("Content-Length", str(len(outer.content) - start))
                if asked and outer.ranges:
                    self.send_header("Content-Range", f"bytes {start}-{len(outer.content) - 1}/{len(outer.content)}")
                self.end_headers()
                self.wfile.write(outer.content[start : outer.limit])

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/gzip.zip"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.http.shutdown()
        self.http.server_close()


def fetch(root, url):
    return list(fetch_emnist(root, "mnist", OFFICIAL, url))


def complete(root):
    return {path.name: path.read_bytes() for path in root.iterdir()} == FILES


def test_download_checks_and_unpacks(tmp_path):
    with Server(archive(FILES)) as server:
        steps = fetch(tmp_path / "new", server.url)
        assert complete(tmp_path / "new")  # and no archive or half-written file is left
        assert steps[0].total == len(server.content)
        assert fetch(tmp_path / "new", server.url) == []  # nothing to do
        assert len(server.asked) == 1


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "starts-over"])
def test_a_broken_download_is_resumed(tmp_path, ranges, monkeypatch):
    monkeypatch.setattr(download, "BLOCK", 1000)
    with Server(archive(FILES), ranges) as server:
        server.limit = 700_000
        with pytest.raises(cv.CovaryError, match=r"stopped after \d.* The same command resumes"):
            fetch(tmp_path, server.url)
        assert [path.name for path in tmp_path.iterdir()] == ["emnist.zip.part"]
        server.limit = None
        fetch(tmp_path, server.url)
        assert server.asked == [None, "bytes=700000-"]
    assert complete(tmp_path)


def test_a_complete_archive_is_not_downloaded_again(tmp_path):
    with Server(archive(FILES)) as server:
        (tmp_path / "emnist.zip.part").write_bytes(server.content)
        fetch(tmp_path, server.url)
    assert complete(tmp_path)


@pytest.mark.parametrize("damage", ["bytes", "content", "absent", "size", "stream"])
def test_a_damaged_archive_leaves_nothing_behind(tmp_path, damage):
    name = next(iter(FILES))
    content = {
        "bytes": archive(FILES)[:-40] + bytes(40),
        "content": archive({**FILES, name: bytes(len(FILES[name]))}),
        "absent": archive({n: d for n, d in FILES.items() if n != name}),
        "size": archive({**FILES, name: FILES[name] + b"more"}),
        "stream": damaged_stream(),
    }[damage]
    with Server(content) as server, pytest.raises(cv.CovaryError, match=r"was damaged .* and is removed"):
        fetch(tmp_path, server.url)
    assert not (tmp_path / name).exists()
    assert not list(tmp_path.glob("*.part"))


def test_a_damaged_file_is_downloaded_again(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data[:-1])
    with Server(archive(FILES)) as server:
        fetch(tmp_path, server.url)
    assert complete(tmp_path)


def test_a_server_that_is_absent_or_answers_with_an_error(tmp_path):
    for url in ("http://127.0.0.1:9/gzip.zip", "http://127.0.0.1:bad/x", "nope", "http://127.0.0.1/a b"):
        with pytest.raises(cv.CovaryError, match=r"cannot be reached .* The same command resumes"):
            fetch(tmp_path, url)
    (tmp_path / "file").write_text("")
    with Server(archive(FILES)) as server, pytest.raises(cv.CovaryError, match="cannot be written"):
        fetch(tmp_path / "file", server.url)


def test_a_page_in_place_of_the_archive_does_not_destroy_what_was_there(tmp_path):
    """A hotel's log-in page answers 200 to everything."""
    whole = archive(FILES)
    (tmp_path / "emnist.zip.part").write_bytes(whole[:500_000])
    kept = pytest.raises(cv.CovaryError, match="did not send the archive")
    with Server(b"<html>please log in</html>", ranges=False) as server, kept:
        fetch(tmp_path, server.url)
    with Server(whole) as server:
        fetch(tmp_path, server.url)
        assert server.asked == ["bytes=500000-"]
    assert complete(tmp_path)


def test_a_server_with_nothing_to_give(tmp_path):
    with Server(b"") as server, pytest.raises(cv.CovaryError, match="was damaged"):
        fetch(tmp_path, server.url)
