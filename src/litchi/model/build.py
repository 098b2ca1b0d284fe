"""A model from a folder, a hub id or the packaged base: resolve, load, and refuse what did not load whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from litchi.data.processor import Processor, load_processor
from litchi.errors import MachineError, UsageError
from litchi.model import attention
from litchi.model.compressed import refuse_reason, round_inputs
from litchi.model.family import Family, find_family, part
from litchi.model.leaves import Leaves, change_leaves
from litchi.model.quantize import quantize_language
from litchi.model.scoring import ask_rows
from litchi.model.tokens import add_rows, find_new_tokens
from litchi.model.vision import mark_windowed
from litchi.model.weights import load_weights, match_weights

BUILTIN = "builtin:tiny"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Loaded:
    """A model with what belongs to it. `folder` is where its weights and processor were read."""

    hf: nn.Module
    family: Family
    processor: Processor
    folder: Path
    tied: bool


def builtin_folder() -> Path:
    """The packaged base model."""
    return Path(str(resources.files("litchi"))) / "builtin" / "tiny"


def resolve_model(path: str, *, first: bool = True, wait: Callable[[], None] = lambda: None) -> Path:
    """Folder of a model, downloading it where that is asked for.

    Args:
        path: a folder, a hub id, `modelscope:ID` or `builtin:tiny`.
        first: this is the rank of its machine that downloads.
        wait: called once by every rank when the download is done.

    Raises:
        UsageError: no such folder, and it cannot be a hub id; MachineError: the download failed.
    """
    if path == BUILTIN:
        return builtin_folder()
    if Path(path).is_dir():
        return Path(path)
    if path.startswith("modelscope:"):
        return _download(path, _modelscope, first, wait)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).suffix in {".yaml", ".json"}
    if looks_local or Path(path).exists() or (Path(path).parent.is_dir() and path.split("/")[0] not in ("", ".")):
        raise UsageError(
            f"model.path={path} is not a model folder",
            why="there is no such folder" if not Path(path).exists() else "it is a file",
            remedy="Give a folder with config.json and *.safetensors, a hub id like Qwen/Qwen2.5-VL-3B-Instruct, "
            f"modelscope:ID or {BUILTIN}",
        )
    return _download(path, _hub, first, wait)


def _download(name: str, fetch: Callable[[str], str], first: bool, wait: Callable[[], None]) -> Path:
    """The first rank of a machine downloads; the others find the files when it is done."""
    failed: Exception | None = None
    folder = ""
    if first:
        try:
            folder = fetch(name)
        except Exception as error:
            failed = error
    wait()
    try:
        if failed is not None:
            raise failed
        return Path(folder or fetch(name))
    except Exception as error:
        raise MachineError(
            f"model.path={name} could not be fetched",
            why=f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no reason given'}",
            remedy="Check the name and the network, or download it elsewhere and give the folder",
        ) from error


def _hub(name: str) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])


def _modelscope(name: str) -> str:
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    except ImportError as error:
        raise MachineError("modelscope is not installed", remedy="pip install modelscope") from error
    return snapshot_download(name.removeprefix("modelscope:"))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; UsageError when it has none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(
            "config.json is missing", where=folder, why="it is not a model folder", remedy="Check model.path"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    quantize: str = "none",
    new_tokens: Iterable[str] = (),
    leaves: Leaves = Leaves(),
) -> Loaded:
    """Build a model from a folder, its parameters on the meta device; buffers that no file holds are real.

    The class is chosen by `model_type`, never by the folder's name. Every tensor of the class must be in the files
    and every tensor of the files in the class (a tied head is the one exception): their headers are compared here,
    and `load_weights` reads the tensors when the model has its layout. Nothing trains.

    Args:
        dtype: of the parameters.
        quantize: `nf4` or `int8` lets the language layers hold their weights in 4 or 8 bits.
        new_tokens: words that get rows of their own, as do those of the tokenizer that the weights have no row for.
        leaves: which modules get a faster forward.

    Raises:
        UsageError: not of the family, or tensors are missing, unexpected or of another shape, with counts;
        MachineError: what quantizes is not installed.
    """
    import transformers

    config = read_config(folder)
    family = find_family(config, folder)
    attention.register()
    kind = getattr(transformers, family.architecture)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    processor = load_processor(folder)
    settings = kind.config_class.from_pretrained(folder, local_files_only=True)
    settings.name_or_path = str(folder)
    compressed = _read_compression(config, folder, quantize)
    if compressed:
        del settings.quantization_config
    with torch.device("meta"):
        hf = kind._from_config(settings, dtype=dtype)
    hf.weight_sources = match_weights(hf, folder, score_row=_find_score_row(config, processor))
    hf.trains = not compressed and hf.weight_sources[f"{family.head}.weight"].row is None
    own = (folder / "generation_config.json").is_file()
    elsewhere = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    hf.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True, **elsewhere)
    _make_buffers(hf)
    hf.set_attn_implementation(attention.NAME)
    hf.requires_grad_(False)
    hf.eval()
    head = part(hf, family.head)
    tied = head.weight is part(hf, family.embedding).weight
    ask_rows(head)
    add_rows(hf, family, find_new_tokens(processor, new_tokens, settings.get_text_config().vocab_size))
    mark_windowed(part(hf, family.vision))
    change_leaves(hf, family, leaves)
    if quantize != "none":
        quantize_language(hf, family, quantize)
    round_inputs(hf, family, compressed)
    return Loaded(hf=hf, family=family, processor=processor, folder=folder, tied=tied)


def _read_compression(config: dict[str, Any], folder: Path, quantize: str) -> dict[str, Any]:
    """`quantization_config` of a folder whose weights are in fewer bits, or nothing."""
    found = config.get("quantization_config") or {}
    why = refuse_reason(found) if found else None
    if why:
        raise UsageError("the weights are in a form that is not read", where=folder, why=why)
    if found and quantize != "none":
        raise UsageError(
            f"model.quantize={quantize}", where=folder, why="its weights are in fewer bits already", remedy="Leave it"
        )
    return found


def _find_score_row(config: dict[str, Any], processor: Processor) -> int | None:
    """Of a folder whose head is one row, as classifiers have it: the id of the word that row speaks for."""
    if not (config.get("architectures") or [""])[0].endswith("ForSequenceClassification"):
        return None
    return processor.word(config["id2label"]["0"])


def _make_buffers(hf: nn.Module) -> None:
    """Compute what no file holds, as the modules do by themselves: the frequencies of the rotary embeddings."""
    for module in list(hf.modules()):
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            fresh = dict(type(module)(module.config).named_buffers(recurse=False))  # type: ignore[call-arg,arg-type]
            for name in buffers:
                setattr(module, name, fresh[name])


def load_model(folder: Path, *, dtype: torch.dtype, leaves: Leaves = Leaves()) -> Loaded:
    """Build a model and load its weights whole onto the CPU, or refuse as `build_model` does."""
    loaded = build_model(folder, dtype=dtype, leaves=leaves)
    load_weights(loaded.hf, folder, torch.device("cpu"))
    return loaded


def quiet_libraries() -> None:
    """Keep libraries from speaking where Litchi does. Called by the command line, before models are loaded."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
