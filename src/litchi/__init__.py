"""Litchi: fine-tune Qwen2.5-VL and its rerankers, and prove it."""

__version__ = "0.1.0"
