"""A real headless browser for the tests in this folder, driven over the DevTools protocol.

Chromium speaks it over two pipes, as JSON texts that end in a zero byte: no library and no port are needed. Where no
Chromium is found the tests are skipped; the variable CHROMIUM may name one.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_SECONDS = 60.0
FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever asks for the network fails, and says so
]


class Browser:
    """One Chromium process with a profile of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = _high(os.pipe())
        self._read, from_browser = _high(os.pipe())

        def take_pipes() -> None:
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=take_pipes,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest = 0, b""
        self.happened: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; what happens meanwhile is kept in `happened`."""
        self._number += 1
        number = self._number
        request = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            for message in self._messages():
                if message.get("id") == number:
                    assert "error" not in message, f"{method}: {message['error']}"
                    result: dict[str, Any] = message["result"]
                    return result
                self.happened.append(message)
        raise AssertionError(f"The browser did not answer {method} within {ANSWER_SECONDS:g} s.")

    def _messages(self) -> Iterator[dict[str, Any]]:
        if select.select([self._read], [], [], 1.0)[0]:
            block = os.read(self._read, 1 << 20)
            assert block, "the browser has ended"
            *whole, self._rest = (self._rest + block).split(b"\0")
            yield from [json.loads(message) for message in whole]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)


class Page:
    """One tab. `trouble` is what its console said of errors and warnings, and every request that left the page."""

    def __init__(self, browser: Browser, address: str, *, width: int, height: int, dark: bool, phone: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if phone:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        self.address = address
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until the expression is true; the answer takes as long as it takes, up to a minute."""
        look = f"new Promise(done => {{ const look = () => {condition} ? done(true) : setTimeout(look, 20); look(); }})"
        assert self.evaluate(look)

    @property
    def trouble(self) -> list[str]:
        found = []
        for message in self._browser.happened:
            told = message.get("params", {})
            if message.get("sessionId") != self._session:
                continue
            match message["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(told["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                    found.append(str(told["args"]))
                case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                    found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
                case "Network.requestWillBeSent" if told["request"]["url"] != self.address:
                    found.append(f"a request to {told['request']['url'][:80]}")
        return found

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1, **more)
        for part in (0.25, 0.5, 0.75, 1.0):
            x, y = (a + part * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1, **more)
        self.mouse("mouseReleased", *end, button="left", clickCount=1, **more)

    def press(self, key: str, **more: Any) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        touched = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=touched)

    def picture(self, file: Path) -> None:
        """The whole page as it looks, for people."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(image))


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """The same pipe under numbers that are not those which the browser expects."""
    raised = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return raised[0], raised[1]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed; on Debian: apt-get install chromium")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def visit(browser: Browser) -> Callable[..., Page]:
    """Opens a file or an address in a new tab."""

    def go(place: Path | str, *, width: int = 1280, height: int = 800, dark: bool = False, phone: bool = False) -> Page:
        address = place.as_uri() if isinstance(place, Path) else place
        return Page(browser, address, width=width, height=height, dark=dark, phone=phone)

    return go


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}  # noqa: RUF012  (as its base class has it)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves a folder on the loopback interface; gives its address."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(folder: Path) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()
