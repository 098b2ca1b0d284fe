"""The settings there are: frozen sections, each setting with its line of text below it.

`docs/settings.md` is made from these lines (words.py), the errors for wrong values from the types; what
values mean together is checked where they are read (__init__.py). SAME_NUMBERS says which settings do not
change the numbers of a run; later.py, which belong to parts that do not exist yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from litchi.config.kinds import (
    AutoTokens,
    Betas,
    Decay,
    Distance,
    Names,
    Positive,
    Says,
    Share,
    Targets,
    Trackers,
    Until,
    Warmup,
    Weight,
    Window,
    as_sections,
    stem,
)
from litchi.config.reading import dump_settings

Task = Literal["chat", "rerank"]

LOSSES = {"chat": ("ce",), "rerank": ("bce", "group_softmax", "pairwise", "listwise_lambda")}  # the first: by default
METRICS = {  # @k stands for a cut such as @10
    "chat": ("exact_match", "bleu", "chrf", "rouge_l"),
    "rerank": ("mrr", "mrr@k", "ndcg", "ndcg@k", "map", "map@k", "recall@k", "hit@k", "precision@k"),
}


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    short: ClassVar[str | None] = None  # the key a bare word stands for, as in `loss: bce`

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return cls.expand(value)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Write out the short form. A section whose lines are all commented out (null) is an empty one."""
        if value is None:
            return {}
        return {cls.short: value} if cls.short and isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------------ sections


class Loss(Section):
    """What is minimised. The name alone will do: `loss: bce`."""

    short = "name"

    name: Literal["ce", "bce", "group_softmax", "pairwise", "listwise_lambda"] = "bce"
    """`ce` for chat (its default); for rerank `bce` (its default; yes or no for each document), `group_softmax`
    (the positive among its group), `pairwise` (each positive against each negative) or `listwise_lambda` (each pair,
    by what it is worth in nDCG)."""
    weight: Weight = 1.0
    """bce: how much a positive counts against a negative; `balanced` makes both sides of a group count the same."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """group_softmax: what scores are divided by."""
    margin: Annotated[float, Ge(0)] = 0.0
    """pairwise: how far a positive should be above a negative."""


class Model(Section):
    """What is tuned, and how its weights are held."""

    path: Annotated[str, Says("a folder, a hub id, modelscope:ID, or builtin:tiny")] = ""
    """The model to start from; `builtin:tiny` is the small base that comes with the package. Required."""
    adapter: str | None = None
    """Adapter folder to go on from."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are held in; `auto`: by the machine and by what is trained."""
    attention: Literal["auto", "sdpa", "varlen", "flash"] = "auto"
    """Attention kernel; `auto` takes the fastest the machine has. `varlen` and `flash` need a GPU."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """What the linears of the language layers are held in, frozen or under LoRA: `nf4`, 4 bits with scales in 8 bits
    (QLoRA); needs `pip install 'litchi[quant]'`."""
    placement: Literal["one", "spread"] = "one"
    """`spread`: one process lays the layers over all GPUs it sees, one at work at a time. For measuring a model that
    fits no single GPU, and for a quick look; to train on several GPUs start a rank for each."""


class Part(Section):
    """How a part of the model is trained. The mode alone will do."""

    short = "mode"

    mode: Literal["frozen", "lora", "full"]
    """`frozen`, `lora` (low-rank additions) or `full` (all its weights)."""
    lr: Annotated[float, Gt(0)] | None = None
    """Learning rate of this part; null: `optim.lr`."""


class Lora(Section):
    """Low-rank additions, for the parts whose mode is `lora`."""

    rank: Positive = 16
    """Rank of the additions."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Additions are scaled by alpha / rank (rslora: alpha / sqrt(rank))."""
    dropout: Decay = 0.0
    """Dropout before the additions."""
    targets: Targets = None
    """Linear layers that get additions; `all`: every one of the part."""
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """Plain, scaled by the square root of the rank, or with magnitudes apart from directions."""


USUAL_MODES = {"vision": "frozen", "merger": "frozen", "language": "lora", "head": "frozen"}
PartMode = Annotated[Part, Says("frozen, lora, full, or {mode, lr}")]


