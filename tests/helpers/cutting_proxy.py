"""A proxy on this machine that ends every connection after a number of bytes of the answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

EVERY = 1 << 16


@dataclass
class CuttingProxy:
    """A running proxy.

    Attributes:
        url: Its address, in place of the server's.
        connections: How many connections it has forwarded.
        cuts: How many of them it has ended.
    """

    url: str
    connections: int = 0
    cuts: int = 0


@contextlib.contextmanager
def cutting_proxy(server: str, *, every: int = EVERY) -> Iterator[CuttingProxy]:
    """Forward connections to a server until the end of the block, each for ``every`` bytes of its answers."""
    target = urlsplit(server)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = CuttingProxy(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def forward(client: socket.socket) -> None:
        with client, socket.create_connection((target.hostname, target.port)) as upstream:
            threading.Thread(target=_copy, args=(client, upstream), daemon=True).start()
            left = every
            with contextlib.suppress(OSError):
                while left and (block := upstream.recv(left)):
                    client.sendall(block)
                    left -= len(block)
            proxy.cuts += not left
            for end in (client, upstream):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                proxy.connections += 1
                threading.Thread(target=forward, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
