"""A headless Chromium driven by its DevTools protocol over a pair of pipes, which needs no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


class Tab:
    """One page.

    Attributes:
        errors: what it said on its console as an error or a warning, exceptions, and refusals of its security policy.
        asked: addresses that it tried to load.
        size: width and height of the window in which files are opened.
    """

    def __init__(self, out: int, into: int) -> None:
        self.out, self.into, self.number, self.rest = out, into, 0, b""
        self.session: str | None = None
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.size = (1280, 860)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command, and its answer."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.out, 1 << 16)
            assert part, "Chromium has ended"
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:800])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, file: Path, hash_: str = "", *, width: int = 0, height: int = 0, dark: bool = False) -> float:
        """Open a file, at the tab's size or another, and wait until it is drawn; returns the seconds until then, by its own clock."""
        width, height = width or self.size[0], height or self.size[1]
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=file.as_uri() + (f"#{hash_}" if hash_ else ""))
        self.wait("document.documentElement?.hasAttribute('data-drawn') && location.protocol === 'file:'")
        return float(self.js("document.documentElement.dataset.drawn")) / 1e3

    def js(self, expression: str) -> Any:
        """The value of an expression."""
        got = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, f"{expression}: {got['exceptionDetails']}"
        return got["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never true: {expression}; {self.errors}"
            time.sleep(0.02)

    def rect(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element of a selector, which is scrolled to."""
        found = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'nearest', inline: 'nearest'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        assert found, f"nothing is {selector}"
        return tuple(found)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """``mouseMoved``, ``mousePressed`` or ``mouseReleased``."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element."""
        left, top, width, height = self.rect(selector)
        assert width or height, f"{selector} is not on the screen"
        x, y = left + width / 2, top + height / 2
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """The mouse over a place of an element."""
        found = f"document.querySelector({json.dumps(selector)})?.matches(':hover')"
        until = time.monotonic() + 10
        while time.monotonic() < until:  # a page that was just drawn lets the first moves of the mouse fall
            left, top, width, height = self.rect(selector)
            self.mouse("mouseMoved", left + width * across, top + height * down)
            if self.js(found):
                return
            time.sleep(0.03)
        raise AssertionError(f"the mouse is never over {selector}")

    def key(self, key: str) -> None:
        """A key pressed and let go."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def text(self, selector: str) -> str:
        """What an element says."""
        found = self.js(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")
        assert found is not None, f"nothing is {selector}"
        return str(found)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def photograph(self, file: Path) -> None:
        """The window as a PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one tab."""
    assert PROGRAM is not None
    theirs, ours = os.pipe(), os.pipe()
    read_theirs, write_theirs = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1]))
    for end in (theirs[0], ours[1]):
        os.close(end)
    write_ours, read_ours = theirs[1], ours[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipes = f'exec "$0" "$@" 3<&{read_theirs} 4>&{write_theirs}'  # the protocol is on 3 and 4
        command = ["bash", "-c", pipes, PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(read_theirs, write_theirs)
        )
        os.close(read_theirs)
        os.close(write_theirs)
        try:
            tab = Tab(read_ours, write_ours)
            target = tab.send("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.send(f"{domain}.enable")
            yield tab
        finally:
            os.close(write_ours)
            process.kill()
            process.wait()
            os.close(read_ours)
