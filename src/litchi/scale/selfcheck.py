"""Every layout against one process, on this machine: the same steps, and how far losses differ.

The packaged base is trained for a few steps on drawn rows in one process, then in each layout that the ranks at hand
allow. The table of docs/parallelism.md is what this writes.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from litchi.dist import Ranks
from litchi.errors import UserError

STEPS = 5
SETTINGS = (  # SGD: AdamW would turn rounding noise in gradients near zero into differences between layouts
    *("track=[]", "data.workers=0", "data.shuffle=false", "optim.name=sgd"),
    *("optim.lr=0.002", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null"),
    *(f"train.steps={STEPS}", "train.global_batch_size=10"),
)
LAYOUTS: dict[str, dict[str, int | str]] = {
    "DDP 2": {"dp_replicate": 2},
    "FSDP2 2": {"dp_shard": 2},
    "TP 2": {"tp": 2},
    "CP 2": {"cp": 2},
    "PP 2, 1F1B": {"pp": 2},
    "PP 2, GPipe": {"pp": 2, "pp_schedule": "gpipe"},
    "FSDP2 4": {"dp_shard": 4},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "TP 4": {"tp": 4},
    "CP 4": {"cp": 4},
    "PP 4": {"pp": 4},
    "FSDP2 2 x TP 2": {"dp_shard": 2, "tp": 2},
    "FSDP2 2 x CP 2": {"dp_shard": 2, "cp": 2},
    "FSDP2 2 x PP 2": {"dp_shard": 2, "pp": 2},
    "DDP 2 x TP 2": {"dp_replicate": 2, "tp": 2},
    "DDP 2 x PP 2": {"dp_replicate": 2, "pp": 2},
    "CP 2 x TP 2": {"cp": 2, "tp": 2},
    "CP 2 x PP 2": {"cp": 2, "pp": 2},
    "TP 2 x PP 2": {"tp": 2, "pp": 2},
    "FSDP2 2 x TP 2 x PP 2": {"dp_shard": 2, "tp": 2, "pp": 2},
    "vision 1 + DDP 2": {"dp_replicate": 2, "vision_ranks": 1},
    "vision 2 + FSDP2 2": {"dp_shard": 2, "vision_ranks": 2},
}
TRAINED = {
    "full": "trainable={vision: full, merger: full, language: full}",
    "full, own head": "trainable={vision: full, merger: full, language: full, head: full}",
    "LoRA": "trainable={vision: lora, language: lora, lora: {rank: 4}}",
    "LoRA, language": "trainable={language: lora, lora: {rank: 4}}",
    "LoRA, nf4": "trainable={language: lora, lora: {rank: 4}}",
}
SAME = {"cpu": 1e-6, "cuda": 1e-5, "bf16": 1e-2, "fp64": 1e-10}  # relative, of losses; of fp32 by the device
NORMS = {"fp32": 100, "bf16": 20, "fp64": 1}  # so many times as much of gradient norms
TASKS = {  # micro-batches so small that every layout accumulates
    "chat": ("task=chat", "data.train={folder}/chat.jsonl", "train.micro_batch_tokens=100"),
    "rerank": ("task=rerank", "data.train={folder}/rerank.jsonl", "train.micro_batch_tokens=400"),
}


@dataclass(frozen=True)
class Job:
    """A few steps of training: what trains, on which task, in which layout."""

    layout: str
    trained: str
    task: str
    precision: str = "fp32"

    def words(self, folder: Path) -> list[str]:
        """Its settings, on the command line."""
        parallel = [f"parallel={json.dumps(LAYOUTS[self.layout])}"] if self.layout in LAYOUTS else []
        task = [word.format(folder=folder) for word in TASKS[self.task]]
        base = f"{folder}/untied" if "own head" in self.trained else "builtin:tiny"
        packed = ["model.quantize=nf4"] if "nf4" in self.trained else []
        precision = f"train.precision={self.precision}"
        return [f"model.path={base}", *SETTINGS, precision, *task, TRAINED[self.trained], *packed, *parallel]

    @property
    def ranks(self) -> int:
        sizes = {axis: size for axis, size in LAYOUTS.get(self.layout, {}).items() if isinstance(size, int)}
        vision = sizes.pop("vision_ranks", 0)
        return math.prod(sizes.values()) + vision

    @property
    def possible(self) -> bool:
        """4-bit weights are not cut by tp, and vision ranks learn nothing."""
        layout = LAYOUTS.get(self.layout, {})
        packed, trains_vision = "nf4" in self.trained, "vision:" in TRAINED[self.trained]
        return not (packed and "tp" in layout) and not (trains_vision and "vision_ranks" in layout)


@dataclass(frozen=True)
class Ran:
    """What a job gave: the same on all its ranks."""

    losses: list[float]
    norms: list[float]
    wrapper: str

    def differs(self, alone: Ran) -> tuple[float, float]:
        """Largest relative differences of losses and of gradient norms."""
        pairs = (self.losses, alone.losses), (self.norms, alone.norms)
        loss, norm = (largest(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in pairs)
        return loss, norm


def largest(values: Iterable[float]) -> float:
    """The largest of some differences; one that is no number is larger than all others."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


