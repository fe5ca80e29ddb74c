"""The published parameters arrive whole, once, and nothing but what was asked for, whatever the server does."""

from __future__ import annotations

import io
import resource
import shutil
import signal
import tarfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fastfold.cli import main
from fastfold.errors import ConfigError, NetworkError, WeightsError, WriteError
from fastfold.evoformer.weights import download as archives
from fastfold.evoformer.weights.download import download_weights
from fastfold.evoformer.weights.published import ARCHIVE, PUBLISHED, SUMS, file_name, read_sums, weights_files
from fastfold.utils.download.answers import Retries
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.hashing import file_digest
from tests.conftest import REPOSITORY
from tests.helpers.forked import Forked
from tests.helpers.loopback import Loopback, Request, loopback, send_file

ORACLES = REPOSITORY / "tests" / "oracles"
MONOMER = (ORACLES / "synthetic_monomer" / "params.npz").read_bytes()
MULTIMER = (ORACLES / "synthetic_multimer" / "params.npz").read_bytes()
PTM = PUBLISHED["monomer_ptm"]


def tar_of(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    """An archive; a member may be a header without data."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            if isinstance(data, tarfile.TarInfo):
                tar.addfile(data)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def published() -> dict[str, bytes | tarfile.TarInfo]:
    """Members like those of the published archive, each network a small one with bytes of its own."""
    found: dict[str, bytes | tarfile.TarInfo] = {"LICENSE": b"CC BY 4.0"}
    for network in PUBLISHED["all"]:
        found[file_name(network)] = changed(MULTIMER if "multimer" in network else MONOMER, network)
    return found


def changed(npz: bytes, mark: str) -> bytes:
    """The same parameters in a file with other bytes: a comment at the archive's end."""
    comment = mark.encode()
    return npz[:-2] + len(comment).to_bytes(2, "little") + comment


MEMBERS = published()
TAR = tar_of(MEMBERS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of weights, and connections that do not wait."""
    monkeypatch.setenv("FASTFOLD_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(archives, "RemoteFile", partial(RemoteFile, timeout=5))
    monkeypatch.setattr(archives, "Retries", partial(Retries, pause=lambda seconds: None))
    return tmp_path / "weights"


@pytest.fixture
def server() -> Iterator[Loopback]:
    """Serves the archive."""
    with loopback(lambda request: send_file(request, TAR)) as served:
        yield served


def check(folder: Path, networks: tuple[str, ...]) -> None:
    """These networks are there with their bytes and their record, and nothing else is."""
    names = {file_name(network) for network in networks}
    assert {name: (folder / name).read_bytes() for name in names} == {name: MEMBERS[name] for name in names}
    assert {path.name for path in folder.iterdir()} == names | {SUMS, "LICENSE", ".lock"}
    assert read_sums(folder) == {name: file_digest(folder / name) for name in names}


def requested(server: Loopback) -> list[int]:
    """First bytes of the parts that were asked for."""
    return [request.start_of_range() for request in server.requests]


@pytest.mark.long
def test_a_set_arrives_and_nothing_else_is_asked_for(server: Loopback, folder: Path) -> None:
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    paths = download_weights(
        PTM, mirror=server.url, say=said.append, progress=lambda *step: steps.append(step)
    )
    assert paths == [folder / file_name(network) for network in PTM] == weights_files("monomer_ptm")
    check(folder, PTM)
    assert {request.path for request in server.requests} == {f"/{ARCHIVE}"}
    assert [step[0] for step in steps if step[1] == step[2]] == [file_name(network) for network in PTM]
    assert said == []
    # Again: all is there, and nothing is asked.
    number = len(server.requests)
    download_weights(PTM, mirror=server.url, say=said.append)
    assert len(server.requests) == number
    assert said == [f"already present and verified: {', '.join(file_name(network) for network in PTM)}"]
    # What sets have in common is not fetched twice.
    download_weights(PUBLISHED["all"], mirror=f"{server.url}/{ARCHIVE}")
    check(folder, PUBLISHED["all"])


def test_one_network_of_the_end_is_had_without_the_rest(server: Loopback, folder: Path) -> None:
    download_weights(["model_5_multimer_v3"], mirror=server.url)
    check(folder, ("model_5_multimer_v3",))
    # A request for the header of each member, and none for what is in them.
    headers = [_offset(file_name(network)) - 512 for network in PUBLISHED["all"][1:]]
    assert requested(server) == [0, *headers]


@pytest.mark.parametrize("network", ["model_5_multimer_v3", "model_3"])
def test_a_server_that_ignores_ranges_serves_too(folder: Path, network: str) -> None:
    with loopback(lambda request: request.send(200, TAR)) as server:
        download_weights([network, "model_1"], mirror=server.url)
        assert len(server.requests) == 1
    check(folder, (network, "model_1"))


@pytest.mark.parametrize("ranges", [True, False])
def test_connections_that_drop_are_taken_up_again(folder: Path, ranges: bool) -> None:
    def answer(request: Request) -> None:
        drop = 150_000 if len(server.requests) % 3 else None
        if ranges:
            send_file(request, TAR, drop_after=drop)
        else:
            request.send(200, TAR, drop_after=drop)

    with loopback(answer) as server:
        download_weights(PUBLISHED["multimer"][:2], mirror=server.url)
    check(folder, PUBLISHED["multimer"][:2])


def test_a_server_that_leads_elsewhere_is_followed(folder: Path) -> None:
    def answer(request: Request) -> None:
        if request.path.startswith("/new"):
            send_file(request, TAR)
        else:
            request.send(301, headers={"Location": f"{server.url}/new"})

    with loopback(answer) as server:
        download_weights(["model_2_ptm"], mirror=server.url)
    check(folder, ("model_2_ptm",))


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(folder: Path) -> None:
    first, limit = file_name(PTM[0]), 1 << 17
    end = _offset(first) + limit

    def drops(request: Request) -> None:
        send_file(request, TAR, drop_after=max(0, end - request.start_of_range()))

    with loopback(drops) as server, pytest.raises(NetworkError) as error:
        download_weights(PTM[:1], mirror=server.url)
    assert "Run the same command again to resume" in str(error.value)
    (begun,) = folder.glob("*.partial")
    assert begun.read_bytes() == MEMBERS[first][:limit]  # type: ignore[index]
    said: list[str] = []
    with loopback(lambda request: send_file(request, TAR)) as server:
        download_weights(PTM[:1], mirror=server.url, say=said.append)
        assert max(requested(server)) == end
    assert said == [f"{first}: resuming after {limit:,} of {len(MEMBERS[first]):,} bytes"]  # type: ignore[arg-type]
    check(folder, PTM[:1])


def test_what_arrived_of_another_archive_is_not_continued(folder: Path) -> None:
    folder.mkdir()
    stale = folder / f"{file_name(PTM[0])}.01234567.partial"
    stale.write_bytes(b"other")
    other = folder / f"{file_name(PTM[1])}.01234567.partial"
    other.write_bytes(b"of another file")
    with loopback(lambda request: send_file(request, TAR)) as server:
        download_weights(PTM[:1], mirror=server.url)
    assert not stale.exists()
    assert other.exists()


def _offset(name: str) -> int:
    with tarfile.open(fileobj=io.BytesIO(TAR)) as tar:
        return tar.getmember(name).offset_data


HUGE = tarfile.TarInfo(file_name(PTM[0]))
HUGE.size = 9 << 30
NEGATIVE = bytearray(tarfile.TarInfo(file_name(PTM[0])).tobuf(tarfile.GNU_FORMAT))
NEGATIVE[124:136] = b"\xff" * 12
LINK = tarfile.TarInfo(file_name(PTM[0]))
LINK.type, LINK.linkname = tarfile.SYMTYPE, "/etc/passwd"


def checksummed(header: bytearray) -> bytes:
    """A header whose checksum is right."""
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            b"<html><body>Sign in to continue</body></html>" * 100,
            "not a tar archive, or damaged .it starts with b'<html>",
        ),
        (b"", "not a tar archive"),
        (TAR[: len(TAR) // 3], "truncated"),
        (
            TAR[: _offset(file_name(PTM[0])) + 100],
            "is truncated or damaged .a member 'params_model_1_ptm.npz' of",
        ),
        (tar_of({"LICENSE": b"x"}), "ends without params_model_1_ptm.npz"),
        (tar_of({file_name(PTM[0]): b"x" * 5000}), "failed its check .* and was removed"),
        (tar_of({file_name(PTM[0]): MULTIMER}), "monomer or multimer network contrary to its name"),
        (tar_of({file_name(PTM[0]): MONOMER[:-5000] + bytes(5000)}), "failed its check"),
        (tar_of({f"../{file_name(PTM[0])}": MONOMER}), "ends without"),
        (tar_of({f"/tmp/{file_name(PTM[0])}": MONOMER}), "ends without"),
        (tar_of({"x": LINK}), "ends without"),
        (HUGE.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "is truncated or damaged .* of 9,663,676,416 bytes"),
        (checksummed(NEGATIVE) + bytes(1024), "is damaged .the size of its member"),
        (tar_of({"LICENSE": b"x"})[:1024] + b"garbage" * 1000, "damaged .at byte 1,024"),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_what_is_no_archive_of_parameters_leaves_no_file(
    folder: Path, data: bytes, expected: str, ranges: bool
) -> None:
    def answer(request: Request) -> None:
        if ranges and data:
            send_file(request, data)
        else:
            request.send(200, data)

    with loopback(answer) as server, pytest.raises((WeightsError, NetworkError), match=expected):
        download_weights(PTM[:1], mirror=server.url)
    assert not list(folder.glob("*.npz"))


def test_a_flipped_bit_is_noticed_and_removed(folder: Path) -> None:
    bad = bytearray(TAR)
    bad[_offset(file_name(PTM[0])) + len(MONOMER) // 2] ^= 1
    with (
        loopback(lambda request: send_file(request, bytes(bad))) as server,
        pytest.raises(WeightsError, match=r"failed its check .* and was removed"),
    ):
        download_weights(PTM[:1], mirror=server.url)
    assert not list(folder.glob("*params*"))


def test_a_server_that_sends_wrong_parts_is_left(folder: Path) -> None:
    def answer(request: Request) -> None:
        start = request.start_of_range()
        wrong = start + 512 if start else 0
        request.send(206, TAR[wrong:], {"Content-Range": f"bytes {wrong}-{len(TAR) - 1}/{len(TAR)}"})

    with (
        loopback(answer) as server,
        pytest.raises(NetworkError, match="expected bytes from"),
    ):
        download_weights(PTM[:1], mirror=server.url)
    assert not list(folder.glob("*.npz"))


def test_without_a_network_the_error_says_what_to_put_where(folder: Path) -> None:
    with loopback(lambda request: None) as server:
        url = server.url
    with pytest.raises(NetworkError) as error:
        download_weights(PUBLISHED["multimer"][:2], mirror=url)
    message = str(error.value)
    for part in (
        f"cannot reach {url}/{ARCHIVE}: Connection refused",
        "params_model_1_multimer_v3.npz, params_model_2_multimer_v3.npz (2 files of 373 MB)",
        f"copy {ARCHIVE} (about 5.6 GB",
        f"copy the files into {folder}",
        "mirror=",
        "FASTFOLD_WEIGHTS",
    ):
        assert part in message


@pytest.mark.parametrize("layout", ["archive", "folder", "params", "file"])
def test_a_mirror_on_the_disk(tmp_path: Path, folder: Path, layout: str) -> None:
    mirror = tmp_path / "mirror"
    inner = mirror / "params" if layout == "params" else mirror
    inner.mkdir(parents=True)
    if layout in ("archive", "file"):
        (mirror / ARCHIVE).write_bytes(TAR)
    else:
        for name in map(file_name, PTM[:2]):
            (inner / name).write_bytes(MEMBERS[name])  # type: ignore[arg-type]
    download_weights(PTM[:2], mirror=str(mirror / ARCHIVE if layout == "file" else mirror))
    check(folder, PTM[:2])


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        ("nowhere", "mirror=.*nowhere.*: cannot be read"),
        ("empty", f"expected {ARCHIVE} or params_model_1_ptm.npz in it, found neither"),
        ("ftp://example.org", "expected the address of a server"),
    ],
)
def test_a_mirror_that_has_nothing_says_so(tmp_path: Path, mirror: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=expected):
        download_weights(PTM, mirror=mirror if "://" in mirror else str(tmp_path / mirror))


def test_the_first_sight_of_a_file_is_recorded_and_held_to(server: Loopback, folder: Path) -> None:
    folder.mkdir()
    name = file_name(PTM[0])
    (folder / name).write_bytes(MONOMER)  # put there by hand
    assert weights_files(PTM[0]) == [folder / name]
    assert read_sums(folder) == {name: file_digest(folder / name)}
    (folder / name).write_bytes(changed(MONOMER, "other"))
    for use in (lambda: weights_files("model_1_ptm"), lambda: download_weights(PTM[:1], mirror=server.url)):
        with pytest.raises(
            WeightsError, match=r"expected SHA-256 .*SHA256SUMS.*the file was changed or damaged"
        ):
            use()
    # A download of something else than was recorded is refused as well.
    (folder / name).unlink()
    with pytest.raises(WeightsError, match=r"failed its check .expected SHA-256 .*SHA256SUMS"):
        download_weights(PTM[:1], mirror=server.url)
    assert not (folder / name).exists()
    (folder / SUMS).unlink()
    download_weights(PTM[:1], mirror=server.url)
    check(folder, PTM[:1])


DiskUsage = namedtuple("DiskUsage", "total used free")


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    server: Loopback, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(len(MEMBERS[file_name(network)]) for network in PTM[:2]) + (16 << 20)  # type: ignore[arg-type]
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, free))
    with pytest.raises(WriteError, match=r"the remaining download needs .* MB; free some space"):
        download_weights(PTM[:2], mirror=server.url)
    assert not list(folder.glob("params*"))
    free += 1
    download_weights(PTM[:2], mirror=server.url)
    check(folder, PTM[:2])


def client(limit: int, arguments: Sequence[str]) -> int:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return main(["weights", "download", *arguments])


def start(*arguments: str, limit: int = 0) -> Forked:
    """The command in a process of its own, whose files may have ``limit`` bytes."""
    return Forked(client, limit, arguments)


def test_a_write_that_fails_keeps_what_arrived(server: Loopback, folder: Path) -> None:
    process = start("model_1_ptm", "--mirror", server.url, limit=len(MONOMER) // 2)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert "cannot write" in err
    assert "Run the same command again to resume" in err
    (begun,) = folder.glob("*.partial")
    assert 0 < begun.stat().st_size <= len(MONOMER) // 2
    download_weights(PTM[:1], mirror=server.url)
    check(folder, PTM[:1])


def slowly(request: Request, stop: threading.Event) -> None:
    """Send the archive, and nothing more than half of a member before ``stop`` is set."""
    start = request.start_of_range()
    half = _offset(file_name(PTM[0])) + len(MONOMER) // 2
    request.handler.send_response(206)
    request.handler.send_header("Content-Range", f"bytes {start}-{len(TAR) - 1}/{len(TAR)}")
    request.handler.send_header("Content-Length", str(len(TAR) - start))
    request.handler.send_header("ETag", '"1"')
    request.handler.end_headers()
    request.handler.wfile.write(TAR[start : max(start, half)])
    request.handler.wfile.flush()
    stop.wait(60)
    request.handler.wfile.write(TAR[max(start, half) :])
    request.handler.close_connection = True


def wait_for(condition: Callable[[], object], process: Forked) -> None:
    """Wait until something is so, while a process runs."""
    end = time.monotonic() + 100
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_killed_download_goes_on_and_two_at_once_do_the_work_once(
    folder: Path, number: signal.Signals
) -> None:
    go_on = threading.Event()
    with loopback(lambda request: slowly(request, go_on)) as server:
        first = start("model_1_ptm", "--mirror", server.url)
        wait_for(lambda: any(path.stat().st_size for path in folder.glob("*.partial")), first)
        second = start("model_1_ptm", "--mirror", server.url)
        assert second.stderr is not None
        assert any("waiting for another process" in line for line in second.stderr)
        asked = len(server.requests)
        first.send_signal(number)
        first.communicate(timeout=60)
        assert first.returncode != 0
        wait_for(lambda: len(server.requests) > asked, second)  # it took over
        go_on.set()
        out, err = second.communicate(timeout=100)
        assert second.returncode == 0, err
    assert f"{file_name(PTM[0])}: resuming after " in err
    assert out == f"{folder / file_name(PTM[0])}\n"
    check(folder, PTM[:1])


@pytest.mark.parametrize(("scheme", "number"), [("http", 1), ("HTTP", 1), ("https", 0)])
def test_a_mirror_without_encryption_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, scheme: str, number: int
) -> None:
    def unreachable(url: str, retries: Retries) -> None:
        raise NetworkError(f"cannot reach {url}")

    monkeypatch.setattr(archives, "RemoteFile", unreachable)
    said: list[str] = []
    with (
        pytest.raises(NetworkError, match="cannot reach"),
        archives.open_pieces(f"{scheme}://mirror.example", [], said.append),
    ):
        raise AssertionError("not reached")
    assert [f"mirror='{scheme}://mirror.example': http:// does not protect" in line for line in said] == [
        True
    ] * number
