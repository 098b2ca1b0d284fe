"""How every test runs: one thread, gloo on the loopback, no network, a cache of its own.

The environment is set before anything imports torch, and processes that a test starts inherit it. Two threads per
process on a busy two-core machine ran 30 times slower than one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

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


def _skip(items, keyword, reason):
    for item in items:
        if keyword in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