QUICK = (("full", "chat"), ("LoRA, language", "rerank"))  # kinds of training
EACH = (*QUICK, ("full, own head", "rerank"), ("LoRA", "chat"), ("LoRA, nf4", "rerank"))  # what trains once
MANY = 4  # ranks: who has them has the time for every kind
IN_BF16 = ("full", "chat")


def limit_of(precision: str, device: str) -> float:
    """How far losses may differ, relative."""
    return SAME[device if precision == "fp32" else precision]


def list_jobs(most: int, *, quick: bool = False) -> list[Job]:
    """The jobs for up to `most` ranks: of two kinds of training with `quick`, of each that trains with fewer than four
    ranks, of every kind otherwise; in bf16 one kind. In fp64, where no mistake can hide in rounding, once more those of
    `quick`, from four ranks on all that train in full: norms of the others agree in fp32. 4-bit weights need theirs."""
    kinds = QUICK if quick else EACH if most < MANY else [(kind, task) for kind in TRAINED for task in TASKS]
    kinds = [kind for kind in kinds if "nf4" not in kind[0] or find_spec("bitsandbytes")]
    jobs = [Job(layout, *kind) for kind in kinds for layout in ("one", *LAYOUTS)]
    jobs += [] if quick else [Job(layout, *IN_BF16, "bf16") for layout in ("one", *LAYOUTS)]
    wide = QUICK if most < MANY else [*QUICK, *(kind for kind in kinds if "full" in kind[0] and kind not in QUICK)]
    jobs += [Job(layout, *kind, "fp64") for kind in wide for layout in ("one", *LAYOUTS)]
    return [job for job in jobs if job.ranks <= most and job.possible]


def run_job(ranks: Ranks, words: Sequence[str]) -> Ran:
    """Take the steps of some settings on these ranks."""
    from litchi.batch.loader import iterate_steps
    from litchi.config import load_config
    from litchi.train.losses import make_loss
    from litchi.train.setup import prepare_run
    from litchi.train.step import train_step

    config = load_config(None, words)
    losses, norms = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_run(config, ranks, Path(folder))
        _, count_units = make_loss(config.loss)
        for step, batches, _ in iterate_steps(run.plan, 1, run.derived.steps, workers=0, count_units=count_units):
            result = train_step(run.trainer, step, batches, 1.0)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        run.log.close()
    return Ran(losses, norms, run.wrapped.wrapper)


