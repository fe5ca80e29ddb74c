"""Heads, bodies and answers have a time, and the rest of a refused request is dropped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from fastfold.products.serve.limits import RequestLimits, patient_protocol


def serve(messages: list[dict[str, Any]], *, allowed: bool = True, slow_send: bool = False) -> list[Any]:
    """Return what the application read, and what was sent."""
    read: list[Any] = []
    sent: list[Any] = []
    answers: list[tuple[str, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message: Any) -> None:
        if slow_send:
            await asyncio.sleep(60)
        sent.append(message)

    limits = RequestLimits(
        app,
        max_body=10,
        body_seconds=0.1,
        send_seconds=0.1,
        max_requests=3,
        max_own=2,
        hosts=None,
        user=lambda headers: "ada" if allowed else None,
        answered=lambda method, status: answers.append((method, status)),
    )
    asyncio.run(limits({"type": "http", "method": "POST", "path": "/v1/jobs", "headers": []}, receive, send))
    return [read, [message.get("status") for message in sent if "status" in message], answers]


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_reaches_the_application_in_one_piece():
    assert serve([part(b"abc", True), part(b"def")]) == [[b"abcdef"], [200], [("POST", 200)]]


def test_bodies_that_are_too_large_or_too_slow_do_not_reach_it():
    assert serve([part(b"x" * 8, True), part(b"x" * 3, True)]) == [[], [413], [("POST", 413)]]
    assert serve([part(b"x", True)]) == [[], [408], [("POST", 408)]]
    assert serve([{"type": "http.disconnect"}]) == [[], [], []]


def test_bodies_of_unknown_clients_do_not_reach_it():
    messages = [part(b"abc")]
    assert serve(messages, allowed=False)[0] == [b""]
    assert messages == [part(b"abc")]  # no answer ended


@pytest.mark.parametrize(
    ("parts", "left"),
    [(["x" * 11, "y", "z"], 0), (["x" * 11, "y" * 11, "z"], 1), (["x" * 11, "y" * 10, "z", "w"], 1)],
)
def test_the_rest_of_a_refused_body_is_dropped_up_to_the_limit(parts: list[str], left: int):
    messages = [part(one.encode(), more=i < len(parts) - 1) for i, one in enumerate(parts)]
    assert serve(messages) == [[], [413], [("POST", 413)]]
    assert len(messages) == left


def test_a_client_that_does_not_take_its_answer_is_given_up():
    assert serve([part(b"abc")], slow_send=True)[1] == []


def test_the_protocol_is_uvicorns_with_a_limit():
    from uvicorn.protocols.http.h11_impl import H11Protocol

    assert issubclass(patient_protocol(1.0, 3), H11Protocol)


@pytest.mark.parametrize("max_connections", [1, 2, 3])
def test_only_beyond_the_limit_the_longest_waiting_connection_is_closed(max_connections: int) -> None:
    """One connection that sends its head, and two that wait."""

    class Transport:
        def __init__(self) -> None:
            self.is_closed = False

        def close(self) -> None:
            self.is_closed = True

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return ("127.0.0.1", 1) if name.endswith("name") else default

    async def connect() -> list[bool]:
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        config, state = Config(app=lambda *_: None, lifespan="off"), ServerState()
        config.load()
        kind, transports = patient_protocol(60.0, max_connections), []
        for _ in range(3):
            protocol = kind(config=config, server_state=state, app_state={})
            transports.append(Transport())
            protocol.connection_made(transports[-1])  # type: ignore[arg-type]
        return [one.is_closed for one in transports]

    closed = [False] * 3
    if max_connections < 3:
        closed[0] = True
    assert asyncio.run(connect()) == closed


class Held:
    """Requests that the application holds until it is told."""

    def __init__(self, max_body: int = 10, body_seconds: float = 5.0, **options: Any) -> None:
        self.release = asyncio.Event()
        self.statuses: list[tuple[str, int]] = []
        self.inside = 0
        given = {"max_requests": 100, "max_own": 100, "hosts": None, "user": self.user} | options
        self.limits = RequestLimits(
            self.app,
            max_body=max_body,
            body_seconds=body_seconds,
            send_seconds=1.0,
            answered=lambda method, status: self.statuses.append((method, status)),
            **given,
        )

    def user(self, headers: Any) -> str | None:
        return headers.get(b"user", b"").decode() or None

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.inside += 1
        if scope["path"] != "/healthz":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200})
        self.inside -= 1

    async def ask(self, path: str = "/v1/jobs", body: bytes = b"", **headers: str) -> list[tuple[int, bytes]]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return part(body)

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"content-length": str(len(body)), **headers}
        raw = [(name.encode(), value.encode()) for name, value in given.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "client": ("1.2.3.4", 5)}
        await self.limits(scope, receive, send)
        status = next(message["status"] for message in sent if "status" in message)
        return [(status, b"".join(message.get("body", b"") for message in sent))]


def test_requests_at_once_are_limited_by_user_and_in_all_but_health_is_answered():
    async def run() -> None:
        held = Held(max_requests=3, max_own=2)
        tasks = [asyncio.create_task(held.ask(user="ada")) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert (await held.ask(user="ada"))[0][0] == 429
        tasks.append(asyncio.create_task(held.ask(user="bob")))
        await asyncio.sleep(0.01)
        ((status, body),) = await held.ask(user="eve")
        assert (status, json.loads(body)["error"]) == (
            503,
            "the server answers 3 requests at once; try again",
        )
        assert (await held.ask("/healthz"))[0][0] == 200
        held.release.set()
        assert [(await task)[0][0] for task in tasks] == [200, 200, 200]
        assert (await held.ask(user="ada"))[0][0] == 200

    asyncio.run(run())


def test_bodies_at_once_take_their_turns():
    """One of the largest fits; a second waits until it is answered, or is refused after its time."""

    async def run() -> None:
        held = Held(max_body=10)
        tasks = [asyncio.create_task(held.ask(user="ada", body=b"x" * 10)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert held.inside == 1
        small = asyncio.create_task(held.ask(user="ada"))
        await asyncio.sleep(0.05)
        assert held.inside == 2
        held.release.set()
        assert [(await task)[0][0] for task in (*tasks, small)] == [200] * 6
        late = Held(max_body=10, body_seconds=0.1)
        tasks = [asyncio.create_task(late.ask(user="ada", body=b"x" * 10)) for _ in range(3)]
        await asyncio.sleep(0.3)
        late.release.set()
        assert sorted([(await task)[0][0] for task in tasks]) == [200, 503, 503]

    asyncio.run(run())


def test_other_names_of_the_server_are_refused():
    async def run() -> None:
        held = Held(hosts={"localhost", "::1"})
        held.release.set()
        for host, status in (
            ("localhost:8470", 200),
            ("[::1]:80", 200),
            ("evil.example.org", 400),
            ("", 400),
        ):
            assert (await held.ask(user="ada", host=host))[0][0] == status

    asyncio.run(run())
