"""Headless Chromium for tests, driven over the DevTools pipe: nothing to install but Debian's chromium."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def chromium_or_skip() -> str:
    """Path of Chromium. Without one the test is skipped, and in CI it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    message = "no Chromium on PATH (Debian: apt-get install chromium)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


class Page:
    """One page of one browser process."""

    def __init__(self, chromium: str, width: int, height: int, dark: bool = False) -> None:
        self._profile = tempfile.mkdtemp(prefix="moebench-browser-")
        from_browser, self._write_end = os.pipe()
        self._read_end, to_us = os.pipe()

        def place() -> None:
            a, b = os.dup(from_browser), os.dup(to_us)  # out of the way of 3 and 4
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=place, close_fds=False,
        )  # fmt: skip
        os.close(from_browser)
        os.close(to_us)
        self._buffer, self._next, self.events = b"", 0, []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t for t in targets if t["type"] == "page")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.appear(width, height, dark)

    def appear(self, width: int, height: int, dark: bool = False) -> None:
        """Show what is loaded from here on in a window of this size, phones' below 600, and in a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write_end)
        os.close(self._read_end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there; what happened before is forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)

    def screenshot(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[str]:
        """Errors and exceptions on the console."""
        found = [e for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        found += [
            e for e in self.events if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"
        ]
        found += [
            e for e in self.events if e["method"] == "Runtime.consoleAPICalled" and e["params"]["type"] == "error"
        ]
        return [json.dumps(event["params"]) for event in found]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself and inline data left out."""
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def call(self, method: str, **parameters: object) -> dict:
        """A DevTools command of this page."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: object) -> dict:
        self._next += 1
        message: dict = {"id": self._next, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                return answer["result"]

    def _until(self, method: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not any(event["method"] == method for event in self.events):
            assert time.monotonic() < end, f"no {method} within {timeout_s} s"
            self._receive()

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read_end, 1 << 16)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        answer = json.loads(text)
        if "method" in answer:
            self.events.append(answer)
        return answer
