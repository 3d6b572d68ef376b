"""A headless browser for tests of pages; where there is none they are skipped with the reason.

It is asked through Debian's chromedriver in WebDriver's own words, https://www.w3.org/TR/webdriver2/:
they are few, and a client library would be loaded into every other test.
"""

import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.request

# Those from --disable-quic on keep Chromium from asking anything of the network by itself.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_LOGS = {"browser": "ALL", "performance": "ALL"}


def missing():
    """Why there is no browser here; empty where there is one."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install chromium chromium-driver"
    return ""


class Browser:
    """What tests do with a page: look, point, type, and read what the browser noted meanwhile."""

    def __init__(self, folder):
        command = [shutil.which("chromedriver"), "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # on whichever port was free; what it says after that stays unread, and is little
        started = (re.search(r"success\w* on port (\d+)", line) for line in self._driver.stdout)
        port = next(filter(None, started))[1]
        self._address = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={folder}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": _LOGS}
        session = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{session['sessionId']}"

    def close(self):
        self._ask("", None, method="DELETE")
        self._driver.terminate()
        self._driver.stdout.close()
        self._driver.wait()

    def _ask(self, path, body, method="POST"):
        request = urllib.request.Request(
            self._address + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        # as no proxy of the environment is meant for this machine
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def command(self, name, **parameters):
        """A command of Chromium's own protocol, for what WebDriver has no word for."""
        return self._ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, path):
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        # Else a page hears of its focus only when the browser's window has it.
        self.command("Emulation.setFocusEmulationEnabled", enabled=True)
        # What the page before still asks for, the browser's own first one, is not asked by this.
        self._ask("/url", {"url": "about:blank"})
        for log in _LOGS:
            self._log(log)
        self._ask("/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        return self._ask("/execute/sync", {"script": script, "args": arguments})

    def until(self, script, *arguments):
        """Wait for something to be true; it soon is, and no test is of how soon."""
        end = time.monotonic() + 30
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"it is never true: {script}"
            time.sleep(0.02)
        return found

    # --- what is there

    def count(self, selector):
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def texts(self, selector):
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.run(script, selector)

    def text(self, selector):
        """As it is seen: what is hidden is left out."""
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def attribute(self, selector, name):
        script = "return document.querySelector(arguments[0]).getAttribute(arguments[1])"
        return self.run(script, selector, name)

    # --- what is done

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def focus(self, selector):
        self.run("document.querySelector(arguments[0]).focus()", selector)

    def press(self, *keys):
        """Press keys, one after the other, where the focus is."""
        each = (({"type": "keyDown", "value": k}, {"type": "keyUp", "value": k}) for k in keys)
        actions = list(itertools.chain.from_iterable(each))
        self._ask("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def write(self, selector, text):
        """Write into a field in place of what is there."""
        self.run("document.querySelector(arguments[0]).select()", selector)
        self.press(*text)

    # --- what was noted

    def _log(self, name):
        return [entry["message"] for entry in self._ask("/se/log", {"type": name})]

    def errors(self):
        return self._log("browser")

    def requests(self):
        """The addresses that were asked for since the page was opened."""
        messages = (json.loads(message)["message"] for message in self._log("performance"))
        sent = (m for m in messages if m["method"] == "Network.requestWillBeSent")
        return [m["params"]["request"]["url"] for m in sent]
