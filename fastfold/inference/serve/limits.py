"""Limits on requests: size of a body, and seconds that a client may take for a head, a body, and an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestLimits:
    """ASGI middleware that refuses large bodies and gives up slow clients.

    Limits are bytes of a body, seconds in which it must have arrived, and seconds for each piece of the answer. From
    its headers, ``may_send`` tells if the body of a request is read. ``answered`` is called with method and status.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body: int,
        body_seconds: float,
        send_seconds: float,
        may_send: Callable[[Mapping[bytes, bytes]], bool],
        answered: Callable[[str, int], None],
    ) -> None:
        self._app, self._max_body = app, max_body
        self._body_seconds, self._send_seconds = body_seconds, send_seconds
        self._may_send, self._answered = may_send, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def patient(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(scope["method"], message["status"])
                # Browsers must not guess that a file of results is a page.
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            await asyncio.wait_for(send(message), self._send_seconds)

        try:
            body = await self._body(scope, receive)
        except _RefusedBody:
            text = f"the request is larger than {self._max_body:,} bytes, the limit of this server"
            await _refuse(patient, 413, text)
            return
        except asyncio.TimeoutError:
            text = f"the request did not arrive within {self._body_seconds:g} seconds; send it faster"
            await _refuse(patient, 408, text)
            return
        if body is None:
            return
        rest = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(rest, None) or await receive()

        with contextlib.suppress(asyncio.TimeoutError):  # uvicorn closes the connection
            await self._app(scope, replay, patient)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None if the client left."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not self._may_send(headers):
            return b""  # the application refuses the request without it
        if not length.isdigit() or int(length[:20]) > self._max_body:
            raise _RefusedBody
        return await asyncio.wait_for(self._read(receive), self._body_seconds)

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise _RefusedBody
            if not message.get("more_body"):
                return b"".join(parts)


class _RefusedBody(Exception):
    """Error for a body that is too large."""


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # The rest of the request is not read, so the connection cannot be used again.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on the seconds until the head of a request has arrived.

    They count from the connection, or from the last answer.
    """

    class PatientProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                if self._deadline is None:
                    self._watch()
            else:
                self._forget()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            self._deadline = self.loop.call_later(seconds, self._give_up)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return PatientProtocol
