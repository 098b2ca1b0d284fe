"""The playground and the page of a run: what they get, what they may load, and how a browser fares with them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shutil
import threading
from contextlib import contextmanager

import httpx
import pytest
import serving
from PIL import Image
from processes import run_litchi

from litchi.config import load_config
from litchi.errors import UsageError
from litchi.prepare.catalogue import draw
from litchi.prepare.catalogue_text import Product
from litchi.serve import watch
from litchi.serve.fetch import Fetcher
from litchi.serve.front import Front
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import Gate
from litchi.serve.metrics import Metrics
from litchi.serve.pages import FOLDER, POLICY, read_pages
from litchi.serve.pool import Pool
from litchi.serve.server import PLAYGROUND, make_app
from litchi.serve.start import run_engine

EVIL = "</script><img src=x onerror=alert(1)>"


def step(number, loss, **more):
    return {"step": number, "epoch": 0, "loss": loss, "grad_norm": 1.5, "lr": 1e-4, "tokens_per_s": 900.0} | {
        "peak_bytes": [2**30, 2**31], "step_s": 0.5, "data_wait_s": 0.1, "skipped": False, **more
    }  # fmt: skip


def add(path, *records):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("train: {steps: 10, epochs: null}\n", encoding="utf-8")
    add(folder / "metrics.jsonl", step(1, 2.3456), step(2, 1.2345, skipped=True), step(3, 0.98765))
    add(folder / "eval.jsonl", {"step": 3, "name": "test", "metrics": {"mrr@10": 0.8125}})
    add(folder / "events.jsonl", {"event": "start", "step": 0, "ranks": 2})
    add(folder / "quarantine.jsonl", {"file": "train.jsonl", "line": 7, "reason": EVIL})
    return folder


# ---- What the page of a run gets


def test_each_line_comes_once_and_a_half_written_one_later(run):
    first = watch.read_run(run)
    assert [r["loss"] for r in first["metrics"]["records"]] == [2.3456, 1.2345, 0.98765]
    assert (first["state"], first["steps"], first["name"]) == ("running", 10, "a-run")
    assert first["quarantine"]["records"][0]["line"] == 7
    path = run / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    marks = {name: first[name]["mark"] for name in watch.FILES}
    assert watch.read_run(run, marks)["metrics"] == {"mark": marks["metrics"], "anew": False, "records": []}
    with path.open("a") as file:
        file.write('ss": 0.5}\nnot JSON\n')
    added = watch.read_run(run, marks)["metrics"]
    assert added["records"] == [{"step": 4, "loss": 0.5}, {"unreadable": "not JSON"}]


def test_a_file_that_was_cut_back_is_read_anew(run):
    marks = {name: watch.read_run(run)[name]["mark"] for name in watch.FILES}
    new = run / "new"
    add(new, step(1, 7.0))
    os.replace(new, run / "metrics.jsonl")
    found = watch.read_run(run, marks)
    assert found["metrics"]["anew"] and [r["loss"] for r in found["metrics"]["records"]] == [7.0]
    assert not found["eval"]["anew"] and found["eval"]["records"] == []


def test_a_large_file_comes_in_pieces(run, monkeypatch):
    monkeypatch.setattr(watch, "PIECE_BYTES", 300)
    found, mark, rounds = [], "", 0
    while True:
        mark, _, records, more = watch.read_added(run / "metrics.jsonl", mark)
        found, rounds = found + records, rounds + 1
        if not more:
            break
    assert [r["step"] for r in found] == [1, 2, 3] and rounds > 1


def test_the_state_of_a_run(run):
    os.utime(run / "metrics.jsonl", (1, 1))
    assert watch.read_state(run)["state"] == "quiet"
    (run / "done.json").write_text("{}")
    assert watch.read_state(run)["state"] == "finished"
    (run / "done.json").unlink()
    (run / "metrics.jsonl").unlink()
    assert watch.read_state(run)["state"] == "starting"
    assert watch.read_run(run)["metrics"]["records"] == []


def test_no_run_is_a_one_line_error(tmp_path):
    with pytest.raises(UsageError, match=r"no run at .*nope: there is no such folder"):
        watch.make_server(tmp_path / "nope", 0)
    with pytest.raises(UsageError, match=r"neither config\.yaml nor metrics\.jsonl"):
        watch.format_snapshot(tmp_path)
    ended = run_litchi(tmp_path, "watch", str(tmp_path / "nope"))
    assert ended.status == 2 and ended.err.count("\n") == 1 and "no run at" in ended.err


# ---- One file


def test_a_snapshot_holds_the_numbers_and_needs_nothing_else(run):
    page = watch.format_snapshot(run)
    written = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1)
    data = json.loads(written)
    assert [r["loss"] for r in data["metrics"]["records"]] == [2.3456, 1.2345, 0.98765]
    assert data["eval"]["records"][0]["metrics"] == {"mrr@10": 0.8125}
    assert data["quarantine"]["records"][0]["reason"] == EVIL and EVIL not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    for tag in ("style", "script"):  # what may run is named by its digest
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S).group(1)
        assert watch._source(text) in page


def test_a_snapshot_of_a_long_run_is_thinned_and_says_so(run, monkeypatch):
    monkeypatch.setattr(watch, "SNAPSHOT_STEPS", 2)
    page = watch.format_snapshot(run)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert data["every"] == 2 and [r["step"] for r in data["metrics"]["records"]] == [2]


# ---- Headers and files


@contextmanager
def watched(run):
    server = watch.make_server(run, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_watch_answers_this_machine_alone_and_only_its_own_names(run):
    with watched(run) as url, httpx.Client(base_url=url, trust_env=False) as client:
        page = client.get("/")
        assert page.headers["content-security-policy"] == POLICY and "unsafe" not in POLICY
        assert client.get("/data").json()["metrics"]["records"][0]["loss"] == 2.3456
        assert client.get("/page/../../../etc/passwd").status_code == 404
        assert client.get("/config.yaml").status_code == 404
        assert client.get("/data", headers={"host": "evil.example"}).status_code == 403
        assert client.post("/data").status_code == 501


def test_the_playground_is_served_with_its_policy_and_nothing_beside_it():
    spec, limits = EngineSpec("builtin:tiny", (), None), load_config(None, ["task=rerank"], need=()).serve
    nothing = lambda *_: None  # noqa: E731
    pool = Pool(run_engine, spec, 1, limits, say=nothing, say_ready=nothing, note=nothing, fail=nothing)
    front = Front(pool, limits, Gate(frozenset()), Fetcher(frozenset(), 1), Metrics(lambda: 0), spec.name)
    app = make_app(front, nothing, nothing)

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            names = ["/", *(f"/page/{name}" for name in PLAYGROUND)]
            for name in names:
                reply = await client.get(name)
                assert reply.status_code == 200, name
                assert reply.headers["content-security-policy"] == POLICY
            for name in ("/page/watch.js", "/page/..%2fserver.py", "/page/", "/nothing"):
                assert (await client.get(name)).status_code == 404

    asyncio.run(ask())


def test_pages_hold_nothing_their_policy_forbids():
    for name, (body, _) in read_pages().items():
        text = body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        if name.endswith(".html"):
            assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! src)", text), name


@pytest.mark.parametrize("name", ["playground.js", "watch.js"])
def test_every_word_is_there_in_both_languages(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    words = text[: text.index("\n};\n")]
    english, chinese = words.split("  zh: {")
    keys = [sorted(set(re.findall(r"(?:^|[,{]\s|\n\s+)(\w+): [\"`n(tm]", part))) for part in (english, chinese)]
    keys += [sorted(set(re.findall(r"\b(\w+): (?:\"|\w+ =>|\()", part))) for part in (english, chinese)]
    assert keys[2] == keys[3] and len(keys[2]) > 15
    page = (FOLDER / name.replace(".js", ".html")).read_text(encoding="utf-8")
    used = {*re.findall(r'data-(?:say|hint|label)="(\w+)"', page), *re.findall(r'\bsay\("(\w+)"\)', text)}
    assert used <= set(keys[2]), used - set(keys[2])


def test_the_demo_catalogue_is_what_the_demo_draws():
    catalogue = json.loads((FOLDER / "catalogue.json").read_text(encoding="utf-8"))
    assert set(catalogue["query"]) == {"en", "zh"} and len(catalogue["documents"]) == 10
    for document in catalogue["documents"]:
        colour, pattern, item = document["name"].split()
        data = base64.b64decode(document["image"].removeprefix("data:image/png;base64,"))
        drawn = draw(Product(item=item, colour=colour, pattern=pattern), 7)
        assert Image.open(io.BytesIO(data)).convert("RGB").tobytes() == drawn.tobytes()


# ---- In a browser


def find_chromium():
    """Debian's, or the one Playwright brought."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = find_chromium() or (own if os.path.exists(own) else None)
        if path is None:
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Opens a page; at the end nothing was written to its console and nothing was asked of another host."""
    opened, wrong = [], []

    def visit(url, *, width=1100, locale="en-GB", forgive=()):
        context = browser.new_context(viewport={"width": width, "height": 900}, locale=locale)
        page = context.new_page()

        def note(message):
            if message.type in ("error", "warning") and not any(word in message.text for word in forgive):
                wrong.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((url, "data:")) or wrong.append(asked.url))
        page.goto(url)
        opened.append(context)
        return page

    yield visit
    for context in opened:
        context.close()
    assert wrong == []


def assert_usable(page):
    """Every control has a name, and nothing is wider than the screen."""
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, img, svg, progress")]
          .filter(n => n.checkVisibility())
          .filter(n => !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby") || n.alt
                         || (n.labels && [...n.labels].some(l => l.textContent.trim())) || n.textContent.trim()))
          .map(n => n.outerHTML)"""
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def shot(page, name):
    """Keep a screenshot where LITCHI_SHOTS says."""
    if os.environ.get("LITCHI_SHOTS"):
        page.screenshot(path=f"{os.environ['LITCHI_SHOTS']}/{name}.png", full_page=True)


