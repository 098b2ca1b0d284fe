"""What the ranks of `test_weights.py` do: fill a sharded model, and say whether each has what it should have."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from litchi.config import load_config
from litchi.dist import Ranks
from litchi.model.adapters import apply_trainable, fill_lora, fill_weights
from litchi.model.build import Loaded, build_model, load_model

CPU = torch.device("cpu")
SEED = 5
LAYOUTS = {  # sizes of HSDP's axes and of tensor parallel
    "FSDP2, offloaded": (1, 4, 1),
    "HSDP": (2, 2, 1),
    "FSDP2 over tensor parallel": (1, 2, 2),
}


def check_layouts(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Of every layout: parameters whose shard is not what it would be if whole weights were cut, and facts."""
    out = {}
    for name, sizes in LAYOUTS.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "offloaded" in name else {}
        cut, filled = load_model(Path(folder), dtype=torch.float32), build_model(Path(folder), dtype=torch.float32)
        for loaded in (cut, filled):
            add_lora(loaded)
            if loaded is cut:
                fill_lora(loaded.hf, SEED, CPU)
            shard(loaded.hf, mesh, **offload)
        assert all(p.is_meta for p in filled.hf.parameters())
        fill_weights(filled.hf, Path(folder), adapter=None, seed=SEED, device=CPU)
        want, have = dict(cut.hf.named_parameters()), dict(filled.hf.named_parameters())
        assert list(want) == list(have)
        out[name] = {
            "odd": [n for n in want if not same(want[n], have[n])],
            "trained": [n for n in want if want[n].requires_grad != have[n].requires_grad],
            "tied": filled.hf.lm_head.weight is filled.hf.model.language_model.embed_tokens.weight,
            "share": local_bytes(filled.hf) / sum(p.numel() * p.element_size() for p in have.values()),
            "whole": digest({n: p.full_tensor() for n, p in have.items()}),
            "placements": sorted({str(p.placements) for p in have.values()}),
        }
    return out


def add_lora(loaded: Loaded) -> None:
    parts = "trainable={vision: lora, language: lora, lora: {rank: 3}}"
    apply_trainable(
        loaded, load_config(None, ["task=chat", "data.train=none.jsonl", "model.path=none", parts]).trainable
    )


def shard(hf: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    """Tensor parallel of some linears and of the tied table (869 rows: uneven), then FSDP2, as a run does it."""
    if mesh["tp"].size() > 1:
        layers = hf.model.language_model.layers
        for layer in layers:
            attention = layer.self_attn
            for linear, place in ((attention.q_proj, Shard(0)), (attention.o_proj, Shard(1))):
                cut(linear.base_layer, mesh["tp"], place)
                cut(linear.lora_B["default"] if place.dim == 0 else linear.lora_A["default"], mesh["tp"], place)
        cut(hf.lm_head, mesh["tp"], Shard(0))
        hf.model.language_model.embed_tokens.weight = hf.lm_head.weight
    data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for layer in (*hf.model.visual.blocks, *hf.model.language_model.layers):
        fully_shard(layer, mesh=data, **kwargs)
    fully_shard([hf.model.language_model.embed_tokens, hf.lm_head], mesh=data, **kwargs)
    fully_shard(hf, mesh=data, **kwargs)


def cut(module: nn.Module, mesh: DeviceMesh, place: Shard) -> None:
    old = module.weight
    whole = distribute_tensor(old.detach(), mesh, [place], src_data_rank=None)
    module.weight = nn.Parameter(whole, requires_grad=old.requires_grad)


def same(one: Any, other: Any) -> bool:
    return (
        one.placements == other.placements
        and one.dtype == other.dtype
        and not other.is_meta
        and torch.equal(one.to_local(), other.to_local())
    )


def local_bytes(hf: nn.Module) -> int:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in hf.parameters()]
    return sum(t.untyped_storage().nbytes() for t in local)


def digest(tensors: dict[str, Tensor]) -> str:
    """Equal if and only if every bit of every tensor is."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def measure_memory(ranks: Ranks, folder: str) -> dict[str, int]:
    """Bytes of this process alone (no file, no library) that loading added, and those of its shards."""
    mesh = init_device_mesh("cpu", (1, ranks.world, 1), mesh_dim_names=("replicate", "shard", "tp"))
    warm = build_model(Path(folder), dtype=torch.bfloat16)  # imports
    del warm
    before = psutil.Process(os.getpid()).memory_full_info().uss
    loaded = build_model(Path(folder), dtype=torch.bfloat16)
    shard(loaded.hf, mesh)
    fill_weights(loaded.hf, Path(folder), adapter=None, seed=SEED, device=CPU)
    return {
        "added": psutil.Process(os.getpid()).memory_full_info().uss - before,
        "local": local_bytes(loaded.hf),
    }