class Trainable(Section):
    """Which parts learn, and how."""

    vision: PartMode = Part(mode="frozen")
    """The vision tower."""
    merger: PartMode = Part(mode="frozen")
    """The layers that turn picture features into tokens."""
    language: PartMode = Part(mode="lora")
    """The language model with its embeddings."""
    head: PartMode = Part(mode="frozen")
    """The output layer. With a rerank loss only its rows for yes and no can learn."""
    lora: Lora = Lora()
    """Low-rank additions."""

    @model_validator(mode="before")
    @classmethod
    def _usual_modes(cls, value: Any) -> Any:
        """Let `trainable.language.lr=1e-5` alone keep the part's usual mode."""
        value = cls.expand(value)
        if not isinstance(value, dict):
            return value
        parts = {key: part for key, part in value.items() if key in USUAL_MODES and isinstance(part, dict)}
        return {**value, **{key: {"mode": USUAL_MODES[key], **part} for key, part in parts.items()}}


class Pixels(Section):
    """The pixel budget of a picture: it is scaled, keeping its shape, until its area lies inside."""

    min: Positive | None = None
    """Pixels a picture is enlarged to; null: the model's own."""
    max: Positive | None = None
    """Pixels a picture is reduced to; null: the model's own."""


class Video(Section):
    """How a video is sampled."""

    fps: Annotated[float, Gt(0)] = 2.0
    """Frames taken per second."""
    max_frames: Positive = 768
    """Frames at most; a longer video is sampled more thinly."""
    pixels: Positive | None = None
    """Pixels of all frames together at most; null: the model's own."""
    segment_s: Annotated[float, Gt(0)] | None = None
    """Length of a segment of a long video in seconds; null: not cut."""


class DataSource(Section):
    """A file of samples. The path alone will do."""

    short = "path"

    path: Annotated[str, Says("a path")]
    """JSONL (also .gz, .zst), Parquet or WebDataset tar."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Passes over the file in an epoch: 2.0 twice, 0.5 another half each time. Training only."""
    name: str = ""
    """What reports call it; by default the file's name without its endings."""

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, value: Any) -> Any:
        value = cls.expand(value)
        if not isinstance(value, dict) or not isinstance(value.get("path"), str) or value.get("name"):
            return value
        return {**value, "name": stem(value["path"])}


Sources = Annotated[
    tuple[DataSource, ...], BeforeValidator(as_sections), Says("a path, {path, weight, name}, or a list of these")
]


class Data(Section):
    """Where samples come from, and what is done with those that cannot be used."""

    train: Sources = ()
    """Samples to learn from. Required for training."""
    eval: Sources = ()
    """Samples to measure on during training, under different names."""
    media_root: str | None = None
    """Folder that relative media paths start from; null: the folder of the file that names them."""
    max_length: Positive = 4096
    """Tokens of a sample at most, pictures included (rerank: of a query with one document)."""
    overlong: Literal["drop", "error"] = "drop"
    """A longer sample is left out and counted, or stops the run. It is never cut."""
    verify: Literal["decoded", "headers", "off"] = "decoded"
    """What is checked of every medium before step 1: all its pixels, its header, nothing. Verdicts are cached."""
    on_bad_media: Literal["error", "skip"] = "error"
    """A medium that cannot be read stops the run, or its row is left out and put in quarantine."""
    max_bad_fraction: Share = 0.02
    """The share of rows that `skip` may leave out; more stops the run."""
    workers: Annotated[int, Ge(0)] = 2
    """Processes of each rank that load samples; 0: in the training process. The numbers do not depend on it."""
    shuffle: bool = True
    """A new order in each epoch; false: the order of the files."""
    template: str = "lychee"
    """Name of the prompt a query and a document are put into (rerank). Chat uses the model's own."""
    instruction: str | None = None
    """Instruction for rows that bring none (rerank); null: the template's own."""
    negatives: Positive | None = None
    """Negatives of a group that take part in an epoch, drawn anew each time (rerank); null: all."""
    pixels: Pixels = Pixels()
    """The pixel budget of a picture."""
    window: Window | None = None
    """Grey levels of 16-bit pictures that become black and white; null: 0 and 65535."""
    video: Video = Video()
    """How a video is sampled."""


