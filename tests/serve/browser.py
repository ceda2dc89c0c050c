"""Headless Chromium over its DevTools protocol: enough to open a page, run script in it, press keys and take pictures."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx


def binary() -> str | None:
    """Chromium on this machine, if there is one."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    return next((path for path in found if path), None)


class Browser:
    """A page in a browser of its own. What its console said and which requests it made are kept."""

    def __init__(self, folder: Path, width: int = 1200, height: int = 800) -> None:
        import websocket

        path = binary()
        assert path is not None
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            "--no-first-run",
        ]
        flags += ["--remote-allow-origins=*", f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen([path, *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "DevTools listening" in line)
        port = re.search(r":(\d+)/", line)[1]  # pyright: ignore[reportOptionalSubscript]
        pages = httpx.get(f"http://127.0.0.1:{port}/json").json()
        address = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
        self.socket = websocket.create_connection(address, timeout=30)
        self.numbers, self.console, self.requests = itertools.count(1), list[str](), list[str]()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"]["exception"]["description"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        """Go there."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def until(self, condition: str, seconds: float = 20) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition} never holds; console: {self.console}; page: {self.run('document.body.innerText')}"
            time.sleep(0.03)

    def type(self, place: str, text: str) -> None:
        """Put the cursor into an element and type."""
        self.run(f"document.querySelector({json.dumps(place)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def click(self, place: str) -> None:
        """Click on an element's middle."""
        box = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({json.dumps(place)}).getBoundingClientRect())"
        )
        self.move(*box)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def middle(self, place: str, number: int = 0) -> tuple[float, float]:
        """Where the middle of an element is."""
        found = f"document.querySelectorAll({json.dumps(place)})[{number}].getBoundingClientRect()"
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found})")
        return x, y

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def scheme(self, name: str) -> None:
        """light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        """A screenshot, PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.socket.close()
        self.process.terminate()
        self.process.wait(10)
