"""The vision tower as an ONNX graph: a model -> `vision.onnx`, checked with ONNX Runtime on pictures of several sizes.

The modules are those of transformers with the trained weights, LoRA folded in; only attention is written out, with
windows and pictures as numbers of patches (`vision_inputs.py`), so that one graph takes pictures of any size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litchi.dist import Ranks
from litchi.errors import MachineError, UserError
from litchi.model.family import part
from litchi.model.forward import LitchiModel
from litchi.parallel.mesh import Layout
from litchi.parallel.pipeline import bring_together
from litchi.train.export import MANIFEST, copy_processor, merged_tensors
from litchi.train.vision_inputs import vision_inputs
from litchi.types import VisionSpec

GRAPH = "vision.onnx"
INPUTS = ("pixels", "order", "back", "positions", "windows", "frames")
GRIDS = (((1, 4, 4),), ((1, 16, 8),), ((1, 6, 26),), ((1, 20, 20), (1, 2, 2)), ((3, 4, 10),))
CLOSE = 1e-4  # largest difference of a feature, in units of (1 + its size)


def export_vision(
    owner: LitchiModel, base: Path, out: Path, ranks: Ranks, facts: Mapping[str, Any], layout: Layout
) -> dict[str, Any] | None:
    """Write the tower of a model that is whole or sharded. All ranks call it; rank 0 writes.

    Args:
        base: folder of the base, for its processor files.
        out: a folder that is not there yet; it appears whole or not at all.
        facts: for the manifest.

    Returns:
        On rank 0 what was checked: `grids`, `largest_difference` of features, `patches`, `bytes`.

    Raises:
        MachineError: onnx, onnxscript or onnxruntime is not installed.
        UserError: the graph computes something else.
    """
    _need_libraries()
    start = f"{owner.family.vision}."
    merged = bring_together(merged_tensors(owner.hf, torch.float32), layout, ranks.rank)
    weights = {name.removeprefix(start): t for name, t in merged if name.startswith(start)}
    if not ranks.is_main:
        return None
    tower = rebuild_tower(part(owner.hf, owner.family.vision), weights)
    draft = out.with_name(f".{out.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write_graph(tower, owner.spec, draft / GRAPH)
    figures = check_graph(draft / GRAPH, tower, owner.spec)
    if not figures["largest_difference"] <= CLOSE:
        shutil.rmtree(draft)
        raise UserError(
            f"the graph's features are {figures['largest_difference']:.2g} off", why=f"{CLOSE:g} is allowed",
            remedy="Report it with the versions of torch, onnx and onnxruntime",
        )  # fmt: skip
    copy_processor(base, draft, owner)
    shutil.copyfile(Path(__file__).with_name("vision_inputs.py"), draft / "vision_inputs.py")
    (draft / "build_tensorrt.sh").write_text(write_tensorrt(owner.spec), encoding="utf-8")
    (draft / "README.md").write_text(write_readme(figures, owner.spec), encoding="utf-8")
    manifest = {**facts, "format": "onnx-vision", "parity": figures}
    (draft / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    draft.replace(out)
    return figures


def _need_libraries() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            raise MachineError(
                f"{name} is missing", why="the format onnx-vision needs it", remedy="pip install 'litchi[onnx]'"
            ) from None


def rebuild_tower(tower: Any, weights: Mapping[str, Tensor]) -> Any:
    """The tower as transformers has it, on the CPU in fp32, with these weights."""
    config = type(tower.config).from_dict(tower.config.to_dict())
    config._attn_implementation = "eager"
    plain = type(tower)(config)
    plain.load_state_dict(dict(weights))
    return plain.float().eval()


class Graph(nn.Module):
    """The tower with all that depends on sizes given from outside."""

    def __init__(self, tower: Any, spec: VisionSpec):
        super().__init__()
        self.tower, self.unit = tower, spec.merge**2
        full = getattr(tower, "fullatt_block_indexes", None)
        self.windowed = [full is not None and i not in full for i in range(len(tower.blocks))]

    def forward(
        self, pixels: Tensor, order: Tensor, back: Tensor, positions: Tensor, windows: Tensor, frames: Tensor
    ) -> Tensor:
        tower = self.tower
        hidden = self.arrange(tower.patch_embed(pixels), order)
        angles = positions[:, :, None].float() * tower.rotary_pos_emb.inv_freq
        angles = self.arrange(angles.flatten(1), order).repeat(1, 2)[:, None]
        turn = angles.cos(), angles.sin()
        masks = [ids[:, None] == ids[None, :] for ids in (frames, windows)]
        for block, windowed in zip(tower.blocks, self.windowed, strict=True):
            hidden = hidden + self.attend(block.attn, block.norm1(hidden), turn, masks[windowed])
            hidden = hidden + block.mlp(block.norm2(hidden))
        return tower.merger(hidden)[back]

    def arrange(self, rows: Tensor, order: Tensor) -> Tensor:
        """Rows of patches in the order of windows."""
        return rows.unflatten(0, (-1, self.unit))[order].flatten(0, 1)

    def attend(self, attn: Any, hidden: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attention of a block under a mask [1, P, P], without a kernel that graphs do not have."""
        q, k, v = attn.qkv(hidden).unflatten(1, (3, attn.num_heads, -1)).unbind(1)
        q, k = (x * turn[0] + _half_turned(x) * turn[1] for x in (q, k))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        out = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        return attn.proj(out.transpose(0, 1).flatten(1))


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def example(grids: Sequence[tuple[int, int, int]], spec: VisionSpec) -> dict[str, Tensor]:
    """Pixels of noise and what goes with them."""
    side = spec.window // spec.factor if spec.window else None
    rest = vision_inputs(grids, merge=spec.merge, window=side)
    draw = torch.Generator().manual_seed(len(rest["positions"]))
    pixels = torch.randn(len(rest["positions"]), 3 * spec.temporal * spec.patch**2, generator=draw)
    return {"pixels": pixels} | {name: torch.from_numpy(value) for name, value in rest.items()}


