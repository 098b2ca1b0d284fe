"""The settings of `litchi serve`: what a request, a key and the queue may take, and how batches are made.

They are read like all others (`serve.queue=8`), change no number, and mean nothing to the other verbs.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt

from litchi.config.kinds import Positive, Section

Seconds = Annotated[float, Gt(0)]


class Serve(Section):
    """What `litchi serve` allows, and how it makes batches."""

    queue: Positive = 64
    """Requests at work or waiting, per engine; further ones are refused with 503."""
    queue_s: Seconds = 10.0
    """Seconds of work that may wait, per engine, by what is in the requests and what such took lately; further ones are
    refused with 503."""
    rate: Annotated[float, Gt(0)] | None = None
    """Requests a second of one API key (without keys: of one address); further ones are refused with 429."""
    concurrency: Positive | None = None
    """Requests at a time of one API key (without keys: of one address); further ones are refused with 429."""
    connections: Positive = 1000
    """Open connections."""
    body_mb: Positive = 32
    """Size of a request, in MiB."""
    waiting_mb: Positive = 512
    """All requests that are read or at work, in MiB; further ones are refused with 503."""
    documents: Positive = 1000
    """Documents of a request."""
    pictures: Positive = 1000
    """Pictures of a request."""
    picture_pixels: Positive = 33_554_432
    """Pixels of a picture as it lies in its file."""
    request_pixels: Positive = 134_217_728
    """Pixels of all pictures of a request."""
    messages: Positive = 256
    """Messages of a conversation."""
    new_tokens: Positive = 1024
    """Tokens of an answer at most."""
    arrival_s: Seconds = 20.0
    """For a request's headers, and for its body, to arrive."""
    request_s: Seconds = 60.0
    """From a request's arrival to the end of its answer."""
    grace_s: Seconds = 20.0
    """What running requests have once a signal has come."""
    batch_tokens: Positive | None = None
    """Tokens of a batch; null: `train.micro_batch_tokens`."""
    batch_pixels: Positive = 16_777_216
    """Pixels of the pictures of a batch that are encoded."""
    wait_ms: Annotated[float, Ge(0)] = 5.0
    """How long the first request waits for others to share a batch with, where the model is idle."""
    cache_mb: Annotated[int, Ge(0)] = 256
    """Features of pictures that each engine keeps, in MiB."""
    prefix_mb: Annotated[int, Ge(0)] = 256
    """Keys and values of queries that each engine keeps, in MiB: asked again with other documents, a query is not
    computed again."""