def ranking(page):
    return page.locator("#results .ranked li").evaluate_all(
        "all => all.map(n => n.querySelector('img, .text').outerHTML)"
    )


def rank(page):
    page.locator("#rank-form button.main").click()
    page.wait_for_function("document.getElementById('status').textContent === 'Ranked.'", timeout=60_000)
    return ranking(page)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.serving(tmp_path_factory.mktemp("server"), os.environ.get("LITCHI_MODEL", "builtin:tiny")) as one:
        yield one


@pytest.mark.slow
def test_a_query_is_typed_a_picture_dropped_and_the_ranking_changes(server, open_page, tmp_path):
    page = open_page(server.url)
    page.locator("#rerank").wait_for()
    page.locator("#demo").click()
    page.locator("#documents li").nth(9).wait_for()
    page.locator("#query").fill("red striped dress")
    before = rank(page)
    assert len(before) == 10
    assert_usable(page)
    shot(page, "playground")
    page.locator("#query").fill("green mug")
    page.keyboard.press("Enter")  # the keyboard is enough
    page.wait_for_function("document.getElementById('status').textContent === 'Ranked.'")
    picture = tmp_path / "mug.png"
    draw(Product("mug", "green", "plain"), 3).save(picture)
    page.locator("#query-picture").set_input_files(picture)
    assert page.locator("#query-shown img").count() == 1
    with_picture = rank(page)
    assert with_picture != before and sorted(with_picture) == sorted(before)
    page.evaluate(  # dropped on the documents, as the mouse would
        """async url => {
          const file = new File([await (await fetch(url)).blob()], "dropped.css", {type: "text/css"});
          const data = new DataTransfer(); data.items.add(file);
          const drop = new DragEvent("drop", {dataTransfer: data, cancelable: true});
          document.getElementById("document-form").dispatchEvent(drop);
        }""",
        "page/page.css",
    )
    page.locator("#problem").wait_for()
    assert "dropped.css is not a picture" in page.locator("#problem").inner_text()
    page.evaluate(
        """bytes => {
          const data = new DataTransfer();
          const picture = Uint8Array.from(atob(bytes), c => c.charCodeAt(0));
          data.items.add(new File([picture], "mug.png", {type: "image/png"}));
          const drop = new DragEvent("drop", {dataTransfer: data, cancelable: true});
          document.getElementById("document-form").dispatchEvent(drop);
        }""",
        base64.b64encode(picture.read_bytes()).decode(),
    )
    page.locator("#documents li").nth(10).wait_for()
    page.locator("#text").fill(EVIL)
    page.get_by_role("button", name="Add text").press("Enter")
    assert len(rank(page)) == 12
    assert page.locator("#results .text").inner_text() == EVIL  # as text
    assert page.locator("img[src=x]").count() == 0


