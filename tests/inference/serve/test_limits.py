"""Heads, bodies and answers have a time, and the rest of a refused request is not read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from fastfold.inference.serve.limits import RequestLimits, patient_protocol


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
        may_send=lambda headers: allowed,
        answered=lambda method, status: answers.append((method, status)),
    )
    asyncio.run(limits({"type": "http", "method": "POST", "headers": []}, receive, send))
    return [read, [message.get("status") for message in sent if "status" in message], answers]


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_reaches_the_application_in_one_piece():
    assert serve([part(b"abc", True), part(b"def")]) == [[b"abcdef"], [200], [("POST", 200)]]


def test_bodies_that_are_too_large_or_too_slow_do_not_reach_it():
    assert serve([part(b"x" * 8, True), part(b"x" * 3, True)]) == [[], [413], [("POST", 413)]]
    assert serve([part(b"x", True)]) == [[], [408], [("POST", 408)]]
    assert serve([{"type": "http.disconnect"}]) == [[], [], []]


def test_bodies_of_unknown_clients_are_not_read():
    messages = [part(b"abc")]
    assert serve(messages, allowed=False)[0] == [b""]
    assert len(messages) == 1


def test_a_client_that_does_not_take_its_answer_is_given_up():
    assert serve([part(b"abc")], slow_send=True)[1] == []


def test_the_protocol_is_uvicorns_with_a_limit():
    from uvicorn.protocols.http.h11_impl import H11Protocol

    assert issubclass(patient_protocol(1.0), H11Protocol)
