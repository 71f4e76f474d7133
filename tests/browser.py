"""A real browser on the page of `avgk app`, for tests/test_app.py and for the picture in docs/page.md:

python tests/browser.py MODEL docs/app.png
"""

import base64
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import httpx
from PIL import Image
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).parent.parent
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
FLAGS += ["--hide-scrollbars"]


@contextmanager
def chromium(width=1240, height=900):
    """Headless Debian Chromium with a fresh profile, which logs every request of a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = Chrome(options=options, service=ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def free_port():
    """A port below those that systems give to clients: of these, one that asks for an answer may connect to itself."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 30000)))
            return probe.getsockname()[1]


@contextmanager
def running(command, url, seconds=280, **kwargs):
    """A server in a process of its own, from when it answers until it is interrupted."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, **kwargs)
        try:
            end = time.monotonic() + seconds
            while True:
                with suppress(OSError), build_opener(ProxyHandler({})).open(f"{url}/config", timeout=20):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not serve {url}: {log.read()}")
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# `avgk`, with every host that it asks for written to a file, and all but this machine refused
WATCHED = """
import sys
log = open(sys.argv.pop(1), "w", buffering=1)
def watch(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        asked = args[1] if event in ("socket.connect", "socket.sendto") else args[0]
        host = asked[0] if isinstance(asked, tuple) else asked
        print(host, file=log)
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"{event} {host} leaves this machine")
sys.addaudithook(watch)
from avgk_hf.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def app(model, *options, hosts=os.devnull):
    """`avgk app MODEL ...` on a free port; gives its address. The file `hosts` gets what its process connects to."""
    port = free_port()
    command = [sys.executable, "-c", WATCHED, str(hosts), "app", str(model), "--port", str(port), *options]
    # nothing that would keep it from asking others: neither settings of the Hub nor a proxy on this machine
    env = {name: value for name, value in os.environ.items() if not re.search("offline|proxy", name.lower())}
    env["OMP_NUM_THREADS"] = "1"  # as in conftest.py
    with running(command, f"http://127.0.0.1:{port}", env=env):
        yield f"http://127.0.0.1:{port}"


class Page:
    """What a visitor sees and does."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url
        self.wait = WebDriverWait(driver, 60)
        self.open()

    def open(self):
        self.driver.get(self.url)
        self.until("#avgk-k input[type=range]")

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def until(self, css):
        """The first element that matches, as soon as there is one."""
        return self.wait.until(lambda _: self.all(css))[0]

    def upload(self, path):
        for clear in self.all("#avgk-image button[aria-label='Remove Image']"):
            clear.click()
            self.await_status("drop an image")
        self.until("#avgk-image input[type=file]").send_keys(str(path))

    def rows(self, css):
        """The cells of a table's rows, as text."""
        script = "return [...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(c => c.innerText))"
        return self.driver.execute_script(script, f"{css} tr")

    @property
    def status(self):
        """The sentence above the set, or the message in its place."""
        found = "const p = document.querySelector('#avgk-set [role]'); return p ? p.innerText : ''"
        return self.driver.execute_script(found)

    def await_status(self, text):
        try:
            self.wait.until(lambda _: text in self.status)
        except TimeoutException:
            raise AssertionError(f"{text!r} is not shown, but {self.status!r}") from None

    def requests(self):
        """Addresses of all requests since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        sockets = [m["params"]["url"] for m in messages if m["method"] == "Network.webSocketCreated"]
        return [params["request"]["url"] for params in sent] + sockets


class Visitor:
    """One session on a page, without a browser."""

    def __init__(self, url, session="first"):
        self.url, self.session = url, session
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        config = self.http.get("/config").json()
        image = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "avgk-image")
        self.read, *_ = (d["id"] for d in config["dependencies"] if [image, "change"] in d["targets"])
        files = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "avgk-files")
        (self.several,) = (d["id"] for d in config["dependencies"] if [files, "upload"] in d["targets"])
        after = {d["trigger_after"]: d["id"] for d in config["dependencies"]}
        self.show, self.table = after[self.read], after[self.several]

    def upload(self, data, name="image.png", **options):
        answered = self.http.post("/gradio_api/upload", files={"files": (name, data)}, **options)
        return answered.json()[0] if answered.status_code == 200 else answered

    def event(self, number, data):
        """What the server sends when it is done with an event."""
        body = {"data": data, "fn_index": number, "session_hash": self.session}
        joined = self.http.post("/gradio_api/queue/join", json=body)
        if joined.status_code != 200:
            return joined
        stream = self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session})
        with stream as lines:
            for line in lines.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line else {}
                if message.get("msg") == "process_completed":
                    return message
        raise AssertionError("the server said nothing")

    def look(self, path, **fields):
        """Give an image by its path on the server, and the set that is shown: `(whether it was taken, the text)`."""
        given = {"path": path, "meta": {"_type": "gradio.FileData"}, **fields}
        message = self.event(self.read, [{name: value for name, value in given.items() if value is not None}])
        if not message["success"]:
            return False, message["output"]["error"]
        message = self.event(self.show, [None, "average size", 2, None, 0])
        assert message["success"], message
        return True, message["output"]["data"][0]


SCREENS = {  # width, height, whether a phone, theme
    "desktop": (1240, 900, False, "light"),
    "desktop-dark": (1240, 900, False, "dark"),
    "phone": (390, 844, True, "light"),
    "phone-dark": (390, 844, True, "dark"),
}


def look_at(page, name, image, path):
    """The page with an image and a table of two on one of the screens, as a picture of its whole length."""
    width, height, mobile, theme = SCREENS[name]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.driver.get(f"{page.url}/?__theme={theme}")
    page.until("#avgk-examples button img")
    page.upload(image)
    page.await_status("for K")
    page.until("#avgk-files input[type=file]").send_keys(f"{image}\n{image.with_name('0.png')}")
    page.until("#avgk-several a[download]")
    time.sleep(0.5)  # until the pictures are loaded
    shot = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    Path(path).write_bytes(base64.b64decode(shot["data"]))


def leave_screen(page):
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def screenshot(model, path, example=4):
    """The page with one of its examples, as in docs/page.md."""
    with app(model) as url, chromium(1080, 1100) as driver:
        page = Page(driver, url)
        page.until("#avgk-examples button")
        page.all("#avgk-examples button")[int(example) - 1].send_keys(Keys.ENTER)
        page.await_status("for K")
        time.sleep(1)  # until the pictures are loaded
        bottom = "document.querySelector(part).getBoundingClientRect().bottom + scrollY + outerHeight - innerHeight"
        height = f"return Math.max(...['#avgk-growth', '#avgk-examples', '#avgk-files'].map(part => {bottom}))"
        driver.set_window_size(1080, int(driver.execute_script(height)) + 20)
        driver.execute_script("window.scrollTo(0, 0)")
        driver.save_screenshot(str(path))
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    screenshot(*sys.argv[1:])
