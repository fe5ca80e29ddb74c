"""An answer is whole, small enough and in time, or it is an error with the address."""

from __future__ import annotations

import itertools

import pytest

from fastfold.errors import NetworkError
from fastfold.utils.download.answers import Retries, json_answer, read_answer
from tests.helpers.loopback import Request, loopback


def tries(waits: list[float], attempts: int = 6, **settings: object) -> Retries:
    """Attempts that do not wait."""
    return Retries(attempts, pause=waits.append, **settings)  # type: ignore[arg-type]


def test_pauses_double_up_to_a_minute_and_are_told() -> None:
    waits: list[float] = []
    said: list[str] = []
    with (
        loopback(lambda request: request.send(500)) as server,
        pytest.raises(NetworkError, match=r"answers 500 .*; gave up after 9 attempts") as error,
    ):
        read_answer(server.url, limit=9, retries=tries(waits, 9, say=said.append))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert said[2].endswith("; trying again in 4 s")
    assert (error.value.status, error.value.temporary) == (500, True)


@pytest.mark.parametrize(("asked", "wait"), [("7", 7.0), ("3000", 60.0), ("soon", 1.0), ("-1", 1.0)])
def test_the_pause_that_a_server_asks_for_is_made(asked: str, wait: float) -> None:
    waits: list[float] = []

    def answer(request: Request) -> None:
        request.send(*((503, b"", {"Retry-After": asked}) if len(server.requests) == 1 else (200, b"x")))

    with loopback(answer) as server:
        assert read_answer(server.url, limit=1, retries=tries(waits)) == b"x"
    assert waits == [wait]


def test_only_chosen_statuses_are_tried_again() -> None:
    with loopback(lambda request: request.send(429, b'{"error": "too \\u001bmany"}')) as server:
        for statuses, number in (((503,), 1), ((429,), 3)):
            server.requests.clear()
            with pytest.raises(NetworkError) as error:
                read_answer(server.url, limit=1, retries=tries([], 3, statuses=statuses))
            assert (len(server.requests), error.value.explanation) == (number, "too  many")


def test_failures_in_a_row_are_counted() -> None:
    retries = tries([], 2)
    refused = NetworkError("no", temporary=True)
    for _ in range(5):
        retries.failed(refused)
        retries.reset()
    retries.failed(refused)
    with pytest.raises(NetworkError, match="no; gave up after 2 attempts"):
        retries.failed(refused)


def test_an_answer_that_is_cut_is_asked_for_again_and_sent_again() -> None:
    def answer(request: Request) -> None:
        request.send(200, request.body * 1000, drop_after=1500 if len(server.requests) < 3 else None)

    with loopback(answer) as server:
        assert read_answer(server.url, limit=2000, data=b"ab", retries=tries([])) == b"ab" * 1000
        assert [request.body for request in server.requests] == [b"ab"] * 3


@pytest.mark.parametrize("length", [True, False])
def test_an_answer_beyond_the_limit_is_not_read(length: bool) -> None:
    def answer(request: Request) -> None:
        request.handler.send_response(200)
        if length:
            request.handler.send_header("Content-Length", str(1 << 30))
        request.handler.end_headers()
        while True:  # until the client is gone
            request.handler.wfile.write(bytes(1 << 16))

    with (
        loopback(answer) as server,
        pytest.raises(NetworkError, match=f"{server.url}: the server sends more than 100,000 bytes"),
    ):
        read_answer(server.url, limit=100_000)


def test_an_answer_that_drips_is_given_up() -> None:
    with (
        loopback(lambda request: request.send(200, b"{}")) as server,
        pytest.raises(NetworkError, match="did not arrive within 1:30"),
    ):
        read_answer(server.url, limit=9, seconds=90, now=itertools.count(0.0, 100.0).__next__)


def test_words_of_a_server_do_not_control_a_terminal() -> None:
    def answer(request: Request) -> None:
        request.handler.send_response(404, "\x1b[2Jgone\x07")
        request.handler.send_header("Content-Length", "0")
        request.handler.end_headers()

    with loopback(answer) as server, pytest.raises(NetworkError, match=r"answers 404 \( \[2Jgone \)$"):
        read_answer(server.url, limit=9)


@pytest.mark.parametrize("text", [b"<html>", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b"1" * 5000])
def test_other_text_than_json_names_the_address(text: bytes) -> None:
    with pytest.raises(
        NetworkError, match=r"^http://x/y(:1)?: .*; is this the address of a server of tests\?$"
    ):
        json_answer("http://x/y", text, server="a server of tests")
