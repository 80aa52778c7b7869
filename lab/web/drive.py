#!/usr/bin/env python3
"""Opens the page of `ballast web` in headless Chromium and checks it: what it shows, its accessibility, its speed.

Usage: drive.py ADDRESS PICTURES [AXE] VM...
       drive.py ADDRESS PICTURES --broken TEXT...
  ADDRESS   what `ballast web` printed
  PICTURES  a directory for screenshots
  AXE       the file axe.min.js; without it the accessibility rules are not checked
  VM        names that must be in the list; the first one is opened
  TEXT      what the page must say of a broken host; after the line `broken` ballastd ends, and the
            page must say that, too

Needs Chromium and Python's standard library: the browser is driven over a pipe (DevTools protocol). Prints one line for
each check, `name value`; exit code 1 and a line on standard error for the first that fails.
"""
import base64, json, os, signal, subprocess, sys, tempfile, time

WITHIN_S = 60


class Browser:
    def __init__(self, program, home):
        to_read, to_write = os.pipe(), os.pipe()
        # The child reads commands from 3 and writes replies to 4.
        def descriptors():
            first, second = os.dup(to_read[0]), os.dup(to_write[1])
            os.dup2(first, 3)
            os.dup2(second, 4)
        self.child = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=dict(os.environ, TMPDIR=home))
        os.close(to_read[0])
        os.close(to_write[1])
        self.out, self.into = os.fdopen(to_read[1], "wb", 0), os.fdopen(to_write[0], "rb", 65536)
        self.number, self.session, self.complaints = 0, None, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log"]:
            self.ask(f"{domain}.enable")

    def close(self):
        """Ends it, so that no process of it writes into the directory any more."""
        try:
            self.out.write(b'{"id": 0, "method": "Browser.close"}\0')
            self.child.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    def read(self):
        text = bytearray()
        while True:
            byte = self.into.read(1)
            if not byte:
                sys.exit("drive: Chromium ended")
            if byte == b"\0":
                return json.loads(text)
            text += byte

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.out.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = self.read()
            if reply.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(reply["params"]["exceptionDetails"].get("exception", {}).get("description", "?"))
            if reply.get("method") == "Log.entryAdded" and reply["params"]["entry"]["level"] == "error":
                self.complaints.append(reply["params"]["entry"]["text"] + " " + reply["params"]["entry"].get("url", ""))
            if reply.get("id") == self.number:
                if "error" in reply:
                    sys.exit(f"drive: {method}: {reply['error']['message']}")
                return reply["result"]

    def value(self, expression):
        result = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            sys.exit(f"drive: {expression[:80]}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def until(self, what, expression, within_s=WITHIN_S):
        end = time.monotonic() + within_s
        while not self.value(expression):
            if time.monotonic() > end:
                text = self.value("document.body.innerText")
                sys.exit(f"drive: not within {within_s} s: {what}\n{text[:1500]}\n{self.complaints}")
            time.sleep(0.05)

    def look(self, width, height, scheme):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path):
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))


def said(name, value):
    print(name, value, flush=True)


def axe(browser, source, where):
    browser.value(source + "; 1")
    found = browser.value("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"
                          ".then((all) => all.violations.map((one) => `${one.id}: ${one.help}: ${one.nodes[0].html}`))")
    if found:
        sys.exit(f"drive: accessibility, {where}: " + "\n".join(found))
    said("axe_findings", f"0 {where}")


def button(vm):
    return f"[...document.querySelectorAll('#rows button')].find((one) => one.textContent === {json.dumps(vm)})"


def main():
    address, pictures, rest = sys.argv[1], sys.argv[2], sys.argv[3:]
    source = None
    if rest and rest[0].endswith(".js"):
        with open(rest.pop(0), encoding="utf-8") as file:
            source = file.read()
    program = os.environ.get("CHROMIUM", "chromium")
    with tempfile.TemporaryDirectory() as home:
        browser = Browser(program, home)
        try:
            if rest[:1] == ["--broken"]:
                check_broken(browser, address, pictures, rest[1:])
            else:
                check(browser, address, pictures, source, rest)
        finally:
            browser.close()


def check_broken(browser, address, pictures, texts):
    browser.look(1280, 900, "light")
    browser.ask("Page.navigate", url=address)
    for text in texts:
        browser.until(f"the page says {text!r}",
                      f"document.body && document.body.textContent.includes({json.dumps(text)})")
    browser.picture(f"{pictures}/broken.png")
    said("broken", 1)
    browser.until("the page says that ballastd is gone", "!document.getElementById('banner').hidden")
    said("banner", browser.value("document.getElementById('banner').textContent"))
    browser.picture(f"{pictures}/gone.png")


def check(browser, address, pictures, source, vms):
    browser.look(1280, 900, "light")
    start = time.monotonic()
    browser.ask("Page.navigate", url=address)
    browser.until("the page has figures", "document.body && document.body.dataset.ready === '1'")
    said("first_picture_s", round(time.monotonic() - start, 2))
    for name in vms:
        browser.until(f"{name} is in the list", f"{button(name)} !== undefined")
    browser.until("the host has a chart", "document.querySelectorAll('#host-chart canvas').length > 0")
    said("update_ms", browser.value("document.body.dataset.updateMs"))
    said("rows", browser.value("document.querySelectorAll('#rows tr').length"))
    browser.picture(f"{pictures}/host-light.png")
    if source:
        axe(browser, source, "host, light")
    if vms:
        browser.value(f"{button(vms[0])}.click()")
        browser.until("the VM has a chart", "document.querySelectorAll('#vm-chart canvas').length > 0")
        browser.until("the VM has words", "document.getElementById('vm-why').textContent.length > 5")
        browser.picture(f"{pictures}/vm-light.png")
        if source:
            axe(browser, source, "VM, light")
        browser.look(1280, 900, "dark")
        browser.value("new Promise((done) => setTimeout(done, 300))")
        browser.picture(f"{pictures}/vm-dark.png")
        if source:
            axe(browser, source, "VM, dark")
        browser.value("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        browser.until("Escape closes it", "document.getElementById('vm').hidden")
        browser.until("the focus is back", f"document.activeElement.textContent === {json.dumps(vms[0])}")
    browser.look(1280, 900, "dark")
    browser.picture(f"{pictures}/host-dark.png")
    browser.value("const field = document.getElementById('search'); field.value = 'no such thing';"
                  "field.dispatchEvent(new Event('input'))")
    browser.until("a search that finds nothing says so", "!document.getElementById('none').hidden")
    if browser.complaints:
        sys.exit("drive: the browser complains: " + "\n".join(browser.complaints))
    said("complaints", 0)


main()
