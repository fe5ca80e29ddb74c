"""Limits on requests: bytes of bodies, requests at once, and seconds that a client may take for each part."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestLimits:
    """ASGI middleware that refuses large bodies and too many requests, and gives up slow clients.

    The body of a refused request is received and dropped within the limits, because many clients send all of it before
    they read the answer, and would find a broken connection instead.

    Args:
        app: The application.
        max_body: Largest number of bytes of a body, and of all that are held at once; others wait. Reading one takes
            up to sixteen times its bytes.
        body_seconds: Seconds in which a body must have arrived, and in which its turn must come.
        send_seconds: Seconds in which a client must take each piece of an answer, and send the rest of a refused body.
        max_requests: Largest number of requests at once; ``/healthz`` is answered beyond it.
        max_own: Largest number of requests at once of a user, or of an address without a known user.
        hosts: Names by which the server may be reached; None for any.
        user: Returns the name of the user by a request's headers, None for an unknown one, whose body is not read.
        answered: Called with method and status of each request.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body: int,
        body_seconds: float,
        send_seconds: float,
        max_requests: int,
        max_own: int,
        hosts: Collection[str] | None,
        user: Callable[[Mapping[bytes, bytes]], str | None],
        answered: Callable[[str, int], None],
    ) -> None:
        self._app, self._max_body = app, max_body
        self._body_seconds, self._send_seconds = body_seconds, send_seconds
        self._max_requests, self._max_own, self._hosts = max_requests, max_own, hosts
        self._user, self._answered = user, answered
        self._active: Counter[str] = Counter()
        self._held = 0  # bytes of bodies
        self._dropping = 0  # requests whose bodies are dropped
        self._released = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        arriving = _Arriving(receive)

        async def patient(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and not arriving.is_complete:
                await asyncio.wait_for(send({**message, "more_body": True}), self._send_seconds)
                await self._drop(arriving)
                message = {"type": "http.response.body", "body": b""}
            if message["type"] == "http.response.start":
                self._answered(scope["method"], message["status"])
                # Browsers must not guess that a file of results is a page.
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            await asyncio.wait_for(send(message), self._send_seconds)

        headers = dict(scope["headers"])
        if self._hosts is not None and host_of(headers) not in self._hosts:
            # Otherwise a page of another site could reach the server under a name that it resolves to this machine.
            await _refuse(patient, 400, "unknown name of the server in the header Host")
            return
        user = self._user(headers)
        own = user if user is not None else str((scope.get("client") or ("",))[0])
        if scope["path"] != "/healthz":
            if self._active.total() >= self._max_requests:
                await _refuse(
                    patient, 503, f"the server answers {self._max_requests} requests at once; try again"
                )
                return
            if self._active[own] >= self._max_own:
                await _refuse(
                    patient, 429, f"{self._max_own} requests at once are the limit of a user; try again"
                )
                return
        self._active[own] += 1
        try:
            await self._answer(scope, arriving, patient, headers, is_known=user is not None)
        finally:
            self._active -= Counter((own,))

    async def _drop(self, arriving: _Arriving) -> None:
        """Receive the rest of a body without keeping it."""
        if self._dropping >= self._max_requests:
            return
        self._dropping += 1
        try:
            with contextlib.suppress(asyncio.TimeoutError, _RefusedBody):
                await asyncio.wait_for(self._read(arriving, keep=False), self._send_seconds)
        finally:
            self._dropping -= 1

    async def _answer(
        self,
        scope: Scope,
        arriving: _Arriving,
        patient: Send,
        headers: Mapping[bytes, bytes],
        *,
        is_known: bool,
    ) -> None:
        """Read the body of a request within the limits, and let the application answer."""
        length = headers.get(b"content-length", b"0")
        try:
            if not length.isdigit() or int(length[:20]) > self._max_body:
                raise _RefusedBody
            size = self._max_body if b"transfer-encoding" in headers else int(length[:20])
            async with self._holding(size if is_known else 0):
                body = await asyncio.wait_for(self._read(arriving), self._body_seconds) if is_known else b""
                if body is None:
                    return
                rest = iter([{"type": "http.request", "body": body, "more_body": False}])

                async def replay() -> Message:
                    return next(rest, None) or await arriving()

                with contextlib.suppress(asyncio.TimeoutError):  # uvicorn closes the connection
                    await self._app(scope, replay, patient)
        except _Full:
            await _refuse(patient, 503, "the server reads other large requests; try again")
        except _RefusedBody:
            text = f"the request is larger than {self._max_body:,} bytes, the limit of this server"
            await _refuse(patient, 413, text)
        except asyncio.TimeoutError:
            arriving.is_complete = True  # too slow to wait for the rest
            text = f"the request did not arrive within {self._body_seconds:g} seconds; send it faster"
            await _refuse(patient, 408, text)

    @contextlib.asynccontextmanager
    async def _holding(self, size: int) -> AsyncIterator[None]:
        """Hold bytes of memory for a body, once others have released enough of them."""
        try:
            async with self._released:
                fits = self._released.wait_for(lambda: self._held + size <= self._max_body)
                await asyncio.wait_for(fits, self._body_seconds)
                self._held += size
        except asyncio.TimeoutError:
            raise _Full from None
        try:
            yield
        finally:
            async with self._released:
                self._held -= size
                self._released.notify_all()

    async def _read(self, receive: Receive, *, keep: bool = True) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if keep:
                parts.append(piece)
            if size > self._max_body:
                raise _RefusedBody
            if not message.get("more_body"):
                return b"".join(parts)


class _Arriving:
    """Request whose body arrives; knows if it is complete."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.is_complete = receive, False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_complete = message["type"] == "http.disconnect" or not message.get("more_body")
        return message


class _RefusedBody(Exception):
    """Error for a body that is too large."""


class _Full(Exception):
    """Error for a body that does not get its turn."""


def host_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the name of the server in a request's header ``Host``, without the port and brackets."""
    name = headers.get(b"host", b"").decode("latin-1")
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


async def _refuse(send: Send, status: int, text: str) -> None:
    body, headers = _refusal(text)
    if status in (429, 503):
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refusal(text: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return body and headers of a refusal; some of its request may not be received, so the connection ends."""
    body = json.dumps({"error": text}).encode()
    size = str(len(body)).encode()
    return body, [
        (b"content-type", b"application/json"),
        (b"content-length", size),
        (b"connection", b"close"),
    ]


def patient_protocol(seconds: float, max_connections: int) -> type[H11Protocol]:
    """Return uvicorn's protocol with limits on connections that wait for the head of a request.

    ``seconds`` count from the connection, or from the last answer, until the head has arrived. Beyond
    ``max_connections``, the one that waits longest is closed for a new one. Errors are JSON.
    """
    waiting: dict[H11Protocol, None] = {}  # in the order of their begin

    class PatientProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections and waiting:
                next(iter(waiting)).transport.close()
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

        def send_400_response(self, msg: str) -> None:
            body, headers = _refusal(msg)
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch(self) -> None:
            self._deadline = self.loop.call_later(seconds, self._give_up)
            waiting[self] = None

        def _forget(self) -> None:
            waiting.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            waiting.pop(self, None)
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return PatientProtocol
