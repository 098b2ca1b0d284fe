"""The playground and the page of a run: what they get, what they may load, and how a browser fares with them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import threading
from contextlib import contextmanager

import httpx
import pytest
import serving
from PIL import Image
from processes import run_litchi
from serving import copy_base

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
    front = Front({spec.name: pool}, limits, Gate(frozenset()), Fetcher(frozenset(), 1), Metrics(lambda: 0))
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


def assert_usable(page):
    """Every control has a name, nothing is wider than the screen, and text stands out from what is behind it."""
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, img, svg, progress")]
          .filter(n => n.checkVisibility())
          .filter(n => !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby") || n.alt
                         || (n.labels && [...n.labels].some(l => l.textContent.trim())) || n.textContent.trim()))
          .map(n => n.outerHTML)"""
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(FAINT) == []


FAINT = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = n => {
    for (; n; n = n.parentElement) {
      const colour = parse(getComputedStyle(n).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter(n => n.checkVisibility() && !n.disabled
      && [...n.childNodes].some(c => c.nodeType === 3 && c.textContent.trim())).map(n => {
    const style = getComputedStyle(n), ink = parse(n.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(n))].sort((x, y) => y - x);
    return [n.textContent.slice(0, 30), (a + 0.05) / (b + 0.05)];
  }).filter(([, ratio]) => ratio < 4.5);
}"""  # WCAG 2.2, level AA


def ranking(page, model=0):
    """What is shown, best first: names of pictures, and texts."""
    rows = page.get_by_role("article").nth(model).get_by_role("listitem")
    return [
        row.get_by_role("img").first.get_attribute("alt") or row.locator(".text").inner_text() for row in rows.all()
    ]


def rank(page):
    page.get_by_role("status").evaluate("node => { node.textContent = ''; }")
    page.get_by_role("button", name="Rank", exact=True).click()
    page.get_by_role("status").filter(has_text="Ranked.").wait_for()
    return ranking(page)


def drop(page, where, name, kind, data):
    """Drop a file as the mouse would."""
    page.get_by_label(where, exact=True).evaluate(
        """(node, [name, kind, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, {type: kind}));
          node.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true, bubbles: true}));
        }""",
        [name, kind, base64.b64encode(data).decode()],
    )


def as_png(product):
    out = io.BytesIO()
    draw(product, 3).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model and the packaged base beside it. LITCHI_MODEL: a trained one, for pictures worth looking at."""
    folder = tmp_path_factory.mktemp("server")
    model = os.environ.get("LITCHI_MODEL") or str(copy_base(folder / "tuned", turn_head))
    with serving.serving(folder / "served", model, "--against", "builtin:tiny", "serve.new_tokens=24") as one:
        yield one


def turn_head(weights):
    """Make what was worst best."""
    norm = next(name for name in weights if name.endswith("language_model.norm.weight") or name == "model.norm.weight")
    weights[norm].neg_()


@pytest.mark.slow
def test_a_query_is_typed_a_picture_dropped_and_the_ranking_changes(server, open_page, shot):
    page = open_page(server.url)
    page.get_by_role("button", name="Demo catalogue").click()
    documents = page.get_by_label("Document", exact=True).locator("xpath=..").get_by_role("listitem")
    documents.nth(9).wait_for()
    query = page.get_by_role("textbox", name="Query")
    query.fill("red striped dress")
    before = rank(page)
    assert len(before) == 10 and len(set(before)) == 10
    query.fill("green mug")
    assert sorted(rank(page)) == sorted(before) and ranking(page) != before
    typed = ranking(page)
    drop(page, "Query", "mug.png", "image/png", as_png(Product("mug", "green", "plain")))
    page.get_by_role("button", name="Remove: mug.png").wait_for()
    assert sorted(rank(page)) == sorted(before) and ranking(page) != typed
    assert_usable(page)
    shot(page, "playground")
    drop(page, "Document", "notes.css", "text/css", b"p {}")
    page.get_by_role("alert").filter(has_text="notes.css is not a picture").wait_for()
    drop(page, "Document", "mug.png", "image/png", as_png(Product("mug", "blue", "plain")))
    documents.nth(10).wait_for()
    page.get_by_role("textbox", name="Document").fill(EVIL)
    page.get_by_role("button", name="Add text").click()
    assert EVIL in rank(page) and len(ranking(page)) == 12  # as text
    assert page.locator("img[src=x]").count() == 0