def write_graph(tower: Any, spec: VisionSpec, path: Path) -> None:
    """Trace the tower and write it; what is larger than 2 GB lies beside it."""
    given = example(((1, 4, 8), (1, 8, 4)), spec)
    tokens = torch.export.Dim("tokens", min=1)
    patches = spec.merge**2 * tokens
    shapes = {name: {0: tokens if name in ("order", "back") else patches} for name in INPUTS}
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            Graph(tower, spec), tuple(given[name] for name in INPUTS), dynamo=True, input_names=list(INPUTS),
            output_names=["features"], dynamic_shapes=tuple(shapes[name] for name in INPUTS), verbose=False,
        )  # fmt: skip
        assert program is not None
        size = sum(p.numel() * p.element_size() for p in tower.parameters())
        program.save(str(path), external_data=size > 1.8e9)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of its own operators while it exports."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@torch.no_grad()
def check_graph(path: Path, tower: Any, spec: VisionSpec) -> dict[str, Any]:
    """Run the file with ONNX Runtime and the tower by transformers' own forward, on pictures of several sizes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest, patches = 0.0, []
    for grids in GRIDS:
        given = example(grids, spec)
        (found,) = session.run(["features"], {name: given[name].numpy() for name in INPUTS})
        want = tower(given["pixels"], grid_thw=torch.tensor(grids)).pooler_output
        off = (torch.from_numpy(found) - want).abs() / (1 + want.abs())
        largest = max(largest, float(off.max()))
        patches.append(len(given["pixels"]))
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    tried = [list(map(list, grids)) for grids in GRIDS]
    return {"grids": tried, "patches": patches, "largest_difference": largest, "bytes": size}


def write_tensorrt(spec: VisionSpec) -> str:
    """The script that builds an engine of TensorRT, for pictures from the smallest to the largest budget."""
    width, unit = 3 * spec.temporal * spec.patch**2, spec.merge**2

    def shapes(pixels: int) -> str:
        tokens = max(1, pixels // spec.patch**2 // unit)
        sizes = {"pixels": f"{tokens * unit}x{width}", "order": tokens, "back": tokens}
        sizes |= {"positions": f"{tokens * unit}x2", "windows": tokens * unit, "frames": tokens * unit}
        return ",".join(f"{name}:{size}" for name, size in sizes.items())

    middle = (spec.min_pixels + spec.max_pixels) // 2
    return (
        "#!/bin/sh\n# builds vision.plan from vision.onnx, on the machine with the GPU it is for\nset -eu\n"
        'cd "$(dirname "$0")"\n'
        f"exec trtexec --onnx={GRAPH} --saveEngine=vision.plan --bf16 \\\n"
        f"  --minShapes={shapes(spec.min_pixels)} \\\n  --optShapes={shapes(middle)} \\\n"
        f'  --maxShapes={shapes(spec.max_pixels)} "$@"\n'
    )


def write_readme(figures: Mapping[str, Any], spec: VisionSpec) -> str:
    """The text beside the graph."""
    side = spec.window // spec.factor if spec.window else None
    return f"""# Vision tower, ONNX

`{GRAPH}` takes the pixels of one or more pictures and gives their features, [tokens, hidden], fp32. Checked here with
ONNX Runtime against transformers on pictures of {min(figures["patches"])} to {max(figures["patches"])} patches: at most
{figures["largest_difference"]:.1g} apart.

    from transformers import AutoProcessor
    from vision_inputs import vision_inputs
    import onnxruntime

    given = AutoProcessor.from_pretrained(".").image_processor(pictures, return_tensors="np")
    rest = vision_inputs(given["image_grid_thw"].tolist(), merge={spec.merge}, window={side})
    session = onnxruntime.InferenceSession("{GRAPH}")
    features = session.run(["features"], {{"pixels": given["pixel_values"], **rest}})[0]

Attention is over all patches of a call with a mask, so memory grows with their square: one picture a call is best.
`build_tensorrt.sh` builds an engine for pictures of {spec.min_pixels} to {spec.max_pixels} pixels; it was **not run
here**.
"""
