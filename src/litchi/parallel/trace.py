"""What a micro-batch takes of memory while it is computed: the model's own passes on tensors without values.

config.json, what trains and a batch's shape in, bytes out. Every storage is counted from the operation that makes it
to its end, so leaves, attention, checkpointing, LoRA and the loss are what they are in a run, on a CPU as on a GPU
that is not there. A deep model is traced with few layers: each more adds what one adds.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from litchi.model import attention, leaves, token_loss
from litchi.model.adapters import apply_trainable
from litchi.model.family import find_family, part
from litchi.model.forward import LitchiModel
from litchi.model.kernels import ON_CPU, Kernels
from litchi.model.leaves import folds_stills
from litchi.model.scoring import ask_rows
from litchi.model.sizes import read_shape
from litchi.model.token_loss import rows_at_once
from litchi.model.vision import mark_windowed
from litchi.parallel.heap import NODE, measure_held
from litchi.types import Batch, VisionSpec

if TYPE_CHECKING:
    from litchi.config import Trainable

DEEP = 8  # layers or blocks; a deeper model is traced with fewer
FEW = 2
VARY = 0.003  # by which two micro-batches of a step differ: a hole must not be of the very size that is wanted


class Tracker(TorchDispatchMode):
    """Bytes of all storages that live, and the most of them since `mark`; `events` are what is taken (key, size) and
    freed (key, 0), in order, with the nodes of autograd's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Hashable, int]] = []
        self.live = self.peak = 0
        self.known: dict[int, Any] = {}

    def note(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size, number = storage.nbytes(), len(self.events)
        if key in self.known or not size:
            return

        def free(_: Any) -> None:
            if self.known.pop(key, None) is not None:
                self.live -= size
                self.events.append((number, 0))

        self.known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.events.append((number, size))

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count tensors that were there before."""
        self.known |= {t.untyped_storage()._cdata: None for t in tensors}

    def mark(self) -> int:
        """The peak since the last mark."""
        peak, self.peak = self.peak, self.live
        return peak

    def note_node(self, node: Any) -> None:
        """Count a node of the graph until the graph is let go."""
        if self not in node.metadata:
            node.metadata[self] = _Node(self.events)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self.note_node(leaf.grad_fn)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return out


class _Node:
    """What autograd keeps of an operation: from here to its end."""

    def __init__(self, events: list[tuple[Hashable, int]]) -> None:
        self.events, self.number = events, len(events)
        events.append((self.number, NODE))

    def __del__(self) -> None:
        self.events.append((self.number, 0))


@dataclass(frozen=True)
class Stream:
    """The shape of a micro-batch.

    Args:
        tokens: of the language part.
        rows: hidden states that go to the head.
        grids: of the distinct pictures, in patches.
        lengths: tokens of each sample; a last one is the rest.
        wide: whether patches come as two frames (a video is among them).
    """

    tokens: int
    rows: int
    grids: tuple[tuple[int, int, int], ...] = ()
    lengths: int = 1024
    wide: bool = False


@dataclass(frozen=True)
class Setup:
    """How the model computes.

    Args:
        device: `cpu` or `cuda`; neither has to be there.
        held: dtype of the weights a layer computes with.
        autocast: dtype of a forward whose weights are held in another; None where they are cast before.
        checkpoint: compute activations twice.
        rerank: two words' logits instead of the vocabulary's.
        tp: ranks that cut each layer.
    """

    device: str
    held: torch.dtype
    autocast: torch.dtype | None = None
    checkpoint: bool = False
    rerank: bool = False
    tp: int = 1


@dataclass(frozen=True)
class Taken:
    """Bytes of a micro-batch.

    Args:
        layer, block: what a language layer, a vision block leaves until its backward.
        rest: what else is left by then; below zero where the last layer, computed at some rows alone, leaves less.
        vision, language, logits, backward: the most each phase takes besides what all layers and blocks leave.
    """

    layer: float
    block: float
    rest: float
    vision: float
    language: float
    logits: float
    backward: float

    def blend(self, other: Taken, at: float) -> Taken:
        """What lies between two, at 0 this and at 1 the other; also beyond."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Taken(*(a + (b - a) * at for a, b in pairs))


def trace(config: Mapping[str, Any], trainable: Trainable, stream: Stream, setup: Setup) -> Taken:
    """Take a micro-batch forwards and backwards without values.

    Args:
        config: config.json.
        trainable: what trains.
    """
    shape = read_shape(config)
    layers = shape.layers if shape.layers <= DEEP else FEW
    depth = shape.vision_depth if shape.vision_depth <= DEEP else FEW

    def once(n: int, m: int) -> _Run:
        return _run(with_depth(config, n, m), trainable, stream, setup)

    base = once(layers, depth)
    fewer = once(max(1, layers - 1), max(1, depth - 1)) if layers > 1 or depth > 1 else base
    block = float(base.embedded - fewer.embedded)
    layer = base.kept - fewer.kept - block
    left = layers * layer + depth * block
    return Taken(
        layer=layer,
        block=block,
        rest=base.kept - left,
        vision=base.vision - left,
        language=base.language - left,
        logits=base.logits - left,
        backward=base.backward - left,
    )


@dataclass(frozen=True)
class _Run:
    embedded: int  # bytes alive behind the vision tower
    kept: int  # between forward and backward
    vision: int  # peaks of the phases
    language: int
    logits: int
    backward: int


def _run(config: dict[str, Any], trainable: Trainable, stream: Stream, setup: Setup) -> _Run:
    owner = make_owner(config, trainable, setup)
    batch = make_stream(stream, owner.spec, folds_stills(part(owner.hf, owner.family.vision)), rerank=setup.rerank)
    for parameter in owner.parameters():
        if parameter.requires_grad:  # as from the second micro-batch on, and when a run is rehearsed
            parameter.grad = torch.empty_like(parameter)
    tracker = Tracker()
    own = [*owner.parameters(), *owner.buffers(), *(p.grad for p in owner.parameters() if p.grad is not None)]
    tracker.leave_out(own)
    with _as_on(setup), tracker:
        embedded = owner.embed(batch)
        vision, live = tracker.mark(), tracker.live
        hidden = owner.layers(embedded, batch, needed=True)
        del embedded
        language = tracker.mark()
        loss = owner.finish(hidden, batch, batch).loss
        del hidden
        logits, kept = tracker.mark(), tracker.live
        loss.backward()
        return _Run(live, kept, vision, language, logits, tracker.mark())


@dataclass(frozen=True)
class Kept:
    """What a rank of a CPU keeps besides a batch.

    Args:
        share: of weights, gradients and the optimizer's state; the others have the rest.
        states: the optimizer's, of a trained weight's bytes.
        apart: the optimizer works on copies of weights and gradients.
    """

    share: float = 1.0
    states: float = 2.0
    apart: bool = False


def measure_resident(
    config: Mapping[str, Any], trainable: Trainable, stream: Stream, setup: Setup, kept: Kept, micro: int
) -> int:
    """The most bytes of tensors, of what autograd keeps and of holes that a process on a CPU holds in two steps.

    Args:
        micro: micro-batches of a step; more than two find what the second left.
    """
    owner = make_owner(dict(config), trainable, setup)
    folds = folds_stills(part(owner.hf, owner.family.vision))
    trained = [p for p in owner.parameters() if p.requires_grad]
    tracker = Tracker()
    tracker.leave_out([*owner.parameters(), *owner.buffers()])

    def keep(name: str, parameters: Iterable[Tensor], times: float = 1.0) -> None:
        for number, p in enumerate(parameters):
            for copy_ in range(math.ceil(times)):
                share = kept.share * min(1.0, times - copy_)
                tracker.events.append(((name, number, copy_), round(p.numel() * p.element_size() * share)))

    keep("weights", owner.parameters())
    keep("copies", trained, float(kept.apart))
    for step in range(2):
        with _as_on(setup), tracker:
            for n in range(min(micro, 2)):
                tokens = round(stream.tokens * (1 + (VARY if (n + step) % 2 else -VARY)))
                some = make_stream(replace(stream, tokens=tokens), owner.spec, folds, rerank=setup.rerank)
                owner(some).loss.backward()
        if step == 0:
            keep("rooms", trained, float(kept.apart))
            keep("states", trained, kept.states)
        for p in trained:
            p.grad = None
    return measure_held(tracker.events)


def make_owner(config: dict[str, Any], trainable: Trainable, setup: Setup) -> LitchiModel:
    """The model as a run builds it, on the meta device."""
    import transformers

    family = find_family(config, "config.json")
    attention.register()
    kind = getattr(transformers, family.architecture)
    with torch.device("meta"):
        hf = kind._from_config(kind.config_class(**config), dtype=setup.held)
    hf.trains = True  # as weights that are not read-only do
    hf.set_attn_implementation(attention.NAME)
    hf.requires_grad_(False)
    head = part(hf, family.head)
    tied = head.weight is part(hf, family.embedding).weight
    ask_rows(head)
    mark_windowed(part(hf, family.vision))
    leaves.change_leaves(hf, family, leaves.Leaves())
    apply_trainable(SimpleNamespace(hf=hf, family=family, tied=tied, folder=Path()), trainable)  # type: ignore[arg-type]
    shape = read_shape(config)
    spec = VisionSpec(shape.patch, shape.merge, shape.temporal, shape.window, 0, 0, (0.0,) * 3, (1.0,) * 3)
    owner = LitchiModel(
        hf, family, spec, words=(0, 1) if setup.rerank else None, score_loss=lambda s, t, g: (s * t).sum()
    )
    owner.train()
    if setup.checkpoint:  # states of random numbers are of no size, and none can be had of a GPU that is not there
        hf.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        hf.disable_input_require_grads()
    _cut(owner, setup.tp)
    return owner


def make_stream(stream: Stream, spec: VisionSpec, folds: bool, *, rerank: bool) -> Batch:
    """A batch of this shape, of zeros."""
    tokens = max(1, stream.tokens)
    rows = max(1, min(stream.rows, tokens - 1))
    patches = sum(t * h * w for t, h, w in stream.grids)
    features = min(patches // spec.merge**2, tokens)
    width = 3 * spec.patch**2 * (spec.temporal if stream.wide or not folds else 1)
    starts = [at + n % 2 for n, at in enumerate(range(0, tokens, max(2, stream.lengths)))]  # no two are of one length
    edges = [*(at for at in starts if at < tokens), tokens]
    if rerank:
        picked = torch.arange(rows) * max(1, (tokens - 1) // rows)
    else:  # answers, at the ends of the samples
        counts = [rows * b // tokens - rows * a // tokens for a, b in pairwise(edges)]
        picked = torch.cat([torch.arange(b - n, b) for n, b in zip(counts, edges[1:], strict=True)])
    return Batch(
        ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(3, tokens, dtype=torch.int64),
        spans=tuple((a, b, -1) for a, b in pairwise(edges)),
        pixels=torch.zeros(patches, width, dtype=torch.uint8),
        grids=stream.grids,
        image_at=torch.arange(features),
        image_from=torch.arange(features),
        rows=picked,
        targets=torch.zeros(rows) if rerank else torch.zeros(rows, dtype=torch.int64),
        groups=((0, rows),) if rerank else (),
        doc_ids=(),
        samples=(),
        units=1,
    )


def with_depth(config: Mapping[str, Any], layers: int, depth: int) -> dict[str, Any]:
    """The same model with so many layers and vision blocks."""
    found = copy.deepcopy(dict(config))
    text, vision = found.get("text_config") or found, found["vision_config"]
    text["num_hidden_layers"] = layers
    for key in ("layer_types", "max_window_layers"):
        text.pop(key, None)
    vision["depth"] = depth
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [n for n in vision["fullatt_block_indexes"] if n < depth] or [depth - 1]
    return found


def _cut(owner: LitchiModel, tp: int) -> None:
    """Leave the layers one rank's part of what tp cuts, in place: rows of the first linears, columns of the last."""
    for name, module in part(owner.hf, owner.family.language_layers).named_modules() if tp > 1 else ():
        role = next((word for word in name.split(".") if word.endswith("_proj")), None)
        for own, p in module._parameters.items() if role else ():
            last = role in ("o_proj", "down_proj")
            if p is None or (last and (own == "bias" or ".lora_B" in name)) or (not last and ".lora_A" in name):
                continue
            piece = p.data[:, : p.shape[1] // tp] if last else p.data[: len(p) // tp]
            whole = torch.empty(piece.shape, dtype=p.dtype, device=p.device)
            module._parameters[own] = nn.Parameter(whole, requires_grad=p.requires_grad)


@contextmanager
def _as_on(setup: Setup) -> Iterator[None]:
    """Have what looks at the device take the way it takes on the one that is meant, as far as memory is concerned."""
    cuda = setup.device == "cuda"
    kernels = Kernels("traced", _no_values, _no_values_backward) if cuda else ON_CPU
    linear = F.linear

    def cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        to = setup.autocast
        return linear(x.to(to), weight.to(to), None if bias is None else bias.to(to))

    def cuda_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.variance_epsilon)

    def in_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(t.view(-1, t.shape[-1]).split(leaves.ROWS) for t in tensors), strict=True)

    with ExitStack() as stack:

        def swap(owner: Any, name: str, new: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

        swap(attention, "_kernels", lambda q, pieces: kernels)
        swap(token_loss, "rows_at_once", lambda words, device: rows_at_once(words, torch.device(setup.device)))
        swap(torch, "autocast", lambda *args, **kwargs: nullcontext())  # there is none for the meta device
        swap(torch, "is_autocast_enabled", lambda *args: setup.autocast is not None)
        swap(torch, "get_autocast_dtype", lambda *args: setup.autocast or torch.bfloat16)
        if setup.autocast is not None:
            swap(F, "linear", cast_linear)
        if cuda:
            swap(leaves.RMSNorm, "forward", cuda_norm)
        else:
            swap(leaves, "_in_rows", in_rows)
        yield


def _no_values(q, k, v, pieces, scale):
    """The output and log-sum-exp of `varlen_forward`, which looks into lengths."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:2], dtype=torch.float32)


def _no_values_backward(grad, q, k, v, out, lse, pieces, scale, into=None):
    """The sums of `varlen_backward`, in fp32, and what a call adds to them."""
    sums = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v)]
    parts = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    del parts
    return into or tuple(s.to(t.dtype) for s, t in zip(sums, (q, k, v), strict=True))