def run_jobs(ranks: Ranks, folder: str, jobs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Run jobs of one number of ranks in these processes, one after the other; the main one says how far they are."""
    say = sys.stderr if ranks.is_main else io.StringIO()
    found = []
    for done, job in enumerate(jobs, 1):
        # What a run says of itself is of no interest here.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found.append(asdict(run_job(ranks, Job(**job).words(Path(folder)))))
        print(f"{done} of {len(jobs)}: {job['layout']}, {job['trained']}, {job['task']}", file=say, flush=True)
    return found


def write_untied(folder: Path) -> None:
    """The packaged base with a head of its own, which starts as the embedding."""
    from safetensors.torch import load_file, save_file

    from litchi.model.build import builtin_folder

    shutil.copytree(builtin_folder(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})


def write_rows(folder: Path) -> None:
    """Ten chat rows and ten groups: text alone, a picture, one shared by rows, in queries and in documents, a video in
    two rows of each; and the base with a head of its own."""
    import numpy as np
    from PIL import Image

    write_untied(folder / "untied")
    names = []
    for n in range(3):
        pixels = np.random.default_rng(n).integers(0, 256, (56, 56 + 28 * n, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
        names.append(f"{n}.png")

    frames = [Image.fromarray(np.random.default_rng(9 + n).integers(0, 256, (56, 84), np.uint8)) for n in range(6)]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:], duration=500)

    def content(text: str, picture: str | None) -> dict[str, str]:
        return {"text": text} | ({"image": picture} if picture else {})

    seen = [names[0], None, None, None, None, names[1], names[2], names[0], names[1], names[1]]
    words = ("apple", "red", "two")
    chat, rerank = [], []
    for n, picture in enumerate(seen):
        parts = ([{"type": "image", "image": picture}] if picture else []) + [{"type": "text", "text": f"What is {n}?"}]
        film = {"video": "film.gif"} if n in (3, 5) else {}
        parts = [{"type": "video", **film}, *parts] if film else parts
        answer = " ".join(words[(n + i) % 3] for i in range(1 + 5 * n % 7))
        chat.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
        first = content("red apple " * (1 + n % 3), names[n % 3] if n % 3 == 0 else None) | film
        others = [content("two blue cups", None), content("a green tree", names[n % 3] if n % 4 == 0 else None)]
        rerank.append({"query": content(f"item {n}", seen[n - 3]), "pos_doc": [first], "neg_docs": others})
    for name, rows in (("chat", chat), ("rerank", rerank)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- the verb


@dataclass(frozen=True)
class Line:
    """A job beside the same work in one process."""

    layout: str
    trained: str
    task: str
    ranks: int
    wrapper: str
    loss: float  # largest relative difference in any step
    norm: float
    passed: bool
    precision: str = "fp32"

    @property
    def kind(self) -> str:
        return f"{self.trained}, {self.task}{'' if self.precision == 'fp32' else f', {self.precision}'}"


def check_layouts(most: int, device: str, *, quick: bool, say: Callable[[str], None] = print) -> list[Line]:
    """Run every job, one number of ranks after the other, and compare each with one process.

    Args:
        most: ranks at most.
        device: "cpu" or "cuda", for the tolerance.
        quick: two kinds of training only, in fp32 and fp64.
    """
    from litchi.parallel.launch import run_ranks

    jobs = list_jobs(most, quick=quick)
    ran: dict[Job, Ran] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        for ranks in sorted({job.ranks for job in jobs}):
            some = [job for job in jobs if job.ranks == ranks]
            say(f"{len(some)} trainings of {STEPS} steps on {ranks} rank{'s' * (ranks > 1)}")
            file = folder / f"{ranks}.json"
            file.write_text(json.dumps({"layouts": [asdict(job) for job in some]}), encoding="utf-8")
            status = run_ranks(["selfcheck", "--job", str(file)], ranks)
            if status:
                raise UserError(
                    f"the trainings on {ranks} ranks ended with status {status}",
                    remedy="What they said stands above; with --debug they show a traceback",
                )
            found = json.loads(file.with_suffix(".out").read_text(encoding="utf-8"))
            ran |= {job: Ran(**one) for job, one in zip(some, found, strict=True)}
    return [compare(job, ran, limit_of(job.precision, device)) for job in jobs if job.layout != "one"]


def compare(job: Job, ran: Mapping[Job, Ran], same: float) -> Line:
    """A line of the table."""
    loss, norm = ran[job].differs(ran[replace(job, layout="one")])
    passed = loss <= same and norm <= NORMS[job.precision] * same
    return Line(job.layout, job.trained, job.task, job.ranks, ran[job].wrapper, loss, norm, passed, job.precision)


def run_file(ranks: Ranks, file: Path, jobs: Sequence[Mapping[str, str]]) -> None:
    """What each rank of `check_layouts` does."""
    found = run_jobs(ranks, str(file.parent), jobs)
    if ranks.is_main:
        file.with_suffix(".out").write_text(json.dumps(found), encoding="utf-8")


def format_lines(lines: Sequence[Line]) -> str:
    """The table as Markdown: a row for each layout, the largest difference of losses and of gradient norms for each
    kind of training."""
    kinds = list(dict.fromkeys(line.kind for line in lines))
    head = "| layout | ranks | wrapper | " + " | ".join(kinds) + " |"
    rows = [head, "|" + "---|" * (3 + len(kinds))]
    for layout in dict.fromkeys(line.layout for line in lines):
        mine = {line.kind: line for line in lines if line.layout == layout}
        first = next(iter(mine.values()))
        found = [mine.get(kind) for kind in kinds]
        cells = [f"{one.loss:.0e}, {one.norm:.0e}{'' if one.passed else ' **no**'}" if one else "" for one in found]
        rows.append(f"| {layout} | {first.ranks} | {first.wrapper} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def fill_table(text: str, lines: Sequence[Line], note: str) -> str:
    """Put the table between the marks of a document."""
    return fill_marks(text, "layouts", f"{note}\n\n{format_lines(lines)}")


def fill_marks(text: str, name: str, body: str) -> str:
    """Put something between the marks of a document that have this name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(
            "the document has no place for the table", why="it goes between two lines", remedy=f"Add {begin} and {end}"
        )
    return f"{before}{begin}\n\n{body}\n{end}{after}"
