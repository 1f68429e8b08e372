"""The chat page at ``/`` in a real browser (rule 22): Chromium, driven through its own protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from astrai_infer.server.app import create_app
from astrai_infer.testing.server import Held, LiveServer, Says, live_server, saying_engine, serving

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
KEYS = {"Enter": 13, "Escape": 27, "n": 78}
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is on PATH; install one of {', '.join(BROWSERS)}"),
]


class Slowly(Says):
    """Writes a token in `seconds`."""

    seconds = 0.01

    def __call__(self, token_id: int, position: int) -> int:
        time.sleep(self.seconds)
        return super().__call__(token_id, position)


class Tab:
    """A tab of a browser (Chrome DevTools Protocol: JSON that ends with a zero byte)."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None, "the tests are skipped"
        low = [*os.pipe(), *os.pipe()]
        ends = [
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low
        ]  # away from 3 and 4, which the browser reads
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-background-networking"]
        null = os.open(os.devnull, os.O_RDWR)
        moves = [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in ((null, 1), (null, 2), (ends[0], 3), (ends[3], 4))]
        self._pid = os.posix_spawn(BROWSER, command, os.environ, file_actions=moves)
        for end in (null, *low, ends[0], ends[3]):
            os.close(end)
        self._out, self._in = os.fdopen(ends[1], "wb", 0), os.fdopen(ends[2], "rb", 0)
        self._rest = b""
        self._n_sent = 0
        self._session: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._out.close()  # which ends the browser
        self._in.close()
        os.waitpid(self._pid, 0)

    def send(self, method: str, **params: Any) -> Any:
        """Call a method and return its result; what happens meanwhile is kept."""
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": params, **self._session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._n_sent:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], 30)[0], "the browser does not answer"
            data = self._in.read(1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"]["description"])
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.complaints.append(params["entry"]["text"])

    def js(self, code: str) -> Any:
        """Return the value of an expression."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, truth: str, seconds: float = 20) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({truth})"):
            assert time.monotonic() < end, (truth, self.js("document.body.innerText"), self.complaints)
            time.sleep(0.02)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && (ui.model.value || !ui.entry.hidden || !ui.notice.hidden)")

    def key(self, name: str, *, alt: bool = False, shift: bool = False) -> None:
        code = "KeyN" if name == "n" else name
        event = {"key": name, "code": code, "windowsVirtualKeyCode": KEYS[name], "modifiers": alt + 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": "\r"} if name == "Enter" else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str, into: str | None = None) -> None:
        if into is not None:
            self.js(f"ui.{into}.value = '', ui.{into}.focus()")
        self.send("Input.insertText", text=text)

    def click(self, node: str) -> None:
        """Press the mouse in the middle of an element, which must be there to be pressed."""
        box = self.js(
            f"(() => {{ const b = {node}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; }})()"
        )
        assert box[2] and box[3], f"{node} is not to be seen"
        at = {"x": box[0] + box[2] / 2, "y": box[1] + box[3] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def ask(self, text: str) -> None:
        """Type a message, send it by Enter, wait for the end of the answer."""
        self.type(text, "prompt")
        self.key("Enter")
        self.wait("!running && turns.length")

    def said(self, part: str = "text") -> str:
        """What the last turn shows in one of its parts."""
        return self.js(f"[...document.querySelectorAll('.turn .{part}')].at(-1).innerText")

    def asked(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests so far."""
        return [json.loads(each["postData"]) for each in self.requests if each["url"].endswith("/chat/completions")]

    def look(self, width: int, height: int, scheme: str, path: Path | None = None) -> None:
        """Change size and colours; write a PNG if asked to."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        if path is not None:
            path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    tab = Tab(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """An empty tab; the page may neither throw nor break its policy."""
    browser.send("Page.navigate", url="about:blank")
    browser.js("1")
    browser.requests.clear()
    browser.complaints.clear()
    yield browser
    assert browser.complaints == []


@contextlib.contextmanager
def chatting(tab: Tab, says: Says, kind: str = "plain", **config: Any) -> Iterator[LiveServer]:
    with live_server(lambda: saying_engine(says, kind), **config) as live:
        tab.open(live.url + "/")
        yield live


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_page_stands_alone_under_a_strict_policy() -> None:
    """No address but the server's own, no markup from text; shown without a key, which it asks for itself."""
    async with serving(saying_engine(Says("x")), api_key=("k",)) as served:
        app = create_app(served)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            page = await http.get("/")
            assert (await http.get("/v1/models")).status_code == 401
        assert "/" not in app.openapi()["paths"]
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["require-trusted-types-for"] == "'script'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules[kind]) for kind in ("script-src", "style-src"))
    text = files("astrai_infer.server").joinpath("chat.html").read_text()
    assert page.text == text
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}, "the name of SVG alone"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\son\w+=|\sstyle=", text)


