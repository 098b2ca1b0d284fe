"""`litchi demo`: fine-tune the packaged base on a drawn catalogue and show what it learnt, in one folder.

draw -> check -> measure before -> train -> measure after, and the control -> compare the export -> page and summary

Every step takes the way a user's own data would take: files on disk, the scan of `data check`, `litchi train`, the
scoring of `evaluate`. Two figures stand before: the base in the reranker's prompt, which it has never seen, and in its
own words ("Is it red?"), because part of the rise is only that the base learns what it is asked.
torch and transformers are imported after the drawing, so that the first line appears at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litchi.errors import UsageError, UserError
from litchi.prepare.catalogue import write_rerank
from litchi.prepare.catalogue_text import LANGUAGES, gloss
from litchi.prepare.rankings_page import Candidate, Figure, RankedQuery, write_rankings

if TYPE_CHECKING:
    from litchi.config import Config
    from litchi.dist import Ranks
    from litchi.evaluate.run import EvalSet
    from litchi.parallel.apply import Wrapped

Scores = dict[str, list[float]]  # query id -> scores in the order of its documents; the first one is right

BASE = "builtin:tiny"
CANDIDATES = 10
BEFORE_AT_MOST, AFTER_AT_LEAST, CONTROL_WITHIN = 0.35, 0.93, 0.1  # MRR@10; the last is a distance from chance
EXPORT_WITHIN = 1e-4  # scores of the export against those of the checkpoint, in fp32
COMPARED = 16  # queries that export and checkpoint are compared on
SHOWN = 6  # queries on the page: the first ones of the test, not the best ones
OWN_WORDING = {  # as the base's own task asks (recipes/tiny_base): the question, then the picture
    "en": ("Is it {query}?{document}", "Yes", "No"),
    "zh": ("是{query}吗？{document}", "是", "否"),
}
SETTINGS = "demo.yaml"
TRAINING = """\
# litchi train {settings} --fresh
#
# The fine-tuning of the demo: all of the small base's language model, its vision tower frozen.

task: rerank
loss: group_softmax # the right document among its group; in these steps it learns more here than bce

model: {{path: {base}}}

trainable: {{language: full}}

data:
  train: {train}
  template: lychee
  workers: 1 # a rank and its worker share a core

optim: {{lr: 1e-3, warmup: 20, betas: [0.9, 0.98], weight_decay: 0.01, schedule: cosine}}

train:
  steps: {steps}
  global_batch_size: 8 # groups
  log_every: 25

