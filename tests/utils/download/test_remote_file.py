"""A file on a server reads as the same bytes, whatever the connection does, or ends in an error that says why."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest

from fastfold.errors import ConfigError, NetworkError
from fastfold.utils.download.answers import Retries
from fastfold.utils.download.http import USER_AGENT, check_url, open_url
from fastfold.utils.download.remote_file import MAX_READ, RemoteFile
from tests.helpers.loopback import Request, loopback, send_file

DATA = random.Random(0).randbytes(300_000)


def opened(url: str, waits: list[float] | None = None, attempts: int = 6) -> RemoteFile:
    """A remote file that does not wait."""
    pause = (waits if waits is not None else []).append
    return RemoteFile(url, retries=Retries(attempts, pause=pause), timeout=5)


def test_any_place_is_read_and_nothing_else_is_sent() -> None:
    with loopback(lambda request: send_file(request, DATA)) as server, opened(server.url) as file:
        assert file.ranges
        assert file.size == len(DATA)
        for offset, size in ((0, 10), (200_000, 1000), (5, 5), (299_990, 100), (len(DATA), 4), (10, 250_000)):
            file.seek(offset)
            assert file.read(size) == DATA[offset : offset + size]
            assert file.tell() == min(offset + size, len(DATA))
        assert {request.headers["User-Agent"] for request in server.requests} == {USER_AGENT}


def test_a_server_without_ranges_is_read_from_the_beginning() -> None:
    with loopback(lambda request: request.send(200, DATA)) as server, opened(server.url) as file:
        assert not file.ranges
        file.seek(200_000)
        assert file.read(50) == DATA[200_000:200_050]
        file.seek(100_000)
        assert file.read(50) == DATA[100_000:100_050]
        assert len(server.requests) == 2


def test_a_file_of_unknown_length_ends_where_it_ends() -> None:
    def answer(request: Request) -> None:
        request.handler.send_response(200)
        request.handler.end_headers()
        request.handler.wfile.write(DATA)

    with loopback(answer) as server, opened(server.url) as file:
        assert file.size is None
        assert file.read(len(DATA) + 5) == DATA


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_opened_again_where_it_stopped(ranges: bool) -> None:
    numbers = random.Random(1)

    def answer(request: Request) -> None:
        drop = numbers.choice([None, 100_000, 200_000, 10])
        if ranges:
            send_file(request, DATA, drop_after=drop)
        else:
            request.send(200, DATA, drop_after=drop)

    waits: list[float] = []
    with loopback(answer) as server, opened(server.url, waits, attempts=50) as file:
        assert file.read(len(DATA)) == DATA
        assert waits[0] == 1.0
        assert len(server.requests) == len(waits) + 1


def test_a_part_that_is_shorter_than_asked_for_is_continued() -> None:
    def answer(request: Request) -> None:
        start = request.start_of_range()
        part = DATA[start : start + 70_000]
        request.send(206, part, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(DATA)}"})

    waits: list[float] = []
    with loopback(answer) as server, opened(server.url, waits) as file:
        assert file.read(len(DATA)) == DATA
        assert waits == []


def test_bytes_after_a_part_are_not_of_the_file() -> None:
    def answer(request: Request) -> None:
        start = request.start_of_range()
        part = DATA[start : start + 70_000]
        place = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(DATA)}"}
        request.send(206, part + b"more", place)

    with loopback(answer) as server, opened(server.url) as file:
        assert file.read(len(DATA)) == DATA


def test_a_busy_server_is_asked_again_after_the_time_it_names() -> None:
    def answer(request: Request) -> None:
        if len(server.requests) < 3:
            request.send(503, b"busy", {"Retry-After": "7"})
        else:
            send_file(request, DATA)

    waits: list[float] = []
    with loopback(answer) as server, opened(server.url, waits) as file:
        assert file.read(100) == DATA[:100]
    assert waits == [7.0, 7.0]


def test_what_never_works_ends_with_back_off() -> None:
    waits: list[float] = []
    with loopback(lambda request: request.send(500)) as server, pytest.raises(NetworkError) as error:
        opened(server.url, waits, attempts=8)
    assert "the server answers 500" in str(error.value)
    assert "gave up after 8 attempts" in str(error.value)
    assert waits == [1, 2, 4, 8, 16, 32, 60]


def wrong_range(request: Request) -> None:
    request.send(206, DATA, {"Content-Range": f"bytes 5-{len(DATA) + 4}/{len(DATA) + 5}"})


def no_range(request: Request) -> None:
    request.send(206, DATA)


def packed(request: Request) -> None:
    request.send(200, DATA, {"Content-Encoding": "gzip"})


def insecure(request: Request) -> None:
    request.send(302, headers={"Location": "ftp://127.0.0.1/file"})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda request: request.send(404), "answers 404"),
        (lambda request: request.send(204), "answers 204"),
        (wrong_range, "expected bytes from 0 on, found 'bytes 5-"),
        (no_range, "expected bytes from 0 on, found ''"),
        (packed, "compresses the file"),
        (insecure, "not secure; the redirect was not followed"),
        (lambda request: request.send(302, headers={"Location": "/again"}), "answers 302"),
    ],
)
def test_answers_that_make_no_sense_end_it_at_once(answer: Callable[[Request], None], expected: str) -> None:
    with loopback(answer) as server, pytest.raises(NetworkError, match=expected):
        opened(server.url)


@pytest.mark.parametrize("second", ["version", "size"])
def test_a_file_that_changes_meanwhile_is_noticed(second: str) -> None:
    def answer(request: Request) -> None:
        first = len(server.requests) == 1
        data = DATA if first or second == "version" else DATA + b"x"
        send_file(request, data, drop_after=1000 if first else None, etag='"1"' if first else '"2"')

    with (
        loopback(answer) as server,
        opened(server.url) as file,
        pytest.raises(NetworkError, match="changed on the server"),
    ):
        file.read(len(DATA))


def test_a_file_that_is_shorter_than_it_says_is_no_file() -> None:
    headers = {"Content-Length": str(len(DATA) + 10)}
    with (
        loopback(lambda request: request.send(200, DATA, headers)) as server,
        opened(server.url) as file,
        pytest.raises(
            NetworkError, match=r"closed after 300,000 of 300,010 bytes\); gave up after 6 attempts"
        ),
    ):
        file.read(len(DATA) + 10)


def test_a_position_behind_the_end_is_an_error() -> None:
    def answer(request: Request) -> None:
        if request.start_of_range():
            send_file(request, DATA[:1000])
        else:
            send_file(request, DATA)

    with loopback(answer) as server, opened(server.url) as file:
        file.seek(100_000)
        with pytest.raises(NetworkError, match="ends before byte 100,000: it is truncated"):
            file.read(1)


def test_a_redirect_of_a_get_is_followed_with_its_range() -> None:
    def answer(request: Request) -> None:
        if request.path == "/old":
            request.send(302, headers={"Location": f"{server.url}/new"})
        else:
            send_file(request, DATA)

    with loopback(answer) as server, opened(f"{server.url}/old") as file:
        file.seek(1000)
        assert file.read(10) == DATA[1000:1010]


def test_a_redirect_of_a_post_is_not_followed() -> None:
    with (
        loopback(lambda request: request.send(307, headers={"Location": "/elsewhere"})) as server,
        pytest.raises(NetworkError, match="nothing was sent there"),
    ):
        open_url(server.url, data=b"secret")
    assert [request.path for request in server.requests] == ["/"]


def test_no_more_is_read_at_once_than_is_allowed() -> None:
    with loopback(lambda request: send_file(request, DATA)) as server, opened(server.url) as file:
        for size in (-1, None, MAX_READ + 1):
            with pytest.raises(ValueError, match="not allowed"):
                file.read(size)
        with pytest.raises(ValueError, match="from the beginning"):
            file.seek(-1)


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://a/b", "https://", "http://a:port/", "http://a b/", "file:///etc"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"mirror=: expected the address of a server"):
        check_url(url, setting="`mirror`")


def test_an_address_may_end_in_a_slash() -> None:
    assert check_url("https://example.org:8080/a/", setting="`mirror`") == "https://example.org:8080/a"


def test_an_empty_file_has_no_first_byte() -> None:
    """A server that sends parts has none of it."""

    def answer(request: Request) -> None:
        if "Range" in request.headers:
            request.send(416, headers={"Content-Range": "bytes */0"})
        else:
            request.send(200)

    with loopback(answer) as server, opened(server.url) as file:
        assert (file.size, file.read(1)) == (0, b"")


def test_the_rest_is_read_up_to_a_limit() -> None:
    with loopback(lambda request: send_file(request, DATA)) as server, opened(server.url) as file:
        file.seek(1000)
        assert file.read_rest(limit=len(DATA) - 1000) == DATA[1000:]
        file.seek(0)
        with pytest.raises(NetworkError, match="sends more than 299,999 bytes"):
            file.read_rest(limit=len(DATA) - 1)


@pytest.mark.parametrize(("seconds", "said"), [(90.0, "1:30"), (float("inf"), "10:00")])
def test_a_server_that_drips_is_given_up(seconds: float, said: str) -> None:
    def drip(request: Request) -> None:
        send_file(request, DATA, drop_after=1)
        for _ in range(100):
            request.handler.wfile.write(b"x")
            request.handler.wfile.flush()
            time.sleep(0.005)

    clock = itertools.count(0.0, 20.0).__next__
    with (
        loopback(drip) as server,
        RemoteFile(server.url, seconds=seconds, now=clock, timeout=5) as file,
        pytest.raises(NetworkError, match=f"did not arrive within {said}"),
    ):
        file.read(len(DATA))
