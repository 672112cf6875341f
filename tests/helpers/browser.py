"""Headless Chromium, driven over the DevTools protocol: as much of it as the tests of the page need."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--lang=en-US"),
)
TIMEOUT_S = 30
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, ""), "Tab": (9, "")}
SHIFT = 8


class Browser:
    """A browser process; each page that it opens has storage of its own."""

    def __init__(self, socket):
        self._socket = socket
        self._ids = itertools.count(1)
        self._pages = {}

    def call(self, method, session=None, **params):
        """Returns the result of a command; what happens meanwhile is given to the pages."""
        number = self.send(method, session, **params)
        while True:
            message = json.loads(self._socket.recv(timeout=TIMEOUT_S))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            page = self._pages.get(message.get("sessionId"))
            if page is not None and "method" in message:
                page.note(message["method"], message["params"])

    def send(self, method, session=None, **params):
        """Sends a command and waits for nothing."""
        number = next(self._ids)
        target = {} if session is None else {"sessionId": session}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **target}))
        return number

    @contextlib.contextmanager
    def page(self, url, *, width=1280, height=800, is_phone=False, language="en-US", context=None):
        """Opens a page; it is closed at the end, and must have had no error."""
        own = context or self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=own)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, own)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        agent = self.call("Browser.getVersion")["userAgent"]
        page.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        try:
            page.open(url)
            yield page
            page.call("Runtime.evaluate", expression="0")  # brings the last events
        finally:
            del self._pages[session]
            self.call("Target.closeTarget", targetId=target)
            if context is None:
                self.call("Target.disposeBrowserContext", browserContextId=own)


class Page:
    """One page.

    Attributes:
      errors: what the console said of errors and warnings.
      failures: requests that failed, which the console tells of too.
      requests: addresses that were asked for.
      bodies: what was sent in them, as JSON.
    """

    def __init__(self, browser, session, context):
        self._browser = browser
        self._session = session
        self.context = context
        self.errors = []
        self.failures = []
        self.requests = []
        self.bodies = []
        self._scripted = b""
        self._num_loads = 0

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def note(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            if "postData" in params["request"]:
                self.bodies.append(json.loads(params["request"]["postData"]))
        elif method == "Fetch.requestPaused":
            body = base64.b64encode(self._scripted).decode()
            answer = {"requestId": params["requestId"], "responseCode": 200, "body": body}
            self._browser.send("Fetch.fulfillRequest", self._session, **answer)
        elif method == "Page.loadEventFired":
            self._num_loads += 1
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            is_request = params["entry"]["source"] == "network"
            (self.failures if is_request else self.errors).append(json.dumps(params["entry"]))

    def script_answers(self, *events):
        """Has these events answer all chats from now on, in the place of the server."""
        self._scripted = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"
        self.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self):
        wanted = self._num_loads + 1
        self.call("Page.reload")
        deadline = time.monotonic() + TIMEOUT_S
        while self._num_loads < wanted:
            assert time.monotonic() < deadline, f"the page did not load within {TIMEOUT_S} s"
            self._browser.call("Browser.getVersion")  # brings the page's events
            time.sleep(0.02)

    def run(self, expression):
        """Returns the value of an expression in the page, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression):
        """Returns once an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self.run(f"Boolean({expression})"):
                return
            time.sleep(0.02)
        raise AssertionError(f"not true within {TIMEOUT_S} s: {expression}; the page: {self.text('body')!r:.2000}")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def texts(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def wait_for_text(self, selector, part):
        code = f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(part)})"
        self.wait(code)

    def point_of(self, selector):
        """Returns the middle of an element, scrolled into view, once it can be seen."""
        quoted = json.dumps(selector)
        self.wait(f"document.querySelector({quoted})?.checkVisibility() === true")
        return self.run(
            f"(() => {{ const node = document.querySelector({quoted}); node.scrollIntoViewIfNeeded();"
            "const at = node.getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; })()"
        )

    def hover(self, selector):
        x, y = self.point_of(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        self.hover(selector)
        x, y = self.point_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        """Enters text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def choose(self, selector, value):
        """Chooses an option, or sets a field, as a person's change would."""
        self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.value = {json.dumps(value)};"
            "for (const kind of ['input', 'change']) node.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def set_files(self, selector, paths):
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def chromium(folder):
    """Runs a browser whose profile is in `folder`."""
    profile = folder / "profile"
    with (folder / "chromium.log").open("wb") as log:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + TIMEOUT_S
        while not (port_file.exists() and port_file.read_text().count("\n") >= 1):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "chromium.log").read_text()
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, compression=None, proxy=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(timeout=TIMEOUT_S)