@pytest.mark.slow
def test_two_models_stand_side_by_side(server, open_page):
    page = open_page(server.url)
    page.get_by_role("button", name="Demo catalogue").click()
    page.get_by_role("button", name="Remove: ").nth(9).wait_for()
    tuned, base = rank(page), ranking(page, 1)
    names = [model["id"] for model in server.get("/v1/models").json()["data"]]
    assert [page.get_by_role("article").nth(n).get_by_role("heading").inner_text() for n in (0, 1)] == names
    assert tuned != base and sorted(tuned) == sorted(base) and names[1] == "builtin:tiny"
    for n in (0, 1):
        assert re.search(r"10 documents in \d+ ms", page.get_by_role("article").nth(n).inner_text())
    marks = page.get_by_role("img", name=re.compile("above|below"))
    moved = [base.index(name) - place for place, name in enumerate(tuned)]
    assert [mark.inner_text() for mark in marks.all()] == [f"{'▲' if n > 0 else '▼'} {abs(n)}" for n in moved if n]
    assert_usable(page)


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_on_a_phone_in_chinese(server, open_page, shot, colours):
    page = open_page(server.url, width=375, locale="zh-CN", color_scheme=colours)
    page.get_by_role("button", name="示例目录").click()
    page.get_by_role("button", name="移除: ").nth(9).wait_for()
    assert page.get_by_role("textbox", name="查询").input_value() == "红色条纹连衣裙"
    page.get_by_role("button", name="排序", exact=True).click()
    page.get_by_role("status").filter(has_text="已排序。").wait_for()
    assert_usable(page)
    shot(page, f"phone-{colours}")
    page.get_by_role("button", name="切换到英文").click()
    page.reload()
    page.get_by_role("button", name="Demo catalogue").wait_for()  # the choice is remembered


@pytest.mark.slow
def test_the_keyboard_is_enough(server, open_page):
    page = open_page(server.url)
    page.get_by_role("button", name="Demo catalogue").wait_for()

    def go_to(role, name):
        wanted = page.get_by_role(role, name=name, exact=True)
        for _ in range(60):
            page.keyboard.press("Tab")
            if wanted.evaluate("node => node === document.activeElement"):
                assert wanted.evaluate("node => getComputedStyle(node).outlineStyle !== 'none'")  # it is seen
                return
        raise AssertionError(f"{name} is not reached")

    go_to("textbox", "Document")
    for text in ("a red dress", "a blue mug"):
        page.keyboard.type(text)
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # Add text; the cursor is back in the field
    go_to("textbox", "Query")
    page.keyboard.type("mug")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Ranked.").wait_for()
    assert sorted(ranking(page)) == ["a blue mug", "a red dress"]
    go_to("button", "Remove: a red dress")
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Remove: ").count() == 1


@pytest.mark.slow
def test_a_chat_with_a_picture_is_streamed(server, open_page, shot):
    if os.environ.get("LITCHI_MODEL"):
        pytest.skip("the model may have been trained for rankings alone")
    page = open_page(server.url)
    drop(page, "Message", "hat.png", "image/png", as_png(Product("hat", "red", "plain")))
    page.get_by_role("button", name="Remove: hat.png").wait_for()
    page.get_by_role("textbox", name="Message").fill("What is it?")
    page.get_by_role("button", name="Send").click()
    asked, *answers = (page.locator("#answers").get_by_role("article").nth(n) for n in range(3))
    for answer in answers:
        answer.get_by_text(re.compile(r"\d ms$")).wait_for()
        assert answer.locator(".text").inner_text().strip()
    assert asked.get_by_role("img", name="hat.png").is_visible()
    assert_usable(page)
    shot(page, "chat")


@pytest.mark.slow
def test_a_key_is_asked_for_and_what_the_server_says_is_shown(open_page, tmp_path):
    with serving.serving(tmp_path, "builtin:tiny", env={"LITCHI_API_KEYS": "open sesame"}) as one:
        page = open_page(one.url, forgive=("401",))
        page.get_by_role("alert").filter(has_text="An API key is needed").wait_for()
        page.get_by_label("API key").fill("open sesame")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Rank").wait_for()
        assert page.get_by_role("alert").count() == 0


@pytest.mark.parametrize("width", [1100, pytest.param(375, marks=pytest.mark.slow)])
def test_the_page_of_a_run_grows_with_it(run, open_page, width):
    with watched(run) as url:
        page = open_page(url, width=width)
        page.get_by_role("img", name="Loss: 0.98765 (step 3)").wait_for()
        assert page.get_by_role("img").count() == 5
        assert page.get_by_role("status").inner_text() == "running · step 3 / 10 · 4 s left"
        assert page.get_by_role("cell", name=EVIL).inner_text() == EVIL
        assert page.get_by_role("cell", name="0.8125").is_visible()
        assert_usable(page)
        add(run / "metrics.jsonl", step(4, 0.5))
        page.get_by_role("img", name="Loss: 0.5 (step 4)").wait_for()
        assert "step 4 / 10" in page.get_by_role("status").inner_text()
        page.get_by_role("button", name="switch to Chinese").click()
        assert page.get_by_role("img", name="损失: 0.5 (步 4)").is_visible()


@pytest.mark.slow
def test_a_snapshot_opens_without_a_server(run, open_page, shot, tmp_path):
    source = os.environ.get("LITCHI_RUN", str(run))
    file = tmp_path / "run.html"
    assert run_litchi(tmp_path, "watch", source, "--html", str(file)).status == 0
    page = open_page(file.as_uri())
    page.get_by_role("img", name="Loss: ").wait_for()
    assert_usable(page)
    shot(page, "run")