class TestInBrowser:
    pytestmark = in_browser

    def test_an_answer_streams(self, tab: Tab) -> None:
        """Text grows while the model writes; markup and scripts in it are text; tokens, rate and first token are told."""
        evil = '<img src="/x" onerror="document.title=1"> & <b>no</b> '
        markdown = "Some `code`, **bold**.\n\n- one\n- two\n\n```py\nif 1 < 2:\n\n    pass\n```\n\n# End"
        says = Held(evil + markdown, 40)
        with chatting(tab, says) as live:
            tab.type("Say ", "prompt")
            tab.key("Enter", shift=True)
            tab.type("<i>it</i>")
            tab.key("Enter")
            tab.wait("running && turns[0].body.innerText.length >= 30")  # drawn, a frame after it came
            early = tab.said()
            assert tab.js("ui.stop.hidden") is False and "first token after" in tab.said("facts")
            says.go.set()
            tab.wait("!running")
            assert tab.js("turns[0].text") == says.text, "the joined deltas"
            shown = tab.said()
            assert evil.startswith(early.rstrip()[:20]) and len(early) < len(shown)
            assert shown.startswith(evil + "Some code, bold.") and "if 1 < 2:\n\n    pass" in shown and "#" not in shown
            assert tab.said("asked") == "Say \n<i>it</i>"
            count = lambda tags: tab.js(f"document.querySelectorAll('.turn :is({tags})').length")
            assert count("img, b, i, script") == 0 and tab.js("document.title") == "astrai"
            assert [count(tag) for tag in ("strong", "li", "pre", "h3")] == [1, 2, 1, 1] and count("code") == 2
            facts = tab.said("facts").splitlines()
            assert facts[0] == f"{len(says.text) + 1} tokens" and facts[3:] == ["Copy", "Try again"]
            rate, first = float(facts[1].split()[0]), float(facts[2].split()[3])
            assert rate > 0 and first > 0
            addresses = {request["url"] for request in tab.requests if not request["url"].startswith("data:")}
            assert addresses == {f"{live.url}/", f"{live.url}/v1/models", f"{live.url}/v1/chat/completions"}

    def test_code_looks_the_same_streamed_and_whole(self, tab: Tab) -> None:
        """The layout of an answer does not depend on where its pieces were cut."""
        text = "a\n\n\n1. x\n2. **y**\n  - z\ntail\n```\n\n``\n```\n## h\n*i* and ``` in\n```c\nopen `fence`\n"
        with chatting(tab, Says("x")):
            lay = f"((cuts) => {{ const n = make('div'), t = new Text(n), s = {json.dumps(text)};"
            lay += " for (const c of cuts) t.show(s.slice(0, c)); t.show(s); return n.outerHTML; })"
            whole = tab.js(f"{lay}([])")
            assert tab.js(f"{lay}([...Array({len(text)}).keys()])") == whole
            assert [whole.count(f"<{tag}") for tag in ("pre", "li", "h3", "strong", "em")] == [2, 3, 1, 1, 1]

    @pytest.mark.parametrize("by", ["Escape", "button", "new chat"])
    def test_an_answer_can_be_stopped(self, tab: Tab, by: str) -> None:
        """The engine's request ends too; what was written stays and is part of the conversation."""
        with chatting(tab, Slowly("word " * 700)) as live:
            tab.type("Go", "prompt")
            tab.key("Enter")
            tab.wait("turns[0].text.length > 20")
            if by == "Escape":
                tab.key("Escape")
            elif by == "button":
                tab.click("ui.stop")
            else:
                tab.key("n", alt=True)
            tab.wait("!running")
            end = time.monotonic() + 10
            while live.serving.client.n_open:
                assert time.monotonic() < end, "the engine goes on"
                time.sleep(0.01)
            if by == "new chat":
                assert tab.js("turns.length + document.querySelectorAll('.turn').length") == 0
                assert tab.js("ui.welcome.hidden") is False
                return
            text = tab.js("turns[0].text")
            assert "stopped" in tab.said("facts") and 20 < len(text) < 3000
            tab.type("More", "prompt")
            tab.key("Enter")
            tab.wait("turns.length === 2 && turns[1].text")
            tab.key("Escape")
            said = [(message["role"], message["content"]) for message in tab.asked()[1]["messages"]]
            assert said == [("user", "Go"), ("assistant", text), ("user", "More")]

    def test_parameters_are_sent_if_given(self, tab: Tab) -> None:
        with chatting(tab, Says("fine")) as live:
            tab.ask("One")
            assert set(tab.asked()[0]) == {"model", "messages", "stream", "return_token_ids"}
            tab.click("ui.open")
            for name, value in {"system": "Be kind.", "temperature": "0.5", "top_p": "0.25", "max_tokens": "3"}.items():
                tab.type(value, name)
            tab.ask("Two")
            body = tab.asked()[1]
            assert [body[name] for name in ("temperature", "top_p", "max_tokens")] == [0.5, 0.25, 3]
            assert body["messages"][0] == {"role": "system", "content": "Be kind."}
            assert "ended by the limit of tokens" in tab.said("facts") and tab.said() == "fin"
            tab.type("7", "top_p")
            tab.type("Three", "prompt")
            tab.key("Enter")
            assert len(tab.asked()) == 2 and tab.js("turns.length") == 2, (
                "what the browser knows to be wrong is not sent"
            )
            assert live.serving.metrics.finished == {"stop": 1, "length": 1}

    def test_a_key_is_asked_for(self, tab: Tab) -> None:
        with chatting(tab, Says("open"), api_key="right"):
            assert tab.js("!ui.entry.hidden && ui.notice.hidden && ui.send.disabled")
            tab.type("wrong", "key")
            tab.key("Enter")
            tab.wait("!ui.notice.hidden")
            assert tab.js("ui.notice.innerText") == "The server does not take this API key."
            tab.type("right", "key")
            tab.key("Enter")
            tab.wait("ui.entry.hidden && ui.notice.hidden && ui.model.value === 'tiny'")
            tab.ask("Hello")
            assert tab.said() == "open"

    def test_errors_stand_where_they_happened(self, tab: Tab) -> None:
        """A refusal, an engine that fails in the middle, a server that is gone; and trying again."""
        says = Slowly("a long answer")
        with chatting(tab, says) as live:
            tab.ask("One" * 2000)
            assert "4096" in tab.said("error") and tab.said() == ""
            with pytest.MonkeyPatch.context() as patch:
                script = Slowly.__call__

                def fails(self: Slowly, token_id: int, position: int) -> int:
                    if token_id == ord("g"):
                        raise RuntimeError("the device is gone")
                    return script(self, token_id, position)

                patch.setattr(Slowly, "__call__", fails)
                tab.ask("Two")
            assert tab.said() == "a long" and "the device is gone" in tab.said("error")
            tab.click("[...document.querySelectorAll('.facts button')].at(-1)")
            tab.wait("!running && turns[1].text === 'a long answer'")
            assert tab.js("turns[1].error.hidden && turns.length === 2")
            assert [m["content"] for m in tab.asked()[2]["messages"]] == ["Two"], (
                "what was not answered is not repeated"
            )
            live.server.should_exit = True
            assert live.stopped.wait(10)
            tab.ask("Three")
            assert tab.said("error") == "The server cannot be reached. Is it running?"

    def test_it_fits_phones_and_follows_the_colours(self, tab: Tab) -> None:
        with chatting(tab, Says("wide" * 300 + "\n\n```\n" + "x" * 500 + "\n```")):
            tab.ask("word" * 200)
            colours = set()
            for width, scheme in ((1280, "light"), (1280, "dark"), (360, "dark"), (320, "light")):
                tab.look(width, 640, scheme)
                assert tab.js("document.documentElement.scrollWidth <= innerWidth")
                assert tab.js("[ui.send, ui.new].every((node) => node.getBoundingClientRect().right <= innerWidth)")
                colours.add(tab.js("getComputedStyle(document.body).backgroundColor"))
            assert len(colours) == 2
            tab.send("Emulation.clearDeviceMetricsOverride")

    def test_the_end_stays_in_view_until_one_scrolls(self, tab: Tab) -> None:
        with chatting(tab, Slowly("line\n\n" * 600)):
            tab.look(400, 400, "light")
            tab.type("Go", "prompt")
            tab.key("Enter")
            left = "(ui.log.scrollHeight - ui.log.scrollTop - ui.log.clientHeight)"
            tab.wait(f"ui.log.scrollTop > 400 && {left} < 48")
            tab.look(300, 500, "light")
            tab.wait(f"innerWidth === 300 && {left} < 48")
            tab.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # resize is told
            length = tab.js("ui.log.scrollTop = 100, turns[0].text.length")
            tab.wait(f"turns[0].text.length > {length + 60}")
            assert tab.js("running && ui.log.scrollTop") == 100
            tab.key("Escape")
            tab.wait("!running")
            tab.send("Emulation.clearDeviceMetricsOverride")
