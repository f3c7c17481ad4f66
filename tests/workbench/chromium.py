"""Chromium without a window, driven through the pipe of its DevTools protocol: a page is opened, keys are pressed, the mouse is
moved, and everything that it complains of or asks the network for is remembered."""

from __future__ import annotations

import base64
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

from patience import HANG_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One page."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._count, self._session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == self._count:
                assert "error" not in received, (method, received)
                return received["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        one, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(one)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, of: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(of["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{of['entry']['text']} {of['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(of["args"])[:600])
        elif method == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])

    def open(self, address: str, ready: str = "document.body && document.body.dataset.ready") -> None:
        """Open a page and wait until it says it is ready."""
        self.call("Page.navigate", url=address)
        self.until(ready)

    def js(self, expression: str) -> Any:
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; gives its value."""
        began = time.monotonic()
        while not (value := self.js(expression)):
            assert time.monotonic() - began < HANG_SECONDS, f"never true: {expression}; {self.complaints}"
            time.sleep(0.01)
        return value

    def viewport(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the colours that are preferred."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def click(self, selector: str, times: int = 1) -> None:
        """The mouse, on the middle of an element: once, or so often that all of its text is selected."""
        self.click_at(*self.middle(selector), times)

    def click_at(self, x: float, y: float, times: int = 1) -> None:
        """The mouse, on a place of the window."""
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def drag(self, x: float, to: float, y: float) -> None:
        """The mouse, from one place of the window to another beside it, with its button held."""
        for kind, at in (("mousePressed", x), ("mouseMoved", to), ("mouseReleased", to)):
            self.call("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1)

    def move(self, x: float, y: float) -> None:
        """The mouse, to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, scrolled into view, once it stands still for some frames: what comes late moves it."""
        box = self.js(
            f"(async () => {{ const e = () => document.querySelector({json.dumps(selector)}); "
            "const place = () => { const b = e().getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }; "
            "const frame = () => new Promise((done) => requestAnimationFrame(done)); "
            "e().scrollIntoView({block: 'center'}); let last = place(); "
            "for (let still = 0; still < 3; ) { await frame(); const now = place(); "
            "still = String(now) === String(last) ? still + 1 : 0; last = now; } return last; })()"
        )
        return box[0], box[1]

    def picture(self, path: Path, whole: bool = False) -> None:
        """What it looks like, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def pipes() -> None:
            ours = [os.dup2(to_read, 20), os.dup2(from_write, 21)]
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=pipes,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(to_write, from_read)
        finally:
            process.terminate()
            process.wait(HANG_SECONDS)
            os.close(to_write)
            os.close(from_read)
