"""Tokens that a base does not know: their rows of the embedding, and of a head of its own, beside the old weight.

Words in, rows that train beside a base that may be frozen; an export writes them into the weight. The weight itself is
never cut to the tokenizer's length and grows only where a token's number lies behind its last row. A row begins as the
mean of the pieces that the base spells the word with; of a token that the base has, as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litchi.data.processor import Processor
from litchi.errors import UsageError
from litchi.model.family import Family, part
from litchi.model.scoring import HeadRows

ROWS = "new_rows"


@dataclass(frozen=True)
class NewTokens:
    """Words with rows of their own.

    Args:
        ids: of each word.
        pieces: ids whose rows' mean the row begins as.
        rows: of the weight when the new ones are in it.
        grown: whether these are more than the base has.
        tokenizer_json: of the tokenizer that knows the words.
    """

    ids: dict[str, int]
    pieces: tuple[tuple[int, ...], ...]
    rows: int
    grown: bool
    tokenizer_json: str


def find_new_tokens(base: Processor, words: Iterable[str], rows: int) -> NewTokens | None:
    """The words asked for, and those of the tokenizer that the weights have no row for. None: there are none.

    Args:
        base: the processor as its folder has it.
        rows: of the embedding.
    """
    known = {word: number for word, number in base.numbers.items() if number < rows}
    processor = base.with_words(words)
    ids = {word: number for word, number in processor.numbers.items() if number >= rows}
    ids |= {word: processor.numbers[word] for word in words}
    if not ids:
        return None
    ids = dict(sorted(ids.items(), key=lambda item: item[1]))
    pieces = tuple((known[word],) if word in known else tuple(base.spell(word)) for word in ids)
    total = max(rows, *(number + 1 for number in ids.values()))
    return NewTokens(ids, pieces, total, total > rows, processor.tokenizer_json)


def add_rows(hf: Any, family: Family, new: NewTokens | None) -> None:
    """Give the embedding and an untied head the new rows, without values yet, in place. `hf.new_tokens` has `new`."""
    hf.new_tokens = new
    if new is None:
        return
    embedding, head = part(hf, family.embedding), part(hf, family.head)
    assert type(embedding) is nn.Embedding and type(head) is HeadRows
    tied = head.weight is embedding.weight
    for module, kind in ((embedding, EmbeddingWithNew), (head, HeadWithNew)):
        module.__class__ = kind
        rows = torch.empty(len(new.ids), module.weight.shape[1], dtype=module.weight.dtype, device="meta")  # type: ignore[index,union-attr]
        module.new_rows = embedding.new_rows if module is head and tied else nn.Parameter(rows, requires_grad=False)
        module.register_buffer("new_ids", torch.tensor(list(new.ids.values())), persistent=False)
        module.total = new.rows  # type: ignore[assignment]


def first_rows(new: NewTokens, read: Callable[[int], Tensor]) -> Tensor:
    """The values the rows begin with, [n, hidden]; `read` gives a row of the base, [1, hidden]."""
    known = {number: read(number) for pieces in new.pieces for number in pieces}
    means = [torch.cat([known[number] for number in pieces]).float().mean(0) for pieces in new.pieces]
    return torch.stack(means)


def check_rows(loaded: Any, *, stages: int, head: str) -> None:
    """UsageError where rows of new tokens cannot train."""
    if loaded.hf.new_tokens is None:
        return
    if stages > 1:
        raise UsageError(
            "parallel.pp with new tokens", why="their rows are those of the first and of the last stage",
            remedy="Use parallel.dp_shard",
        )  # fmt: skip
    if head == "lora":
        raise UsageError(
            "trainable.head=lora with new tokens", why="its additions have as many rows as the base",
            remedy="Set trainable.head to full or frozen: rows of new tokens train anyway",
        )  # fmt: skip


def release_rows(hf: Any, family: Family, *, rerank: bool) -> None:
    """Let the new rows train, whatever the part does, in place; of a head asked for two rows alone they stay."""
    if hf.new_tokens is not None:
        embedding, head = part(hf, family.embedding), part(hf, family.head)
        embedding.new_rows.requires_grad_(True)  # type: ignore[union-attr]
        if head.new_rows is not embedding.new_rows:
            head.new_rows.requires_grad_(not rerank)  # type: ignore[union-attr]


def is_new_row(name: str) -> bool:
    """Whether a parameter, by its name, is rows of new tokens."""
    return name.endswith(f".{ROWS}")


def with_new_rows(module: Any, weight: Tensor, rows: Tensor) -> Tensor:
    """The whole weight with the new rows in it, longer where they lie behind its last one. On the CPU."""
    grown = F.pad(weight, (0, 0, 0, module.total - len(weight)))
    return grown.index_copy(0, module.new_ids.cpu(), rows.to(weight.dtype))


class EmbeddingWithNew(nn.Embedding):
    """An embedding some of whose tokens have rows of their own, `new_rows` [n, hidden], by `new_ids` [n]."""

    new_rows: nn.Parameter
    new_ids: Tensor
    total: int

    def forward(self, ids: Tensor) -> Tensor:
        old = F.embedding(ids.clamp(max=self.num_embeddings - 1), self.weight)
        hit = ids[..., None] == self.new_ids
        new = F.embedding(hit.int().argmax(-1), self.new_rows)
        return torch.where(hit.any(-1, keepdim=True), new.to(old.dtype), old)


class HeadWithNew(HeadRows):
    """A head some of whose tokens have rows of their own. Its token loss is that of any head."""

    new_rows: nn.Parameter
    new_ids: Tensor
    total: int

    def forward(self, hidden: Tensor, rows: tuple[int, ...] | None = None, targets: Tensor | None = None) -> Tensor:
        if rows is not None:
            return super().forward(hidden, rows)
        logits = F.linear(hidden, self.weight)
        logits = F.pad(logits, (0, self.total - logits.shape[-1]), value=float("-inf"))
        return logits.index_copy(-1, self.new_ids, F.linear(hidden, self.new_rows).to(logits.dtype))


# ------------------------------------------------------------------------------------------------------ tokenizer files


def write_tokenizer(new: NewTokens, folder: Path) -> None:
    """Let the tokenizer's files in a folder know the words."""
    (folder / "tokenizer.json").write_text(new.tokenizer_json, encoding="utf-8")
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    settings = folder / "tokenizer_config.json"
    body = json.loads(settings.read_text(encoding="utf-8"))
    if "added_tokens_decoder" in body:
        for word, number in new.ids.items():
            body["added_tokens_decoder"].setdefault(str(number), {"content": word, **plain})
        settings.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    older = folder / "added_tokens.json"
    if older.is_file():
        body = json.loads(older.read_text(encoding="utf-8")) | new.ids
        older.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
