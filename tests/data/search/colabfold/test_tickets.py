"""A query ends in its result or in an error that says what to do, whatever the server says and however often."""

from __future__ import annotations

import itertools
import json

import pytest

from fastfold.data.search.colabfold import msa_server as protocol
from fastfold.data.search.colabfold.msa_server import TicketServer
from fastfold.errors import ConfigError, NetworkError
from fastfold.utils.download.http import USER_AGENT
from tests.helpers.loopback import Request, loopback
from tests.helpers.stand_in_msa_server import StandIn, msa_server

QUERY = ">101\nMKVL\n"


class Time:
    """A clock that moves when somebody waits."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)

    def now(self) -> float:
        return sum(self.waits)


def client(
    url: str, time: Time | None = None, said: list[str] | None = None, **settings: float
) -> TicketServer:
    """A client that does not really wait."""
    time = time or Time()
    say = (said if said is not None else []).append
    return TicketServer(url, say=say, pause=time.pause, now=time.now, timeout_s=5, **settings)  # type: ignore[arg-type]


def test_a_query_is_posted_asked_for_and_downloaded() -> None:
    stand_in, time, said = StandIn(["PENDING", "RUNNING", "RUNNING"]), Time(), list[str]()
    with msa_server(stand_in) as server:
        result = client(server.url, time, said).result("msa", QUERY, "env")
    assert result == stand_in.result("msa", "env", ["MKVL"])
    assert stand_in.queries == [("msa", "env", ["MKVL"])]
    assert [(request.method, request.path) for request in server.requests] == [
        ("POST", "/ticket/msa"),
        *[("GET", "/ticket/t-0")] * 3,
        ("GET", "/result/download/t-0"),
    ]
    assert {request.headers["User-Agent"] for request in server.requests} == {USER_AGENT}
    assert USER_AGENT.startswith("fastfold/")
    assert len(said) == 2  # each state once
    assert len(time.waits) == 3


@pytest.mark.parametrize("status", ["UNKNOWN", "RATELIMIT"])
def test_a_query_that_was_not_taken_is_sent_again(status: str) -> None:
    stand_in = StandIn([status, status])
    with msa_server(stand_in) as server:
        client(server.url).result("msa", QUERY, "env")
    assert [request.method for request in server.requests] == ["POST", "POST", "POST", "GET"]


def test_a_ticket_that_was_forgotten_is_asked_for_anew_and_a_limit_is_waited_for() -> None:
    stand_in = StandIn(["PENDING", "RATELIMIT", "RUNNING", "UNKNOWN"])
    with msa_server(stand_in) as server:
        client(server.url).result("msa", QUERY, "env")
    assert [request.method for request in server.requests] == ["POST", "GET", "GET", "GET", "POST", "GET"]


@pytest.mark.parametrize(
    "state",
    ["RATELIMIT", "RUNNING", *(pytest.param(x, marks=pytest.mark.slow) for x in ("UNKNOWN", "PENDING"))],
)
def test_waiting_backs_off_and_ends(state: str) -> None:
    stand_in, time = StandIn([state] * 1000), Time()
    with msa_server(stand_in) as server, pytest.raises(NetworkError) as error:
        client(server.url, time, patience_s=3600).result("msa", QUERY, "env")
    assert f"no result after 1:00:00 (the server says {state})" in str(error.value)
    assert "Received results are kept" in str(error.value)
    assert 3600 - 70 < sum(time.waits) < 3600 * 1.1
    assert 3.6 <= time.waits[0] <= 4.4
    assert max(time.waits) <= 66
    assert time.waits[20] > 50


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("ERROR", "failed on this query"),
        ("MAINTENANCE", "under maintenance"),
        ("HELLO", "unknown status 'HELLO'"),
    ],
)
@pytest.mark.parametrize("before", [[], ["PENDING"]])
def test_an_end_without_a_result_says_what_to_do(state: str, expected: str, before: list[str]) -> None:
    with msa_server(StandIn([*before, state])) as server, pytest.raises(NetworkError, match=expected):
        client(server.url).result("pair", QUERY, "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, b"<html>Welcome</html>"), "is not valid JSON .*is this the address of an MSA server"),
        ((200, b"[1]"), r"expected a ticket, found \[1\]; is this the address of an MSA server"),
        ((200, b"[" * 100_000), "is nested too deeply"),
        ((200, b"{}"), "unknown status 'None'"),
        ((200, b'{"status": ["COMPLETE"]}'), "unknown status"),
        ((200, b'{"status": "COMPLETE"}'), "expected a ticket from the server"),
        (
            (200, json.dumps({"status": "PENDING", "id": "../../etc"}).encode()),
            "expected a ticket from the server",
        ),
        ((200, json.dumps({"status": "COMPLETE", "id": 5}).encode()), "expected a ticket"),
        ((404, b""), "answers 404"),
        ((403, b""), "answers 403"),
        ((200, bytes((1 << 20) + 1)), "more than 1,048,576 bytes"),
    ],
)
def test_answers_that_make_no_sense_end_it(answer: tuple[int, bytes], expected: str) -> None:
    with msa_server(StandIn(answers=[answer])) as server, pytest.raises(NetworkError, match=expected):
        client(server.url).result("msa", QUERY, "env")
    assert len(server.requests) == 1


def test_a_failing_gateway_is_asked_again() -> None:
    stand_in = StandIn(answers=[(503, b""), None, (502, b""), (500, b"")])
    with msa_server(stand_in) as server:
        assert client(server.url).result("msa", QUERY, "env") == stand_in.result("msa", "env", ["MKVL"])
    assert len(server.requests) == 5


@pytest.mark.parametrize("drop", [0, 1, 50])
def test_a_download_that_breaks_is_made_again(drop: int) -> None:
    stand_in = StandIn(drops=[drop, drop, None])
    with msa_server(stand_in) as server:
        assert client(server.url).result("msa", QUERY, "env") == stand_in.result("msa", "env", ["MKVL"])
    assert len(server.requests) == 4


def test_a_download_that_always_breaks_ends() -> None:
    time = Time()
    with (
        msa_server(StandIn(drops=[10] * 100)) as server,
        pytest.raises(NetworkError, match="gave up after 6 attempts"),
    ):
        client(server.url, time).result("msa", QUERY, "env")
    assert len(time.waits) == 5


def test_a_download_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_RESULT", 100)
    with msa_server(StandIn()) as server, pytest.raises(NetworkError, match="more than any valid answer"):
        client(server.url).result("msa", QUERY, "env")


def test_a_server_that_is_not_there_says_so() -> None:
    with msa_server(StandIn()) as server:
        url = server.url
    time = Time()
    with pytest.raises(NetworkError, match=f"cannot reach {url}/ticket/msa: Connection refused"):
        client(url, time).result("msa", QUERY, "env")
    assert len(time.waits) == 5


def test_a_server_that_says_nothing_is_given_up() -> None:
    def silent(request: object) -> None:
        stop.wait(20)

    import threading

    from tests.helpers.loopback import loopback

    stop = threading.Event()
    with loopback(silent) as server:
        hasty = TicketServer(server.url, timeout_s=0.05, pause=lambda seconds: None)
        with pytest.raises(NetworkError, match="timed out"):
            hasty.result("msa", QUERY, "env")
        stop.set()


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SearchSources\.server: expected the address of a server"):
        TicketServer("colabfold")


@pytest.mark.parametrize("length", ["²", "-1", "1e3", "9" * 5000, ""])
def test_a_length_that_is_no_number_is_an_error_at_once(length: str) -> None:
    said = list[str]()
    with (
        loopback(lambda request: request.send(200, b"{}", {"Content-Length": length})) as server,
        pytest.raises(NetworkError, match="expected a Content-Length in digits"),
    ):
        client(server.url, said=said).result("msa", QUERY, "env")
    assert said == []


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    ticks = itertools.count(0.0, 3700.0)
    with msa_server(StandIn()) as server:
        slow = TicketServer(server.url, pause=lambda seconds: None, now=lambda: next(ticks), timeout_s=5)
        with pytest.raises(NetworkError, match="did not arrive within"):
            slow.result("msa", QUERY, "env")


def test_a_redirect_gets_no_credentials() -> None:
    with loopback(lambda request: request.send(200, b"{}")) as other:

        def answer(request: Request) -> None:
            if request.method == "POST":
                request.send(200, json.dumps({"id": "t", "status": "COMPLETE"}).encode())
            else:
                request.send(302, headers={"Location": f"{other.url}/file"})

        with loopback(answer) as server:
            client = TicketServer(server.url, secrets={"Authorization": "Basic secret"})
            assert client.result("msa", ">101\nMK\n", "env") == b"{}"
    assert [request.headers.get("Authorization") for request in server.requests] == ["Basic secret"] * 2
    assert "Authorization" not in other.requests[0].headers


def test_a_refused_login_says_what_to_check() -> None:
    with (
        loopback(lambda request: request.send(401)) as server,
        pytest.raises(NetworkError, match=r"answers 401 .*check them, or ask its owner") as caught,
    ):
        TicketServer(server.url, pause=lambda seconds: None).result("msa", "", "env")
    assert (caught.value.status, len(server.requests)) == (401, 1)
