"""Greedy generation: prefill by the forest forward, then one token per live sequence per pass.

The prompts of a batch are one forest, so each distinct picture is encoded once and nothing is padded while the
prompts are read. Keys and values are kept per sequence; positions go on from the largest of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litchi.model.family import part
from litchi.model.forward import LitchiModel
from litchi.types import Batch


class KeyValueCache:
    """Keys and values of S sequences for every layer, filled by the prefill and read while decoding.

    Each layer holds [S, longest, Hk, D]; `lengths[s]` says how much of row s is real. While `decoding` is False the
    attention runs as usual and the cache only listens.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], room: int):
        self.spans = spans
        self.lengths = torch.tensor([end - start for start, end, _ in spans])
        self.room = room
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.decoding = False
        self.alive: Tensor | None = None  # sequences of the current pass

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """Called by the attention function with q [T, Hq, D], k, v [T, Hk, D]; None lets it go on by itself."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if not self.decoding:
            self._listen(layer, k, v)
            return None
        keys, values = self.layers[layer]
        assert self.alive is not None
        alive = self.alive.to(k.device)  # layers may be on several devices
        at = self.lengths.to(k.device)[alive]
        keys[alive, at], values[alive, at] = k, v.to(values.dtype)
        longest = int(self.lengths[alive.cpu()].max()) + 1
        mask = torch.arange(longest, device=k.device)[None, :] <= at[:, None]
        out = F.scaled_dot_product_attention(
            q[:, :, None].to(values.dtype),
            keys[alive, :longest].transpose(1, 2),
            values[alive, :longest].transpose(1, 2),
            attn_mask=mask[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        return out[:, :, 0]

    def _listen(self, layer: int, k: Tensor, v: Tensor) -> None:
        longest = int(self.lengths.max()) + self.room
        keys, values = (v.new_zeros(len(self.spans), longest, *t.shape[1:]) for t in (k, v))
        for s, (start, end, _) in enumerate(self.spans):
            keys[s, : end - start], values[s, : end - start] = k[start:end], v[start:end]
        self.layers[layer] = keys, values


@dataclass(frozen=True)
class Generation:
    """Ids of an answer without the stop token, and whether a stop token ended it."""

    ids: list[int]
    finished: bool


@torch.no_grad()
def generate_greedy(
    model: LitchiModel,
    batch: Batch,
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    anyone_alive: Callable[[bool], bool] = lambda alive: alive,
) -> list[Generation]:
    """Continue every prompt of a batch of single-span prompts.

    Args:
        model: the owner, or what wraps it, unwrapped.
        batch: prompts; each span is one prompt.
        stop: token ids that end an answer.
        max_new_tokens: of each answer.
        anyone_alive: with sharded weights, whether any rank still generates: all ranks step until all are done.

    Returns:
        One Generation per prompt, in order.
    """
    prompts = 0 if not batch.samples else len(batch.spans)
    answers: list[list[int]] = [[] for _ in range(prompts)]
    finished = [False] * prompts
    limits = [max_new_tokens] * prompts
    for tokens in stream_greedy(model, batch, stop=stop, limits=limits, room=max_new_tokens, anyone_alive=anyone_alive):
        for s, token in tokens:
            finished[s] = token is None
            answers[s] += [] if token is None else [token]
    return [Generation(ids, done) for ids, done in zip(answers, finished, strict=True)]


@torch.no_grad()
def stream_greedy(
    model: LitchiModel,
    batch: Batch,
    *,
    stop: Sequence[int],
    limits: Sequence[int],
    room: int,
    anyone_alive: Callable[[bool], bool] = lambda alive: alive,
    dropped: Container[int] = (),
) -> Iterator[list[tuple[int, int | None]]]:
    """The same token by token: after each pass the (prompt, token) it gave, None where a stop token ended the answer.

    Args:
        limits: tokens of each prompt's answer at most.
        room: tokens of the longest answer of all ranks.
        dropped: prompts that nobody waits for any more; looked at before each pass.
    """
    device = model.device
    prompts = 0 if not batch.samples else len(batch.spans)
    cache = KeyValueCache(batch.spans, room)
    hidden = model.hidden(batch, cache=cache)
    cache.decoding = True
    ends = torch.tensor([end - 1 for _, end, _ in batch.spans], device=device)
    positions = torch.stack([batch.positions[:, a:b].max() + 1 for a, b, _ in batch.spans]).to(device)
    left = [*limits, *[0] * (len(batch.spans) - prompts)]
    tokens = _best(model, hidden[ends])
    alive = torch.arange(len(batch.spans), device=device)
    while True:
        said: list[tuple[int, int | None]] = []
        for s, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            if left[s]:
                said.append((s, None if token in stop else token))
                left[s] = 0 if token in stop else left[s] - 1
        yield said
        left = [0 if s in dropped else rest for s, rest in enumerate(left)]
        live = [s for s, rest in enumerate(left) if rest]
        if not anyone_alive(bool(live)):
            break
        keep = live or [0]  # a rank that is done still takes part in the others' collectives
        index = torch.tensor([alive.tolist().index(s) if s in alive.tolist() else 0 for s in keep], device=device)
        alive, tokens = torch.tensor(keep, device=device), tokens[index]
        cache.alive = alive
        tokens = _best(model, model.next_hidden(tokens, positions[alive], cache))
        if live:
            cache.lengths[alive.cpu()] += 1
            positions[alive] += 1


def _best(model: LitchiModel, hidden: Tensor) -> Tensor:
    return part(model.hf, model.family.head)(hidden).argmax(-1)
