"""A proxy on this machine that cuts answers after some bytes, or sends them slowly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class Proxy:
    """Forwards connections to a server.

    Attributes:
        url: Its address.
        cut_after: Bytes of each connection's answers after which it is closed, as at the end of a file; None for all.
        piece: Most bytes that are sent at once.
        delay_s: Pause after each piece.
        cuts: Number of connections that were cut.
    """

    url: str
    cut_after: int | None = None
    piece: int = 1 << 16
    delay_s: float = 0.0
    cuts: int = 0

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward both directions of a connection until either side ends."""
        with client, server:
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            sent = 0
            with suppress(OSError):
                while piece := server.recv(self.piece):
                    left = len(piece) if self.cut_after is None else self.cut_after - sent
                    client.sendall(piece[:left])
                    sent += len(piece)
                    if left < len(piece):
                        self.cuts += 1
                        break
                    time.sleep(self.delay_s)
            for side in (client, server):
                with suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)  # closing alone ends nothing while another thread reads

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while piece := client.recv(1 << 16):
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)


@contextmanager
def forwarding(address: str) -> Iterator[Proxy]:
    """Yield a proxy of a server until the end of the block."""
    parts = urlsplit(address)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection((parts.hostname or "", parts.port or 80))
                    threading.Thread(target=proxy.forward, args=(client, server), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)
