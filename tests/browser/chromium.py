"""A headless Chromium, driven over a pipe by the DevTools protocol: the standard library is enough.

    with Browser() as browser:
        page = browser.open_page("build/index.html", width=390, dark=True)
        page.click("#next")
        page.screenshot("narrow-dark.png")
        assert not page.errors and not page.leaving

No name is resolved in it, so a page that asks for something elsewhere does not get it, and
`page.leaving` says what it asked for.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helpers.waits import DEADLINE, until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium is found on PATH: on Debian or Ubuntu, `apt-get install chromium`"
AT_HOME = ("file:", "data:", "blob:", "about:")
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
KEYS = {"Enter": 13, "Space": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Failed(Exception):
    """The browser refused a command, or did not answer in time."""


class Message(NamedTuple):
    """What a page wrote to its console; an uncaught exception has the kind `error`."""

    kind: str
    text: str


def find() -> str | None:
    """The Chromium to use: the one that TILEWISE_CHROMIUM names, else the first on PATH."""
    named = os.environ.get("TILEWISE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A Chromium of our own with an empty profile; ends with the `with` block."""

    def __init__(self, executable: str | None = None) -> None:
        executable = executable or find()
        if executable is None:
            raise Failed(MISSING)
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        self._log = Path(self.profile) / "stderr.txt"
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        command = [executable, *FLAGS, *sandbox, f"--user-data-dir={self.profile}", "about:blank"]
        self._log.touch()
        actions = [
            (os.POSIX_SPAWN_OPEN, 1, str(self._log), os.O_WRONLY | os.O_APPEND, 0),
            (os.POSIX_SPAWN_OPEN, 2, str(self._log), os.O_WRONLY | os.O_APPEND, 0),
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),  # where Chromium reads commands
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
        ]
        self.pid = os.posix_spawn(
            executable, command, os.environ, file_actions=actions, setpgroup=0
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._rest = 0, b""
        self._listeners: dict[str, Callable[[str, dict], None]] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *raised) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self.profile, ignore_errors=True)

    def open_page(
        self, path: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Page:
        """A page from a file (or a URL), loaded; `dark` is what prefers-color-scheme says."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"], target)
        page.resize(width, height)
        page.prefer(dark)
        text = str(path)
        page.go(text if "://" in text else Path(text).resolve().as_uri())
        return page

    def send(self, method: str, session: str | None = None, **params) -> dict:
        """A command's answer; what happens meanwhile goes to the pages that it happens to."""
        self._count += 1
        number = self._count
        command = {"id": number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self._read(method)).get("id") != number:
            self._tell(answer)
        if "error" in answer:
            raise Failed(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def listen(self, session: str, hears: Callable[[str, dict], None]) -> None:
        """`hears` is told the events of a session, by name."""
        self._listeners[session] = hears

    def _tell(self, event: dict) -> None:
        hears = self._listeners.get(event.get("sessionId", ""))
        if hears is not None and "method" in event:
            hears(event["method"], event["params"])

    def _read(self, method: str) -> dict:
        while b"\0" not in self._rest:
            ready = select.select([self._from], [], [], DEADLINE)[0]
            chunk = os.read(self._from, 1 << 20) if ready else b""
            if not chunk:
                last = self._log.read_text(errors="replace")[-2000:]
                raise Failed(f"{method}: {'Chromium ended' if ready else 'no answer'}\n{last}")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


class Page:
    """A tab: what it wrote to the console and asked for, and what a reader can do with it."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.console: list[Message] = []
        self.requests: list[str] = []  # URLs, in order
        self._browser, self._session, self._target = browser, session, target
        self._loaded = False
        browser.listen(session, self._hear)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    @property
    def errors(self) -> list[str]:
        """Console errors, uncaught exceptions, and what could not be loaded."""
        return [message.text for message in self.console if message.kind in ("error", "assert")]

    @property
    def leaving(self) -> list[str]:
        """Requests for anything but this machine's files and what the page holds itself."""
        return [url for url in self.requests if not url.startswith(AT_HOME)]

    def go(self, url: str) -> None:
        """Loads a URL and waits until it is there, with its fonts laid out."""
        self._loaded = False
        if error := self._send("Page.navigate", url=url).get("errorText"):
            raise Failed(f"{url}: {error}")
        until(lambda: self.evaluate("1") and self._loaded, f"{url} is loaded")
        self.evaluate("document.fonts.ready.then(() => 1)")

    def evaluate(self, js: str) -> Any:
        """The value of an expression, of a promise what it resolves to; Failed where it throws."""
        done = self._send("Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise Failed(_thrown(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait_for(self, js: str) -> Any:
        """The expression's value as soon as it is true."""
        return until(lambda: self.evaluate(js), js, pause=0.02)

    def click(self, selector: str) -> None:
        """Presses the mouse in the middle of the first element that matches."""
        box = self.evaluate(
            f"""(() => {{
                const one = document.querySelector({json.dumps(selector)});
                if (!one) return null;
                one.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = one.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        if box is None:
            raise Failed(f"there is no {selector}")
        at = dict(x=box[0], y=box[1], button="left", clickCount=1)
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, **at)

    def press(self, key: str) -> None:
        """Presses a key of KEYS, or a letter, where the focus is."""
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key, ord(key[0].upper()))
        names = dict(key=" " if key == "Space" else key, windowsVirtualKeyCode=code)
        self._send("Input.dispatchKeyEvent", type="keyDown", text=text, **names)
        self._send("Input.dispatchKeyEvent", type="keyUp", **names)

    def resize(self, width: int, height: int = 900) -> None:
        """The window's size in CSS pixels; 390 is a phone."""
        sizes = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._send("Emulation.setDeviceMetricsOverride", **sizes)

    def prefer(self, dark: bool) -> None:
        """What prefers-color-scheme says from now on."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    @property
    def is_too_wide(self) -> bool:
        """Whether a reader must scroll sideways."""
        return self.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )

    def screenshot(self, path: str | Path, *, whole: bool = True, selector: str = "") -> Path:
        """A PNG of the whole page, of the window, or of one element."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        if selector or whole:
            box = self.evaluate(
                "(() => { const b = document.querySelector("
                f"{json.dumps(selector or 'html')}).getBoundingClientRect();"
                " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}})()"
            )
            options["clip"] = {**box, "scale": 1}
        else:
            options["captureBeyondViewport"] = False
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", **options)["data"]))
        return path

    def close(self) -> None:
        """Closes the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)

    def _send(self, method: str, **params) -> dict:
        return self._browser.send(method, self._session, **params)

    def _hear(self, event: str, told: dict) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.consoleAPICalled":
            words = [str(a.get("value", a.get("description", ""))) for a in told["args"]]
            self.console.append(Message(told["type"], " ".join(words)))
        elif event == "Runtime.exceptionThrown":
            self.console.append(Message("error", _thrown(told["exceptionDetails"])))
        elif event == "Log.entryAdded":
            entry = told["entry"]
            text = " ".join(filter(None, (entry["text"], entry.get("url"))))
            self.console.append(Message(entry["level"], text))


def _thrown(details: dict) -> str:
    return details.get("exception", {}).get("description") or details["text"]


def _pipe() -> tuple[int, int]:
    """Both ends above the numbers that Chromium wants its own ends to have."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high
