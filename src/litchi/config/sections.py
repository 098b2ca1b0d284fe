"""The settings there are: frozen sections, each setting with its line of text below it; more in data.py,
train.py and serve.py.

`docs/settings.md` is made from these lines (words.py), the errors for wrong values from the types; what
values mean together is checked where they are read (__init__.py). SAME_NUMBERS says which settings do not
change the numbers of a run; later.py, which belong to parts that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt
from pydantic import BeforeValidator, model_validator

from litchi.config.data import Data
from litchi.config.kinds import Decay, Names, Positive, Says, Section, Targets, Trackers, Weight, as_sections
from litchi.config.reading import dump_settings
from litchi.config.serve import Serve
from litchi.config.train import Eval, Optim, Stage, Train

Task = Literal["chat", "rerank"]

LossName = Literal["ce", "bce", "group_softmax", "pairwise", "listwise_lambda"]
LOSSES = {"chat": ("ce",), "rerank": tuple(n for n in get_args(LossName) if n != "ce")}  # the first: by default
METRICS = {  # @k stands for a cut such as @10
    "chat": (
        *("exact_match", "bleu", "chrf", "rouge_l", "anls", "token_f1", "cider", "json_valid", "json_schema"),
        *("json_exact", "json_accuracy", "json_precision", "json_recall", "json_f1"),
    ),
    "rerank": ("mrr", "mrr@k", "ndcg", "ndcg@k", "map", "map@k", "recall@k", "hit@k", "precision@k"),
}


# ------------------------------------------------------------------------------------------------------ sections


class Loss(Section):
    """What is minimised. The name alone will do: `loss: bce`."""

    short = "name"

    name: LossName = "bce"
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
    new_tokens: Names = ()
    """Words to add to the vocabulary. Their rows of the embedding train, and of a head of its own, whatever the parts
    do; the model grows where it has no row to spare."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are held in; `auto`: by the machine and by what is trained."""
    attention: Literal["auto", "sdpa", "varlen", "flash"] = "auto"
    """What computes attention. `varlen` (torch's flash attention over pieces of any length) and `flash` (that of the
    package flash-attn) need a GPU and half precision, `sdpa` goes piece by piece; `auto`: `varlen` where it can."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """What the linears of the language layers are held in, frozen or under LoRA: `int8`, 8 bits with a scale per row;
    `nf4`, 4 bits with scales in 8 bits (QLoRA), which needs `pip install 'litchi[quant]'`."""
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
    """Plain, scaled by the square root of the rank, or with magnitudes apart from directions (`dora`)."""


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
    serve: Serve = Serve()
    """What `litchi serve` allows."""
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


# What a layout, a machine or a report changes, and the numbers of a run do not depend on.
SAME_NUMBERS = (
    *("output", "track", "eval", "parallel", "data.eval", "data.workers", "data.verify", "model.attention"),
    *("train.log_every", "train.eval_every", "train.save_every", "train.save", "train.keep", "train.best"),
    *("train.early_stop", "train.hang_s", "train.restarts", "train.export", "train.micro_batch_tokens"),
    *("train.offload", "train.rehearse", "train.checkpoint_activations", "train.compile", "train.features"),
    *("train.forecast", "train.deterministic", "model.placement", "serve", "data.video.cache_mb"),
)


def under(key: str, tops: Iterable[str]) -> bool:
    """Whether a dotted key is one of some settings, or below one."""
    return any(key == top or key.startswith(f"{top}.") for top in tops)


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value