@pytest.mark.slow
def test_on_a_phone_in_chinese(server, open_page):
    page = open_page(server.url, width=375, locale="zh-CN")
    page.locator("#rerank").wait_for()
    assert page.get_by_role("button", name="示例目录").is_visible()
    page.locator("#demo").click()
    page.locator("#documents li").nth(9).wait_for()
    assert page.locator("#query").input_value() == "红色条纹连衣裙"
    page.locator("#rank-form button.main").click()
    page.locator("#results .ranked li").nth(9).wait_for(timeout=60_000)
    assert_usable(page)
    shot(page, "phone")
    page.locator("#language").click()
    page.reload()
    page.get_by_role("button", name="Demo catalogue").wait_for()  # the choice is remembered


@pytest.mark.slow
def test_a_chat_with_a_picture_is_streamed(server, open_page, tmp_path):
    if os.environ.get("LITCHI_MODEL"):
        pytest.skip("the model may have been trained for rankings alone")
    picture = tmp_path / "p.png"
    draw(Product("hat", "red", "plain"), 1).save(picture)
    page = open_page(server.url)
    page.locator("#chat").wait_for()
    page.locator("#chat-picture").set_input_files(picture)
    page.locator("#prompt").fill("What is it?")
    page.locator("#chat-form button.main").click()
    page.wait_for_function("/ms$/.test(document.querySelector('#answers .quiet')?.textContent)", timeout=60_000)
    assert page.locator("#answers article").nth(1).locator(".text").inner_text().strip()
    assert_usable(page)


