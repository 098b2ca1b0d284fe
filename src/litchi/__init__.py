"""Litchi: fine-tune Qwen2.5-VL and its rerankers, and prove it.

The names of `__all__` are what a program may rely on; each is imported when it is first asked for, so that `import
litchi` is cheap. docs/python.md shows them at work.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "Config": "litchi.config",
    "load_config": "litchi.config",
    "UserError": "litchi.errors",
    "start_ranks": "litchi.dist",
    "stop_ranks": "litchi.dist",
    "train_run": "litchi.train.loop",
    "measure_target": "litchi.train.measure",
    "write_lines": "litchi.train.writing",
    "export_target": "litchi.train.export_target",
}
__all__ = ("__version__", *_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'litchi' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
