"""How every test runs: one thread, gloo on the loopback, no network, a cache of its own.

The environment is set before anything imports torch, and processes that a test starts inherit it. Two threads per
process on a busy two-core machine ran 30 times slower than one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(ENVIRONMENT)
if "torch" in sys.modules:  # a plugin was faster than we
    sys.modules["torch"].set_num_threads(1)

_cache = None


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    """Give this process (with xdist: each worker) an empty cache, so that no test passes thanks to an earlier run."""
    global _cache
    _cache = tempfile.mkdtemp(prefix="litchi-cache-")
    os.environ["LITCHI_CACHE"] = _cache


def pytest_unconfigure(config):
    if _cache:
        shutil.rmtree(_cache, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Skip what this machine or this command does not run, and say why."""
    if not config.getoption("--slow"):
        _skip(items, "slow", "slow: run by make test-all (--slow)")
    if any("needs_gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "needs_gpu", "needs a CUDA device")


def pytest_collection_finish(session):
    """Before the first test, where there are some that start processes."""
    if "processes" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["processes"].start_fork_server()


def _skip(items, keyword, reason):
    for item in items:
        if keyword in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


# ---- The packaged base model, loaded once per process by Litchi and by transformers. Tests leave its weights alone.

PIXELS = (3136, 50176)  # a budget under which pictures of different sizes have different grids


@pytest.fixture(scope="session")
def base_folder():
    from litchi.model.build import builtin_folder

    return builtin_folder()


@pytest.fixture(scope="session")
def processor(base_folder):
    from litchi.data.processor import load_processor

    return load_processor(base_folder).with_pixels(*PIXELS)


@pytest.fixture(scope="session")
def loaded(base_folder):
    """The base as Litchi loads it, fp32, every parameter trainable."""
    import torch

    from litchi.model.build import load_model

    found = load_model(base_folder, dtype=torch.float32)
    found.hf.requires_grad_(True)
    return found


@pytest.fixture(scope="session")
def hf_model(base_folder):
    """The oracle: the base as transformers loads and runs it."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hf_processor(base_folder):
    """The oracle of what goes into the model, with the budget of `processor`."""
    import transformers

    found = transformers.AutoProcessor.from_pretrained(base_folder)
    found.image_processor.size = {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}
    return found


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank, in a group of its own."""
    from litchi.dist import start_ranks, stop_ranks

    yield start_ranks()
    stop_ranks()


# ---- A browser, for the pages that are made here


def _find_chromium():
    """The system's; None: there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = _find_chromium() or (own if os.path.exists(own) else None)
        if path is None:
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Opens a page; at the end nothing was written to its console and nothing was asked of another host."""
    opened, wrong = [], []

    def visit(url, *, width=1100, locale="en-GB", forgive=(), **more):
        context = browser.new_context(viewport={"width": width, "height": 900}, locale=locale, **more)
        context.set_default_timeout(60_000)  # a busy machine is no error of the page's
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


@pytest.fixture
def shot(tmp_path):
    """Keeps a screenshot to look at: where LITCHI_SHOTS says, or with the test's other files."""

    def take(page, name):
        file = Path(os.environ.get("LITCHI_SHOTS", tmp_path), f"{name}.png")
        from PIL import Image

        page.screenshot(path=file, full_page=True)
        assert Image.open(file).size[1] > 500

    return take