@pytest.mark.slow
def test_a_key_is_asked_for_and_what_the_server_says_is_shown(open_page, tmp_path):
    with serving.serving(tmp_path, "builtin:tiny", env={"LITCHI_API_KEYS": "open sesame"}) as one:
        page = open_page(one.url, forgive=("401",))
        page.locator("#key-form").wait_for()
        assert "An API key is needed".lower() in page.locator("#problem").inner_text().lower()
        page.get_by_label("API key").fill("open sesame")
        page.keyboard.press("Enter")
        page.locator("#rerank").wait_for()
        assert page.locator("#problem").is_hidden()


@pytest.mark.slow
def test_two_models_stand_side_by_side(server, open_page, browser):
    """A server that names two models gets a question for each; here both are answered by one."""
    page = browser.new_page()
    asked = []

    def both(route):
        one = route.fetch().json()
        route.fulfill(json={**one, "data": [{**one["data"][0], "id": name} for name in ("base", "tuned")]})

    def forward(route):
        body = json.loads(route.request.post_data)
        asked.append(body["model"])
        route.continue_(post_data=json.dumps({**body, "model": server_model}))

    server_model = server.get("/v1/models").json()["data"][0]["id"]
    page.route("**/v1/models", both)
    page.route("**/v1/rerank", forward)
    page.goto(server.url)
    page.locator("#rerank").wait_for()
    page.locator("#demo").click()
    page.locator("#documents li").nth(9).wait_for()
    page.locator("#rank-form button.main").click()
    page.locator("#results article").nth(1).wait_for(timeout=60_000)
    assert asked == ["base", "tuned"]
    assert page.locator("#results h3").all_inner_texts() == ["base", "tuned"]
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1100, 375])
def test_the_page_of_a_run_grows_with_it(run, open_page, width):
    with watched(run) as url:
        page = open_page(url, width=width)
        page.locator("#plots svg").nth(4).wait_for()
        assert "step 3 / 10" in page.locator("#progress-text").inner_text()
        assert "0:04" not in page.content() and "4 s left" in page.locator("#progress-text").inner_text()
        assert page.locator("#quarantine td").nth(2).inner_text() == EVIL
        assert "0.8125" in page.locator("#evaluations").inner_text()
        assert_usable(page)
        add(run / "metrics.jsonl", step(4, 0.5))
        page.locator("#progress-text", has_text="step 4 / 10").wait_for(timeout=10_000)
        assert page.locator("#plots svg").first.get_attribute("aria-label") == "Loss: 0.5 (step 4)"
        page.get_by_role("button", name="switch to Chinese").click()
        assert page.locator("#plots figcaption").first.inner_text().startswith("损失")


@pytest.mark.slow
def test_a_snapshot_opens_without_a_server(run, open_page, tmp_path):
    source = os.environ.get("LITCHI_RUN", str(run))
    file = tmp_path / "run.html"
    assert run_litchi(tmp_path, "watch", source, "--html", str(file)).status == 0
    page = open_page(file.as_uri())
    page.locator("#plots svg").nth(4).wait_for()
    assert_usable(page)
    shot(page, "run")