output: {run}
"""


@dataclass(frozen=True)
class Size:
    """How large the demo is: groups to learn from, queries to measure on, steps."""

    rows: int = 3000
    queries: int = 240
    steps: int = 400  # fixed: a number of seconds would give other results on other machines


class Places:
    """Where the parts of the demo lie."""

    def __init__(self, out: Path):
        self.out = out
        self.settings = out / SETTINGS
        self.data = out / "data"
        self.train = self.data / "train.jsonl"
        self.test = self.data / "test.jsonl"
        self.shuffled = self.data / "test-shuffled.jsonl"
        self.run = out / "run"
        self.export = self.run / "export"
        self.page = out / "rankings.html"
        self.sheet = out / "rankings.png"
        self.summary = out / "summary.json"


def run_demo(out: Path, *, procs: int, size: Size = Size()) -> dict[str, Any]:
    """Run the whole demo.

    Args:
        out: its folder; an earlier demo there is moved aside.
        procs: ranks of the fine-tuning; on GPUs at most one for each.
        size: smaller in tests.

    Returns:
        What stands in summary.json.

    Raises:
        UserError: a figure misses its target, after everything has been written and printed.
    """
    start, places, steps = time.perf_counter(), Places(out), Steps(7)
    claim_folder(places)
    write_settings(places, size)  # first, so that an interrupted demo is known as one
    with steps.next("draw", f"drawing a catalogue: {size.rows:,} groups to learn from, {size.queries} queries to test"):
        draw_data(places, size)

    import torch

    from litchi.dist import start_ranks, stop_ranks
    from litchi.model.build import quiet_libraries

    quiet_libraries()
    ranks = start_ranks()
    threads = calm_threads(ranks)
    procs = fitting_procs(procs, ranks)
    try:
        with steps.next("check", f"checking the data: litchi data check {places.train} --task rerank"):
            check_data(places)
        with steps.next("before", "measuring the base on combinations it never saw, in the rerank prompt and its own"):
            before = score_target(BASE, places.test, ranks)
            own = score_own_wording(places.test, ranks)
        with steps.next("train", f"fine-tuning, {size.steps} steps: litchi train {places.settings} --procs {procs}"):
            train(places, procs, ranks)
        with steps.next("after", "measuring the tuned model on the same queries, and the control: queries shuffled"):
            after = score_target(str(places.export), places.test, ranks)
            control = score_target(str(places.export), places.shuffled, ranks)
        with steps.next("export", f"comparing the export's scores with the checkpoint's, {COMPARED} queries in fp32"):
            difference = compare_export(places, ranks)
            print(f"   largest difference {difference:.1e}", flush=True)
    finally:
        torch.set_num_threads(threads)
        stop_ranks()

    figures = {
        "before": mrr("before, in the rerank prompt", before),
        "before_own_wording": mrr("before, in the base's own words", own),
        "after": mrr(f"after {size.steps} steps", after, highlight=True),
        "control": mrr("control: queries shuffled", control),
        "chance": Figure("chance", chance()),
    }
    with steps.next("page", f"writing {places.page} and {places.sheet}"):
        write_page(places, before, after, figures)
    missed = missed_targets({name: figure.value for name, figure in figures.items()}, difference)
    summary = {
        **{f"mrr@10_{name}": figure.value for name, figure in figures.items()},
        "intervals": {f"mrr@10_{n}": [f.low, f.high] for n, f in figures.items() if f.low is not None},
        "queries": len(after),
        "candidates": CANDIDATES,
        "export_difference": difference,
        "missed": missed,
        "steps_s": steps.seconds,
        "train_s": steps.seconds["train"],
        "total_s": time.perf_counter() - start,
    }
    places.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(format_closing(places, list(figures.values()), summary), flush=True)
    if missed:
        raise UserError("the demo missed its targets", where=places.summary, why="; ".join(missed))
    return summary


class Steps:
    """Announces the steps, and says of each how long it took."""

    def __init__(self, count: int):
        self.count = count
        self.seconds: dict[str, float] = {}

    @contextmanager
    def next(self, name: str, title: str) -> Iterator[None]:
        """Print one line before and one after the body."""
        print(f"== {len(self.seconds) + 1}/{self.count} {title}", flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        print(f"   {self.seconds[name]:.1f} s", flush=True)


def claim_folder(places: Places) -> None:
    """Make the folder. A second demo starts over: the first is moved aside; other people's folders are refused."""
    out = places.out
    if places.settings.is_file():
        from litchi.train.setup import set_aside

        set_aside(out)
    elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out {out} holds something else", why="it is no folder of a demo", remedy="Name a new one")
    out.mkdir(parents=True, exist_ok=True)


def calm_threads(ranks: Ranks) -> int:
    """Let this process compute with one thread on a CPU; returns how many it had.

    The model is too small to gain from more, and beside other work two threads on two cores took 30 times as long.
    """
    import torch

    threads = torch.get_num_threads()
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)
    return threads


def fitting_procs(procs: int, ranks: Ranks) -> int:
    """At most one rank for each GPU, where there are GPUs."""
    import torch

    return min(procs, torch.cuda.device_count()) if ranks.device.type == "cuda" else procs


# ---------------------------------------------------------------------------------------------------------- data


def draw_data(places: Places, size: Size) -> None:
    """Write the groups to learn from, and a test on combinations that training never shows, plain and shuffled."""
    write_rerank(places.data, rows=size.rows, split="train", negatives=7, seed=0, drawing_seeds=range(1000, 1006))
    for shuffled in (False, True):
        write_rerank(
            places.data,
            rows=size.queries,
            split="test",
            negatives=CANDIDATES - 1,
            seed=0,
            drawing_seeds=range(100000, 100040),
            shuffled=shuffled,
        )