class Optim(Section):
    """The optimizer and its rate."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """`adamw`, the same with its state in 8 bits, or plain `sgd`."""
    lr: Annotated[float, Ge(0)] = 1e-4
    """Learning rate after the warm-up; 0 changes nothing, as a control."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls to 0 after the warm-up, or stays."""
    warmup: Warmup = 0.03
    """Steps in which the rate rises from 0."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decay of weight matrices; biases, norms and embeddings have none."""
    betas: Betas = (0.9, 0.95)
    """How slowly adamw's two averages forget."""
    clip: Annotated[float, Gt(0)] | None = 1.0
    """Norm that gradients of all parts together are cut back to; null: never."""


class Train(Section):
    """How long, in which pieces, and what is kept."""

    steps: Positive | None = None
    """Length of the run in steps. Give this or `train.epochs`; on the command line it replaces the file's epochs."""
    epochs: Positive | None = None
    """Length of the run in passes over the data; 1 when neither is given."""
    global_batch_size: Positive = 32
    """Samples (rerank: groups) of a step on all ranks together. Accumulation follows from it and is printed."""
    micro_batch_tokens: AutoTokens = None
    """Tokens a rank takes at once; `auto`: 16384 on a GPU, 8192 on CPU. A larger sample goes alone; a larger
    group is cut into pieces, with the loss and gradient of the whole."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What is computed in; `auto`: bf16 on a GPU that can, fp32 on CPU."""
    seed: Annotated[int, Ge(0)] = 0
    """Where order, negatives, dropout and new weights come from."""
    deterministic: bool = False
    """Bit-identical repeats on a GPU, at some cost. On CPU they are so anyway."""
    checkpoint_activations: bool = False
    """Compute layers twice instead of keeping what they leave: less memory, about a third more time."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is held in the machine's memory instead of the GPU's: the optimizer's state and update, or with `all` the
    weights and their gradients too (sharded weights only, `parallel.dp_shard` above 1)."""
    features: Literal["off", "cache", "precompute"] = "off"
    """Features of a frozen vision tower: computed each time, kept from the first (in files that all runs share, below
    `LITCHI_CACHE`), or all computed before step 1."""
    log_every: Positive = 1
    """Steps between lines on the screen; `metrics.jsonl` has every step."""
    eval_every: Distance | None = None
    """When `data.eval` is measured; null: at the end only."""
    save_every: Distance | None = None
    """When a checkpoint is written; null: at the end, and when a signal stops the run."""
    save: Literal["all", "weights"] = "all"
    """What a checkpoint holds: all that a resume needs, or the trained weights alone (with adamw a third of the size),
    to measure and export. A run that is stopped by a signal saves all in any case."""
    keep: Positive = 3
    """Newest checkpoints that are kept, besides the best."""
    best: str | None = None
    """Metric whose best checkpoint is kept and exported, such as `mrr@10`; of `loss` the lowest."""
    early_stop: Positive | None = None
    """Evaluations without a better `train.best` after which the run ends; null: never."""
    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """A step whose loss or gradient is not finite is left out, goes back to a checkpoint, or stops the run."""
    hang_s: Annotated[float, Gt(0)] = 600.0
    """Seconds without a sign of life after which a run is ended with the stacks of its processes."""
    export: Literal["end", "never"] = "end"
    """When `export/` is written, the form that transformers, peft and vLLM load."""

    @model_validator(mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        value = cls.expand(value)
        if isinstance(value, dict) and value.get("steps") is None and value.get("epochs") is None:
            return {**value, "epochs": 1}
        return value


class Eval(Section):
    """What is measured, in training and by `litchi evaluate`."""

    metrics: Names | None = None
    """Metrics to print; null: the usual ones of the task. Chat: `exact_match`, `bleu`, `chrf`, `rouge_l`; rerank:
    `mrr`, `ndcg`, `map`, each also with a cut as in `mrr@10`, and `recall@k`, `hit@k`, `precision@k`."""
    max_rows: Positive | None = None
    """Rows of each file, from its start; null: all."""
    max_new_tokens: Positive = 64
    """Tokens of a generated answer at most (chat)."""
    slices: Names = ()
    """Fields of the rows by whose values the metrics are also given."""


class Stage(Section):
    """A part of the run with its own pixel budget."""

    until: Until
    """Last step of the stage, or a fraction of the run; it rises from stage to stage."""
    pixels: Pixels = Pixels()
    """Its pixel budget; a limit that is not given is that of `data.pixels`."""


class Parallel(Section):
    """How ranks share the work. `auto` for all of it: the data axes are chosen, the others are 1."""

    dp_replicate: Positive | None = None
    """Copies of the model that see different data; null: chosen."""
    dp_shard: Positive | None = None
    """Ranks that share the weights of a copy (FSDP) and see different data; null: chosen."""
    tp: Positive = 1
    """Ranks that share every layer."""
    cp: Positive = 1
    """Ranks that share a sequence."""
    pp: Positive = 1
    """Ranks that each hold some layers."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order in which pipeline stages work."""
    vision_ranks: Annotated[int, Ge(0)] = 0
    """Ranks, besides those of the axes, that run nothing but the frozen vision tower, ahead of the others."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Write out `auto`."""
        return {} if value is None or value == "auto" else value


class Config(Section):
    """All settings of a run."""

    task: Task
    """`chat` (answers) or `rerank` (a score for a query and a document). Required."""
    loss: Annotated[Loss, Says("a name, or {name, weight, temperature, margin}")] = Loss()
    """What is minimised."""
    model: Model = Model()
    """What is tuned."""
    trainable: Trainable = Trainable()
    """Which parts learn."""
    data: Data = Data()
    """Where samples come from."""
    optim: Optim = Optim()
    """The optimizer."""
    train: Train = Train(epochs=1)
    """Length, pieces and what is kept."""
    eval: Eval = Eval()
    """What is measured."""
    curriculum: Annotated[
        tuple[Stage, ...], BeforeValidator(as_sections), Says("a list of {until, pixels: {min, max}}")
    ] = ()
    """Stages of the run with their own pixel budgets, one after the other; what follows the last stage, evaluation and
    the export have `data.pixels`. A row is usable if it is under the largest of all budgets."""
    parallel: Annotated[Parallel, Says("auto, or sizes of axes")] = Parallel()
    """How ranks share the work."""
    track: Trackers | None = None
    """Where metrics are shown besides `metrics.jsonl`; null: tensorboard when it is installed."""
    output: str = ""
    """Folder of the run; by default `runs/` and the name of the settings file, or of the task."""

    @model_validator(mode="before")
    @classmethod
    def _by_task(cls, value: Any) -> Any:
        value = cls.expand(value)
        if not isinstance(value, dict):
            return value
        task = "chat" if value.get("task") == "chat" else "rerank"
        loss = Loss.expand(value.get("loss"))
        if isinstance(loss, dict):
            loss = {"name": LOSSES[task][0], **loss}
        named = value.get("output") not in (None, "")
        return {**value, "loss": loss, "output": value["output"] if named else f"runs/{task}"}

    def to_yaml(self) -> str:
        """Write all settings, defaults included; reading it gives an equal Config."""
        return dump_settings(self.model_dump(mode="json"))

    def flat(self) -> dict[str, Any]:
        """Give every setting by its dotted key, as plain data. Lists stay whole."""
        return dict(_leaves(self.model_dump(mode="json")))

    def numbers(self) -> dict[str, Any]:
        """Give the settings that change the numbers of a run: all but those in SAME_NUMBERS."""
        return {key: value for key, value in self.flat().items() if not under(key, SAME_NUMBERS)}

    def fingerprint(self) -> str:
        """Hash the settings that change the numbers of a run. Two runs with one fingerprint and one data set agree."""
        return hashlib.sha256(json.dumps(self.numbers(), sort_keys=True).encode()).hexdigest()


# What a layout, a machine or a report changes, and the numbers of a run do not depend on.
SAME_NUMBERS = (
    *("output", "track", "eval", "parallel", "data.eval", "data.workers", "data.verify", "model.attention"),
    *("train.log_every", "train.eval_every", "train.save_every", "train.save", "train.keep", "train.best"),
    *("train.early_stop", "train.hang_s", "train.export", "train.micro_batch_tokens", "train.offload"),
    *("train.checkpoint_activations", "train.features", "train.deterministic", "model.placement"),
)


def under(key: str, tops: Iterable[str]) -> bool:
    return any(key == top or key.startswith(f"{top}.") for top in tops)


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value
