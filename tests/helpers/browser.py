"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1400,1500",
)


class Browser:
    """One page in a browser of its own; use it as a context manager.

    Attributes:
        messages: What the page wrote to its console or raised since :meth:`reset`, one text each.
        requests: Addresses that the page asked for since then, in order.
    """

    def __init__(self, profile: Path) -> None:
        program = next((found for name in _NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip(f"needs a browser, one of {', '.join(_NAMES)}")
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._number, self._unread = 0, b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def place() -> None:  # the browser reads from 3 and writes to 4
            for source, place in ((os.dup(to_browser), 3), (os.dup(from_browser), 4)):
                os.dup2(source, place)

        with open(profile / "browser.log", "wb") as log:
            self._process = subprocess.Popen(
                [program, *_FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"],
                preexec_fn=place,
                close_fds=False,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None

    def __enter__(self) -> Browser:
        try:
            self.reset()
        except BaseException:
            self.__exit__()
            raise
        return self

    def reset(self) -> None:
        """Empty the page in a new session, without the settings, messages and requests of the last one."""
        last, self._session = self._session, None
        if last is not None:
            self.call("Target.detachFromTarget", sessionId=last)
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Page.navigate", url="about:blank")
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.messages.clear()
        self.requests.clear()

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(120.0)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path | str) -> None:
        """Go to a file or an address."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())

    def type(self, selector: str, text: str) -> None:
        """Put text into a field, as if it were pasted."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()"
        )
        self.call("Input.insertText", text=text)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 90.0) -> Any:
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}; {self.messages}"
            time.sleep(0.05)
        return value

    def mouse(self, kind: str, x: float, y: float, *, down: bool = False) -> None:
        """``mouseMoved``, ``mousePressed`` or ``mouseReleased`` at a place in CSS pixels of the window."""
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" or down else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=int(down), **button)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        x, y = self.place(selector, 0.5, 0.5)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, down=True)
        self.mouse("mouseReleased", x, y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the button at one place and release it at another one."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, down=True)
        for share in (0.3, 0.7, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, down=True)
        self.mouse("mouseReleased", *end)

    def box(self, selector: str) -> dict[str, float]:
        """``x``, ``y``, ``width`` and ``height`` of an element in the window, after it was scrolled to."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); return e.getBoundingClientRect().toJSON(); })()"
        )
        assert found is not None, selector
        return dict(found)

    def place(self, selector: str, across: float, down: float) -> tuple[float, float]:
        """A place in an element, by shares of its width and height."""
        box = self.box(selector)
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def screenshot(self, path: Path, selector: str | None = None) -> Path:
        """A picture of the window, or of one element."""
        clip = {} if selector is None else {"clip": {**self.box(selector), "scale": 1}}
        if clip:
            scroll = self.evaluate("[window.scrollX, window.scrollY]")
            clip["clip"]["x"] += scroll[0]
            clip["clip"]["y"] += scroll[1]
        data = self.call("Page.captureScreenshot", format="png", **clip)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(parameters["exceptionDetails"])[:2000])
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
        ):
            self.messages.append(
                " ".join(str(x.get("value", x.get("description"))) for x in parameters["args"])
            )
        elif message.get("method") == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
