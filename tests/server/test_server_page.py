"""The chat page: what is served at `/`, and the page itself in a headless Chromium where one is installed."""

from __future__ import annotations

import base64
import re
import shutil
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from ninfer_cli.server.page import FILES

from ninfer_core.testing import Fault, Reply, Script, Tokens, Wait

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ANSWER = """# Title

Some **bold** text, `code`, a [link](https://example.org/x) and [another](javascript:alert(1)).

- one
  - inner
- two

```python
print("<b>not bold</b>")
```

A table:
| a | b |
|---|--:|
| 1 | 2 |

<img src=x onerror="document.title='owned'">"""


def test_browsers_get_the_page_and_other_clients_the_greeting(serve: Any) -> None:
    server = serve()
    page = server.http.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html") and page.headers["vary"] == "Accept"
    assert "Ollama is running" in server.http.get("/").text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path, name in FILES.items():
        answer = server.http.get(path)
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == policy, name
        assert path in page.text or name == "markdown.js"
    assert server.http.get("/ui/other.js").status_code == 404
    assert server.http.head("/", headers=HTML).status_code == 200


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = resources.files("ninfer_cli.server").joinpath("ui")
    for item in folder.iterdir():
        text = item.read_text()
        found = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not found, (item.name, found)
        assert "innerHTML" not in text and "eval(" not in text


def test_the_page_needs_no_key_and_its_requests_do(serve: Any) -> None:
    server = serve("Hello!", api_keys=("secret",))
    assert server.http.get("/", headers=HTML).status_code == 200
    assert all(server.http.get(path).status_code == 200 for path in FILES)
    assert server.http.get("/v1/models").status_code == 401


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, serve: Any) -> Iterator[Any]:
    """`opened(*scripts, **settings)`: a page of a server; every request elsewhere and every fault is noted."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 760})

    def start(*scripts: Any, vision: bool = False, **settings: Any) -> tuple[Any, Any]:
        server = serve(*scripts, **settings)
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and "Failed to load" not in m.text and faults.append(m.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda r: r.url.startswith((server.url, "data:")) or faults.append(f"asked for {r.url}"))
        if vision:
            page.add_init_script(
                "const real = fetch; window.fetch = async (url, init) => { const answer = await real(url, init);"
                "if (url !== '/v1/models') return answer; const body = await answer.json();"
                "body.data.forEach((e) => e.architecture.input_modalities.push('image'));"
                "return new Response(JSON.stringify(body)); };"
            )
        page.goto(server.url)
        page.wait_for_selector("#model option", state="attached")
        return server, page

    yield start
    context.close()
    assert not faults, faults


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_an_answer_streams_in_with_its_thought_folded(opened: Any) -> None:
    gate = threading.Event()
    reply = Script(["I count.", Wait(gate), "</think>\n\n", Tokens(*ANSWER.splitlines(True), drafted=40)])
    _, page = opened(reply)
    ask(page, "Hi <i>there</i>")
    page.wait_for_selector(".thought summary:text-is('Thinking…')")
    assert page.locator("#stop").is_visible() and page.locator("#send").is_hidden()
    assert page.locator(".thought > div").is_hidden()
    gate.set()
    page.wait_for_selector(".foot button")
    assert page.text_content(".user .text") == "Hi <i>there</i>"
    assert page.text_content(".thought > div") == "I count." and page.text_content(".thought summary") == "Thought"
    page.click(".thought summary")
    assert page.locator(".thought > div").is_visible()
    answer = page.locator(".answer")
    assert answer.locator("h1").text_content() == "Title" and answer.locator("strong").text_content() == "bold"
    assert answer.locator("ul ul li").text_content() == "inner" and answer.locator("td").count() == 2
    assert answer.locator("td").last.evaluate("cell => cell.style.textAlign") == "right"
    assert answer.locator("pre code").text_content() == 'print("<b>not bold</b>")'
    assert [a.get_attribute("href") for a in answer.locator("a").all()] == ["https://example.org/x"]
    assert answer.locator("img").count() == 0 and page.title() == "ninfer"
    foot = page.text_content(".foot")
    assert "tok/s" in foot and re.search(r"\d+ % of drafts accepted", foot) and "first after" in foot
    assert page.locator("#send").is_visible()


def test_the_conversation_goes_on_and_settings_are_sent(opened: Any) -> None:
    server, page = opened(Script(Reply("One."), times=1), Script(Reply("Two."), times=1), Script(Reply("Three.")))
    page.click("#options-button")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.uncheck("#thinking")
    ask(page, "first")
    page.wait_for_selector(".foot button")
    ask(page, "second")
    page.wait_for_selector(".turn:nth-child(5) .answer p:text-is('Two.')")
    page.wait_for_selector("#send:visible")
    assert [message.role for message in server.last.messages] == ["system", "user", "assistant", "user"]
    assert server.last.sampling.temperature == 0.5 and server.last.thinking is False
    page.get_by_role("button", name="again").click()
    page.wait_for_selector(".turn:nth-child(5) .answer p:text-is('Three.')")
    assert [message.text for message in server.last.messages][1:] == ["first", "One.", "second"]
    page.click("#clear")
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


def test_stop_ends_the_request_and_keeps_the_text(opened: Any) -> None:
    server, page = opened(Script(["</think>", "so far", Wait(threading.Event())]))
    ask(page, "go")
    page.wait_for_selector(".answer p:text-is('so far')")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert page.text_content(".answer") == "so far" and "stopped" in page.text_content(".foot")
    assert server.idle() and server.engine.cancelled


def test_failures_are_shown(opened: Any) -> None:
    _, page = opened(Script(["</think>", "a", Fault(RuntimeError("x"))], times=1), Reply("Fine."))
    ask(page, "go")
    page.wait_for_selector(".foot .failed")
    page.get_by_role("button", name="again").click()
    page.wait_for_selector(".answer p:text-is('Fine.')")


def test_images_are_attached_and_sent(opened: Any, tmp_path: Path) -> None:
    _, page = opened(Reply("Seen."), vision=True)
    image = tmp_path / "dot.png"
    image.write_bytes(DOT)
    page.set_input_files("#files", [image, image])
    page.wait_for_selector("#images button:nth-child(2) img")
    page.click("#images button >> nth=0")
    assert page.locator("#images img").count() == 1
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "what is it?")
    parts = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert page.locator(".user .thumbs img").count() == 1 and page.locator("#images img").count() == 0
    page.wait_for_selector(".foot .failed")
    assert "image" in page.text_content(".foot .failed"), "the scripted model sees nothing, and says so"


def test_a_key_is_asked_for_and_themes_change(opened: Any, browser: Any, serve: Any) -> None:
    server = serve("Hello!", api_keys=("secret",))
    page = browser.new_page(color_scheme="dark")
    page.goto(server.url)
    page.wait_for_selector("#options:visible")
    assert "key" in page.text_content("#notice")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.wait_for_selector("#model option", state="attached")

    def back() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = back()
    page.click("#theme")
    assert page.text_content("#theme") == "Light" and back() != dark
    page.click("#theme")
    assert page.text_content("#theme") == "Dark" and back() == dark
    ask(page, "hi")
    page.wait_for_selector(".foot button")
    assert page.text_content(".answer") == "Hello!"
    page.close()