def write_settings(places: Places, size: Size) -> None:
    """Write the settings of the fine-tuning, as a user would; the file also marks the folder as a demo's."""
    text = TRAINING.format(
        settings=places.settings,
        base=json.dumps(BASE),
        train=json.dumps(str(places.train)),
        run=json.dumps(str(places.run)),
        steps=size.steps,
    )
    places.settings.write_text(text, encoding="utf-8")


def check_data(places: Places) -> None:
    """Scan the training data and print what `data check` prints. The training need not decode the pictures again."""
    from litchi.config import load_config
    from litchi.data.processor import load_processor
    from litchi.model.build import resolve_model
    from litchi.prepare.check import check_files, check_report, format_report

    config = load_config(places.settings)
    print(format_report(check_report(check_files(config, load_processor(resolve_model(BASE))))), flush=True)


# -------------------------------------------------------------------------------------------------------- scores


def score_target(name: str, data: Path, ranks: Ranks, *words: str) -> Scores:
    """Score every query and document of a file, as `litchi score` does."""
    wrapped, rows, config = _open(name, data, ranks, words)
    return _score(wrapped, rows, config, ranks)


def score_own_wording(data: Path, ranks: Ranks) -> Scores:
    """Ask the base as it was taught to be asked, in the language of each query and with that language's yes and no."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from litchi.data.templates import RerankTemplate

    wrapped, rows, config = _open(BASE, data, ranks)
    index, renderer = rows.index, rows.renderer
    scores: Scores = {}
    for language in LANGUAGES:
        question, yes, no = OWN_WORDING[language]
        turn = {"role": "user", "content": question}
        prompts, _ = render_jinja_template(
            [[turn]], chat_template=renderer.processor.chat_template, add_generation_prompt=True
        )
        template = RerankTemplate(f"own_{language}", prompts[0], instruction="", yes=yes, no=no, source=BASE)
        chosen = tuple(r for r in index.rows if index.load(r, renderer).fields["language"] == language)
        part = replace(rows, index=replace(index, rows=chosen), renderer=replace(renderer, template=template))
        wrapped.owner.words = renderer.processor.word(yes), renderer.processor.word(no)
        scores |= _score(wrapped, part, config, ranks)
    return scores


def _open(name: str, data: Path, ranks: Ranks, words: Sequence[str] = ()) -> tuple[Wrapped, EvalSet, Config]:
    """Open a TARGET and a file as `evaluate` does."""
    from litchi.train.measure import open_set
    from litchi.train.target import find_target, open_target, target_config

    target = find_target(name)
    config = target_config(target, [f"data.eval={json.dumps(str(data))}", *words], task="rerank")
    rows = open_set(config, str(data), ranks, require_labels=True)
    return open_target(target, config, ranks), rows, config


def _score(wrapped: Wrapped, rows: EvalSet, config: Config, ranks: Ranks) -> Scores:
    from litchi.config import resolve_micro_batch_tokens
    from litchi.evaluate.run import Measure, score_set

    how = Measure(micro_batch_tokens=resolve_micro_batch_tokens(config, ranks.device.type))
    return {rows.index.rows[row].id: scores for row, _, scores in score_set(wrapped, rows, how).groups}


def mrr(name: str, scores: Scores, *, highlight: bool = False) -> Figure:
    """MRR@10 with its 95 % interval."""
    from litchi.evaluate.ranking import ScoredGroup, ranking_metrics

    groups = [
        ScoredGroup(query, [f"d{n}" for n in range(len(found))], found, [1.0] + [0.0] * (len(found) - 1))
        for query, found in scores.items()
    ]
    report = ranking_metrics(groups, ["mrr@10"])
    return Figure(name, report.metrics["mrr@10"], *report.intervals["mrr@10"], highlight=highlight)


def chance() -> float:
    """MRR@10 of candidates in random order."""
    from litchi.evaluate.ranking import chance_mrr

    return chance_mrr(CANDIDATES, 10)


# ------------------------------------------------------------------------------------------------------ training


def train(places: Places, procs: int, ranks: Ranks) -> None:
    """Fine-tune: in ranks of its own, or in this process when it is to be one.

    Raises:
        UserError: a rank failed; it has said why.
    """
    if procs == 1:
        from litchi.config import load_config
        from litchi.train.loop import train_run

        train_run(load_config(places.settings), ranks)
        return
    from litchi.parallel.launch import run_ranks

    status = run_ranks(["train", str(places.settings)], procs)
    if status:
        raise UserError(f"the fine-tuning ended with status {status}", why="its message stands above")


def compare_export(places: Places, ranks: Ranks) -> float:
    """Largest difference between scores of the export and of the checkpoint it was made from."""
    from litchi.train.checkpoint import list_checkpoints

    words = ("train.precision=fp32", f"eval.max_rows={COMPARED}")
    exported = score_target(str(places.export), places.test, ranks, *words)
    trained = score_target(str(list_checkpoints(places.run)[-1].folder), places.test, ranks, *words)
    return max(abs(a - b) for query in trained for a, b in zip(exported[query], trained[query], strict=True))


# ------------------------------------------------------------------------------------------------------- results


def missed_targets(mrr_at_10: dict[str, float], export_difference: float) -> list[str]:
    """Say which figures are not as they must be; none: the demo has shown what it is to show.

    Args:
        mrr_at_10: "before", "after", "control" and "chance".
        export_difference: of the scores of export and checkpoint.
    """
    before, after, control, random = (mrr_at_10[name] for name in ("before", "after", "control", "chance"))
    checks = [
        (before <= BEFORE_AT_MOST, f"before is {before:.3f}, above {BEFORE_AT_MOST}: the base can do it already"),
        (after >= AFTER_AT_LEAST, f"after is {after:.3f}, below {AFTER_AT_LEAST}: too little was learnt"),
        (
            abs(control - random) <= CONTROL_WITHIN,
            f"the control is {control:.3f}, more than {CONTROL_WITHIN} from chance {random:.3f}: "
            "queries that do not belong must not rank the products",
        ),
        (export_difference <= EXPORT_WITHIN, f"the export's scores are off by {export_difference:.1e}"),
    ]
    return [text for passed, text in checks if not passed]


def write_page(places: Places, before: Scores, after: Scores, figures: dict[str, Figure]) -> None:
    """Show the first queries of the test in order before and after."""
    rows = []
    for line in places.test.read_text(encoding="utf-8").splitlines()[:SHOWN]:
        row = json.loads(line)
        pictures = [places.data / document["image"] for document in (row["pos_doc"], *row["neg_docs"])]
        first, last = (_candidates(pictures, scores[row["id"]]) for scores in (before, after))
        rows.append(RankedQuery(row["query"], first, last, gloss=gloss(row["query"])))
    title = "Litchi demo: products in combinations the model never saw"
    write_rankings(places.page, places.sheet, title=title, rows=rows, figures=list(figures.values()))


def _candidates(pictures: Sequence[Path], scores: Sequence[float]) -> list[Candidate]:
    return [Candidate(picture, score, n == 0) for n, (picture, score) in enumerate(zip(pictures, scores, strict=True))]


def format_closing(places: Places, figures: Sequence[Figure], summary: dict[str, Any]) -> str:
    """The last lines: figures, where everything lies, and what to try next."""
    export, test = places.export, places.test
    model, files = "model.path=vec-ai/lychee-rerank-mm", "data.train=train.jsonl data.eval=eval.jsonl"
    lines = [
        "",
        f"MRR@10 with its 95 % interval: {summary['queries']} queries for combinations never seen in training, "
        f"{summary['candidates']} candidates each",
        *(f"  {figure.name:<34}{figure.text}" for figure in figures),
        "",
        f"  page       {places.page}",
        f"  picture    {places.sheet}",
        f"  export     {export} (loads in transformers; scores as in the run)",
        f"  figures    {places.summary}",
        f"  time       {summary['total_s']:.0f} s, of it fine-tuning {summary['train_s']:.0f} s",
        "",
        "Again, by hand:",
        f"  litchi evaluate {places.run} --data {test} --against {BASE}",
        f"  litchi score {export} --data {test} --out {places.out / 'scores.jsonl'}",
        "",
        "With your own data and a model of the family (README.md shows a row):",
        f"  litchi data check train.jsonl --task rerank {model}",
        f"  litchi train configs/rerank-lychee.yaml {model} {files} output=runs/mine",
        "  litchi evaluate runs/mine --data eval.jsonl",
        "  litchi score runs/mine --data eval.jsonl --out scores.jsonl",
    ]
    return "\n".join(lines)
