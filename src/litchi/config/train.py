"""Settings of the optimizer, the run, its evaluations and its stages, as sections.py describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import model_validator

from litchi.config.data import Pixels
from litchi.config.kinds import AutoTokens, Betas, Distance, Names, Positive, Section, Until, Warmup


class Optim(Section):
    """The optimizer and its rate."""

    name: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    """`adamw`; `adamw8bit`, the same with its averages in 8 bits (a scale for 256 numbers of a row); plain `sgd`."""
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
    """Tokens a rank takes at once; `auto`: as many as fit, at most 65536 on a GPU and 8192 on CPU (measured before the
    first step, on CPU only under a memory limit). A larger sample goes alone; a larger group is cut into pieces, with
    the loss and gradient of the whole. Where memory runs out all the same it is lowered."""
    precision: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """What is computed in; `auto`: bf16 on a GPU that can, fp32 on CPU. fp64, of weights too, is slow: it tells
    rounding from mistakes."""
    seed: Annotated[int, Ge(0)] = 0
    """Where order, negatives, dropout and new weights come from."""
    deterministic: bool = False
    """Bit-identical repeats on a GPU, at some cost. On CPU they are so anyway."""
    checkpoint_activations: bool = False
    """Compute layers twice instead of keeping what they leave: less memory, about a third more time."""
    compile: bool = False
    """Have torch.compile fuse what lies around attention in every block. For GPUs, and only where measured to be
    faster: the first steps take a minute or more, and on CPU it is slower. Needs a C++ compiler."""
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
    """What happens when losses or gradients are not finite. Such a step's update is left out; after
    `train.nonfinite_limit` of them the run stops (`skip`), or goes back to a checkpoint from before them (`rollback`);
    or it stops at the first (`stop`)."""
    nonfinite_limit: Positive = 3
    """Steps in a row that may not be finite, the last one included."""
    loss_spike: Annotated[float, Gt(0)] | None = None
    """With `rollback`: the run also goes back when a loss is above the median of the 50 before it by so many of their
    standard deviations (both from medians); null: never."""
    rollbacks: Positive = 3
    """Times a run goes back; then it stops."""
    forecast: bool | None = None
    """Say before the first step what memory a rank is to take, and on a GPU that `litchi plan` knows how long a step,
    and after the last what came of it; also lets `parallel: auto` and `micro_batch_tokens: auto` take the planner's
    answer there. null: on GPUs; on a CPU it takes some seconds."""
    rehearse: bool = True
    """Take the largest micro-batch of the run forwards and backwards once before the first step, without an update:
    what does not fit the memory fails at once."""
    hang_s: Annotated[float, Gt(0)] = 600.0
    """Seconds in which no rank moves on after which a run is ended, with the stacks of its processes in `stacks/`;
    with `--procs` above 1 it starts again."""
    restarts: Annotated[int, Ge(0)] = 3
    """How often ranks of `litchi train --procs` above 1 are started again without a new checkpoint in between."""
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
    """Metrics to print; null: the usual ones of the task. Chat: `exact_match`, `bleu`, `chrf`, `rouge_l`, and by name
    `anls`, `token_f1`, `cider`, and for answers in JSON `json_valid`, `json_schema`, `json_exact`, `json_accuracy`,
    `json_precision`, `json_recall`, `json_f1`; rerank: `mrr`, `ndcg`, `map`, each also with a cut as in `mrr@10`, and
    `recall@k`, `hit@k`, `precision@k`."""
    max_rows: Positive | None = None
    """Rows of each file, from its start; null: all."""
    max_new_tokens: Positive = 64
    """Tokens of a generated answer at most (chat)."""
    slices: Names = ()
    """Fields of the rows by whose values the metrics are also given."""
    json_schema: str | None = None
    """File with the JSON schema that answers are held against, for the metrics `json_...`."""
    json_tolerance: Annotated[float, Ge(0)] = 0.0
    """How far a number in a JSON answer may be off, as a share of the reference's."""


class Stage(Section):
    """A part of the run with its own pixel budget."""

    until: Until
    """Last step of the stage, or a fraction of the run; it rises from stage to stage."""
    pixels: Pixels = Pixels()
    """Its pixel budget; a limit that is not given is that of `data.pixels`."""
