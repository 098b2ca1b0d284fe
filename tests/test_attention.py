"""Attention in pieces: equal to its definition, a masked softmax, in value and gradient."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.errors import MachineError
from litchi.model import kernels
from litchi.model.attention import PieceAttention
from litchi.model.spans import Piece, span_pieces

# ---- Which pieces a forest has


def test_one_span_is_one_causal_piece():
    assert span_pieces([(0, 5, -1)]) == [Piece(0, 5, 0, 5, True)]


def test_equal_neighbours_are_stacked_and_others_are_not():
    spans = [(0, 3, -1), (3, 6, -1), (6, 9, -1), (9, 11, -1), (11, 14, -1)]
    assert span_pieces(spans) == [
        Piece(0, 9, 0, 9, True, count=3),
        Piece(9, 11, 9, 11, True),
        Piece(11, 14, 11, 14, True),
    ]


def test_siblings_meet_their_parent_in_one_piece():
    spans = [(0, 4, -1), (4, 6, 0), (6, 9, 0)]
    assert span_pieces(spans) == [
        Piece(0, 4, 0, 4, True),
        Piece(4, 6, 4, 6, True),
        Piece(6, 9, 6, 9, True),
        Piece(4, 9, 0, 4, False, first=False),
    ]


def test_grandchildren_meet_both_ancestors_and_groups_stay_apart():
    spans = [(0, 4, -1), (4, 6, 0), (6, 7, 1), (7, 9, -1), (9, 12, 3)]
    assert span_pieces(spans)[-3:] == [
        Piece(4, 7, 0, 4, False, first=False),
        Piece(6, 7, 4, 6, False, first=False),
        Piece(9, 12, 7, 9, False, first=False),
    ]


# ---- The definition


def visible(spans):
    """[T, T] whether a query sees a key: what stands before it in its own span, and all of its ancestors."""
    see = torch.zeros(spans[-1][1], spans[-1][1], dtype=torch.bool)
    for start, end, parent in spans:
        see[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
        while parent >= 0:
            above, below, parent = spans[parent]
            see[start:end, above:below] = True
    return see


def defined(q, k, v, spans, scale):
    """Masked softmax attention in fp64. [T, Hq, D]"""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible(spans), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@st.composite
def forests(draw):
    """Up to nine spans of one to five tokens: roots, children and grandchildren in any order that parents allow."""
    spans, end = [], 0
    for number in range(draw(st.integers(1, 9))):
        length = draw(st.integers(1, 5))
        spans.append((end, end + length, draw(st.integers(-1, number - 1))))
        end += length
    return spans


def heads(tokens, heads_q=4, heads_k=2, size=16, *, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads_q, size), (tokens, heads_k, size), (tokens, heads_k, size), (tokens, heads_q, size))
    q, k, v, grad = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    return [t.requires_grad_() for t in (q, k, v)], grad


def outcome(out, inputs, grad):
    """Output and gradients as one list."""
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([(4, 2), (2, 2), (6, 1)]), st.integers(0, 99))
def test_pieces_equal_the_masked_softmax(spans, numbers, seed):
    inputs, grad = heads(spans[-1][1], *numbers, seed=seed)
    found = outcome(PieceAttention.apply(*inputs, span_pieces(spans), 0.25), inputs, grad)
    wanted = outcome(defined(*inputs, spans, 0.25), inputs, grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=2e-5, rtol=2e-5)
    assert all(bool(g.abs().sum() > 0) for g in wanted[:1] + wanted[3:])


def test_a_sibling_is_not_seen():
    """The comparison above would notice a leak: the definition itself depends on what may be seen, and only on it."""
    spans = [(0, 3, -1), (3, 5, 0), (5, 8, 0)]
    (q, k, v), _ = heads(8)
    before = PieceAttention.apply(q, k, v, span_pieces(spans), 0.25)
    with torch.no_grad():
        v[3:5] += 1
    after = PieceAttention.apply(q, k, v, span_pieces(spans), 0.25)
    changed = (before - after).abs().amax((1, 2)) > 0
    assert changed.tolist() == [False] * 3 + [True] * 2 + [False] * 3


def test_the_gradient_is_the_one_of_finite_differences():
    """Independent of autograd's and of the kernel's own backward."""
    spans = [(0, 3, -1), (3, 5, 0), (5, 8, 0)]
    (q, k, v), grad = heads(8)
    pieces = span_pieces(spans)
    gradients = torch.autograd.grad(PieceAttention.apply(q, k, v, pieces, 0.25), (q, k, v), grad)
    for place, tensor in enumerate((q, k, v)):
        step = torch.zeros_like(tensor)
        step[1, 0, 3] = 1e-2
        moved = [[t + sign * step if n == place else t for n, t in enumerate((q, k, v))] for sign in (1, -1)]
        above, below = (float((defined(*m, spans, 0.25) * grad).sum().detach()) for m in moved)
        assert (above - below) / 2e-2 == pytest.approx(float(gradients[place][1, 0, 3]), rel=1e-3)
        assert above != below


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (4, 2), (4, 1)])
def test_the_math_block_equals_the_flash_block(causal, queries, keys):
    q, k, v = (torch.randn(2, h, 7, 16, generator=torch.Generator().manual_seed(h)) for h in (queries, keys, keys))
    grad = torch.randn(2, queries, 7, 16, generator=torch.Generator().manual_seed(9))
    flash = kernels._flash_block(q, k, v, causal, 0.3)
    math = kernels._math_block(q, k, v, causal, 0.3)
    for one, other in zip(flash, math, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)
    backward = [
        block(grad, q, k, v, *flash, causal, 0.3)
        for block in (kernels._flash_block_backward, kernels._math_block_backward)
    ]
    for one, other in zip(*backward, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=5e-6)
        assert one.abs().sum() > 0


def test_levels_hold_pieces_of_one_kind_with_disjoint_queries():
    """What runs as one variable-length call must not write a query twice."""
    spans = [(0, 4, -1), (4, 6, 0), (6, 7, 1), (7, 9, -1), (9, 12, 3), (12, 14, 4)]
    pieces = span_pieces(spans)
    levels = kernels._levels(pieces)
    assert sorted(map(repr, pieces)) == sorted(repr(p) for level in levels for p in level)
    for level in levels:
        assert len({(p.causal, p.first) for p in level}) == 1
        assert all(a.q1 <= b.q0 for a, b in pairwise(level))
    assert len(levels) == 3 and levels[0][0].first, "own blocks open their queries before anything is merged"


def test_lengths_cut_stacked_pieces():
    """Two blocks of three tokens and one of two become three sequences."""
    pieces = [Piece(0, 6, 0, 6, True, count=2), Piece(6, 8, 6, 8, True)]
    (index, cumulative, longest), _ = kernels._lengths(pieces, torch.device("cpu"))
    assert (index.tolist(), cumulative.tolist(), longest) == (list(range(8)), [0, 3, 6, 8], 3)


SPANS = [(0, 37, -1), (37, 60, 0), (60, 91, 0), (91, 100, 2), (100, 133, -1), (133, 166, -1)]


def test_variable_length_calls_fit_the_kernels():
    """On the meta device the real operators check their arguments and say what shapes come out; nothing is computed."""
    q, k, v = (torch.empty(166, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    out, lse = kernels.varlen_forward(q, k, v, span_pieces(SPANS), 0.125)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)
    gradients = kernels.varlen_backward(out, q, k, v, out, lse, span_pieces(SPANS), 0.125)
    assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, t.dtype) for t in (q, k, v)]


def one_by_one(q, k, v, lengths, causal, scale):
    """A variable-length call written out: its sequences through the math block, output [Q, H, D], lse [H, Q]."""
    cu_q, cu_k, *_ = (x.tolist() if isinstance(x, torch.Tensor) else x for x in lengths)
    parts = [
        kernels._math_block(*(t[a:b].transpose(0, 1)[None] for t, (a, b) in ((q, x), (k, y), (v, y))), causal, scale)
        for x, y in zip(pairwise(cu_q), pairwise(cu_k), strict=True)
    ]
    return torch.cat([o[0].transpose(0, 1) for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def one_by_one_backward(grad, q, k, v, out, lse, lengths, causal, scale):
    cu_q, cu_k, *_ = (x.tolist() if isinstance(x, torch.Tensor) else x for x in lengths)
    parts = []
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        given = [t[x:y].transpose(0, 1)[None] for t, (x, y) in
                 ((grad, (a, b)), (q, (a, b)), (k, (c, d)), (v, (c, d)), (out, (a, b)))]  # fmt: skip
        back = kernels._math_block_backward(*given, lse[None, :, a:b], causal, scale)
        parts.append([g[0].transpose(0, 1) for g in back])
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


def test_variable_length_calls_merge_as_blocks_do():
    """What CUDA runs around its kernel, with the kernel written out: levels, lengths, indices and merging."""
    (q, k, v), grad = heads(166)
    pieces = span_pieces(SPANS)
    assert len(kernels._levels(pieces)) > 1
    found = kernels.varlen_forward(q, k, v, pieces, 0.25, one_by_one)
    wanted = kernels.pieces_forward(q, k, v, pieces, 0.25)
    gradients = kernels.varlen_backward(grad, q, k, v, *wanted, pieces, 0.25, one_by_one_backward)
    expected = kernels.pieces_backward(grad, q, k, v, *wanted, pieces, 0.25)
    for one, other in zip((*found, *gradients), (*wanted, *expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert other.abs().sum() > 0


# ---- Choosing


def test_what_auto_takes():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    taken = [kernels.choose_kernels("auto", *where) for where in ((cpu, torch.float32), (gpu, torch.bfloat16))]
    assert taken == [kernels.ON_CPU, kernels.VARLEN]
    assert kernels.choose_kernels("auto", gpu, torch.float32) is kernels.MATH
    assert kernels.choose_kernels("sdpa", gpu, torch.bfloat16) is kernels.MATH


@pytest.mark.parametrize("choice", ["varlen", "flash"])
@pytest.mark.parametrize("where", [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_kernels_for_half_precision_on_a_gpu_are_refused_elsewhere(choice, where):
    with pytest.raises(MachineError, match=f"model.attention={choice} computes in bf16 or fp16 on a GPU"):
        kernels.choose_kernels(choice, torch.device(where[0]), where[1])


# ---- On CUDA


def both_devices(dtype, kernel="auto"):
    """Output and gradients on CUDA in `dtype`, and on the CPU in fp32 from the same (rounded) numbers."""
    inputs, grad = heads(166, 4, 2, 64, device="cuda", dtype=dtype)
    pieces = span_pieces(SPANS)
    pieces.kernel = kernel
    cuda = outcome(PieceAttention.apply(*inputs, pieces, 0.125), inputs, grad)
    exact = [t.detach().float().cpu().requires_grad_() for t in inputs]
    cpu = outcome(PieceAttention.apply(*exact, span_pieces(SPANS), 0.125), exact, grad.float().cpu())
    return cuda, cpu


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kernel", ["varlen", "flash", "sdpa"])
def test_half_precision_on_cuda_equals_the_cpu(kernel):
    """Needs a GPU: every choice in bf16, whose rounding is 2^-8 of the largest value."""
    if kernel == "flash":
        pytest.importorskip("flash_attn")
    for one, other in zip(*both_devices(torch.bfloat16, kernel), strict=True):
        assert (one.float().cpu() - other).abs().max() <= 2**-6 * other.abs().max()
        assert other.abs().max() > 0


@pytest.mark.needs_gpu
def test_fp32_on_cuda_equals_the_cpu():
    """Needs a GPU: the math path that fp32 takes there."""
    for one, other in zip(*both_devices(torch.float32), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=2e-5, rtol=2e-5)
        assert other.abs().max() > 0
