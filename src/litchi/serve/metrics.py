"""What the server counts, for Prometheus: requests, documents, tokens, times, the queue, the features kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

TYPE = CONTENT_TYPE_PLAIN_0_0_4
TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        running: how many requests engines work on now.
    """

    def __init__(self, running: Callable[[], int]):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("litchi_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "litchi_request_seconds", "From arrival to the end.", ["path"], buckets=TIMES_S, registry=registry
        )
        self.waited = Histogram(
            "litchi_queue_seconds", "What answered requests waited.", buckets=TIMES_S, registry=registry
        )
        self.batches = Histogram(
            "litchi_batch_documents", "Documents of a batch.", ["engine"], buckets=SIZES, registry=registry
        )
        self.batch_s = Histogram(
            "litchi_batch_seconds", "What a batch took.", ["engine"], buckets=TIMES_S, registry=registry
        )
        self.tokens = Counter("litchi_tokens", "Tokens scored.", ["engine"], registry=registry)
        self.pictures = Gauge("litchi_pictures_asked", "Pictures met.", ["engine"], registry=registry)
        self.found = Gauge("litchi_pictures_found", "Of them, features were there.", ["engine"], registry=registry)
        self.cache = Gauge("litchi_feature_bytes", "Features that are kept.", ["engine"], registry=registry)
        self.prefixes = Gauge("litchi_prefix_bytes", "Queries that are kept.", ["engine"], registry=registry)
        self.saved = Gauge("litchi_saved_tokens", "Of queries met before.", ["engine"], registry=registry)
        Gauge("litchi_running_requests", "Requests at work or waiting.", registry=registry).set_function(running)

    def see_request(self, path: str, status: int, seconds: float, waited_s: float | None) -> None:
        """A request has ended."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)
        if waited_s is not None:
            self.waited.observe(waited_s)

    def see_batch(self, told: Mapping[str, Any]) -> None:
        """An engine has computed a batch."""
        engine = str(told["engine"])
        self.batches.labels(engine).observe(told["documents"])
        self.batch_s.labels(engine).observe(told["batch_s"])
        self.tokens.labels(engine).inc(told["tokens"])
        self.pictures.labels(engine).set(told["asked"])
        self.found.labels(engine).set(told["found"])
        self.cache.labels(engine).set(told["cache_bytes"])
        self.prefixes.labels(engine).set(told["prefix_bytes"])
        self.saved.labels(engine).set(told["saved_tokens"])

    def format(self) -> bytes:
        """All of it as text."""
        return generate_latest(self.registry)
