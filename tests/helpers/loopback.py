"""A web server on this machine for tests, which answers as a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """What a client asked for.

    Attributes:
        method: GET or POST.
        path: With the query.
        headers: As sent.
        body: Of a POST.
        handler: To answer with what :meth:`send` cannot do.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    handler: BaseHTTPRequestHandler

    def send(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        drop_after: int | None = None,
    ) -> None:
        """Answer; ``drop_after`` closes the connection after so many bytes of the body."""
        lines = {"Content-Length": str(len(body)), **(headers or {})}
        self.handler.send_response(status)
        for name, value in lines.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body[:drop_after])
        self.handler.close_connection = True

    def start_of_range(self) -> int:
        """First byte that a ``Range: bytes=N-`` asks for, 0 without."""
        return int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))


@dataclass
class Loopback:
    """A running server.

    Attributes:
        url: Its address.
        requests: What it was asked, in order.
    """

    url: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def loopback(answer: Callable[[Request], Any]) -> Iterator[Loopback]:
    """Serve on a free port until the end of the block; each request is given to ``answer``."""
    served = Loopback("")

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            request = Request(
                self.command, self.path, dict(self.headers.items()), self.rfile.read(length), self
            )
            served.requests.append(request)
            try:
                answer(request)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client wanted no more

        do_GET = do_POST = do_CONNECT = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send_file(request: Request, data: bytes, *, drop_after: int | None = None, etag: str = '"1"') -> None:
    """Answer with a file, from the byte on that was asked for."""
    start = request.start_of_range()
    if start >= len(data):
        request.send(416, headers={"Content-Range": f"bytes */{len(data)}"})
        return
    headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}", "ETag": etag}
    request.send(206, data[start:], headers, drop_after=drop_after)
