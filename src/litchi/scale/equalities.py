"""What has to be equal on any machine, as a list of named checks: packed and alone, kept and computed, saved and going
on. A folder of drawn rows in, the difference of each pair out, in fp32 and, beside it, in bf16.

A check computes the same thing in two ways and gives the largest difference. The packaged model is small, so this takes
a minute or two; on a GPU it runs there.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from litchi.batch.collate import collate
from litchi.batch.loader import load_patches
from litchi.config import load_config
from litchi.dist import Ranks
from litchi.errors import UserError
from litchi.evaluate.run import score_set
from litchi.model.build import builtin_folder
from litchi.parallel.launch import LAUNCHER, RESTARTS, run_ranks
from litchi.scale.selfcheck import SETTINGS, TASKS, TRAINED, largest, run_job, write_rows
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export_target import export_target
from litchi.train.loop import train_run
from litchi.train.measure import open_set
from litchi.train.metrics import read_lines
from litchi.train.setup import prepare_run
from litchi.train.target import find_target, open_target, target_config
from litchi.train.watch import how_to_measure

LOSS, SCORE, BITS = (1e-6, 1e-2), (1e-5, 2e-2), (0.0, 0.0)  # limits of relative differences in fp32 and in bf16
ON_GPU = 10  # fp32 sums in other orders there
WHOLE = 100_000  # tokens: one micro-batch
SERVER_S = 120.0
OF_RANKS = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_", LAUNCHER, RESTARTS)  # what a launcher tells them
RUN = (
    *("task=rerank", "model.path=builtin:tiny", "track=[]", "data.workers=0", "data.negatives=2"),
    *("trainable={vision: lora, language: lora, lora: {rank: 4, dropout: 0.1}}", "optim.lr=5e-3", "train.keep=2"),
    *("train.steps=4", "train.save_every=2", "train.global_batch_size=4", "train.micro_batch_tokens=400"),
)


@dataclass(frozen=True)
class Equality:
    """A pair, and how far it is apart; `difference` None: it was not run, as `note` says."""

    name: str
    equal: str
    precision: str
    difference: float | None
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """None: not run. A difference that is not a number has failed."""
        return None if self.difference is None else self.difference <= self.limit


class NotHere(Exception):
    """This machine lacks what a check needs."""


# --------------------------------------------------------------------------------------------------------- the place


@dataclass
class Bench:
    """Where checks compute: a folder with drawn rows, these ranks (one), a precision."""

    folder: Path
    ranks: Ranks
    precision: str

    def __post_init__(self) -> None:
        write_rows(self.folder)
        rows = [json.loads(line) for line in (self.folder / "rerank.jsonl").read_text(encoding="utf-8").splitlines()]
        groups = [{"id": f"g{n}", **row} for n, row in enumerate(rows)]
        pairs = [
            {"id": f"g{n}-{m}", "query": row["query"], "documents": [document]}
            for n, row in enumerate(rows)
            for m, document in enumerate([*row["pos_doc"], *row["neg_docs"]])
        ]
        self.groups, self.pairs = self.write("groups", groups), self.write("pairs", pairs)
        stills = [row for row in groups if "video" not in json.dumps(row)]
        self.stills = self.write("stills", stills)

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def losses(self, trained: str, task: str, *words: str) -> list[float]:
        """Of five steps of a kind of training in one process; later words hold."""
        data = [word.format(folder=self.folder) for word in TASKS[task]]
        own = ["model.path=builtin:tiny", *SETTINGS, *data, TRAINED[trained], f"train.precision={self.precision}"]
        return run_job(self.ranks, [*own, *words]).losses

    def train(self, out: Path, *more: str) -> Path:
        """Train a reranker with LoRA into a folder, or go on with it."""
        words = [*RUN, f"data.train={self.groups}", f"output={out}", f"train.precision={self.precision}"]
        words.append(f"train.deterministic={str(self.ranks.device.type == 'cuda').lower()}")
        return train_run(load_config(None, [*words, *more]), self.ranks)

    @cached_property
    def run(self) -> Path:
        return self.train(self.folder / "run")

    def scores(self, target: Path, data: Path, *words: str, tokens: int = WHOLE) -> list[float]:
        """What `litchi score TARGET` gives for each document, with micro-batches of so many tokens."""
        found = find_target(str(target))
        words = (f"data.eval={data}", f"train.precision={self.precision}", *words)
        config = target_config(found, words, task="rerank")
        rows = open_set(config, str(data), self.ranks, require_labels=False)
        wrapped = open_target(found, config, self.ranks)
        how = replace(how_to_measure(config, self.ranks.device), micro_batch_tokens=tokens)
        return [score for *_, scores in score_set(wrapped, rows, how).groups for score in scores]


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference, relative to the largest of the wanted numbers."""
    most = max(abs(value) for value in wanted)
    return largest(abs(a - b) for a, b in zip(found, wanted, strict=True)) / most


def each_apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference, of losses."""
    return largest(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


# -------------------------------------------------------------------------------------------------------- the checks


def packed(bench: Bench) -> float:
    return apart(bench.scores(bench.run, bench.groups), bench.scores(bench.run, bench.groups, tokens=1))


def shared(bench: Bench) -> float:
    return apart(bench.scores(bench.run, bench.groups), bench.scores(bench.run, bench.pairs, tokens=1))


def accumulated(bench: Bench) -> float:
    one = bench.losses("full", "chat", f"train.micro_batch_tokens={WHOLE}")
    return each_apart(bench.losses("full", "chat"), one)


def cut_groups(bench: Bench) -> float:
    """Groups larger than a micro-batch are taken in pieces."""
    words = "loss=group_softmax", "train.micro_batch_tokens=100"
    return each_apart(bench.losses("LoRA", "rerank", *words), bench.losses("LoRA", "rerank", words[0]))


def checkpointed(bench: Bench) -> float:
    plain = bench.losses("full", "chat")
    return each_apart(bench.losses("full", "chat", "train.checkpoint_activations=true"), plain)


def kept_features(bench: Bench) -> float:
    kind = "LoRA, language", "chat"
    return each_apart(bench.losses(*kind, "train.features=cache"), bench.losses(*kind))


def compiled(bench: Bench) -> float:
    """Where there is what compiles."""
    cuda = bench.ranks.device.type == "cuda"
    if not (find_spec("triton") if cuda else shutil.which(os.environ.get("CXX", "g++"))):
        raise NotHere("no triton" if cuda else "no C++ compiler")
    return each_apart(bench.losses("full", "chat", "train.compile=true"), bench.losses("full", "chat"))


def resumed(bench: Bench) -> float:
    """Dropout, AdamW, a falling rate: losses of all steps and every byte of the last checkpoint."""
    return _resumed(bench, bench.run)


def resumed_8bit(bench: Bench) -> float:
    words = "optim.name=adamw8bit", "train.export=never"
    return _resumed(bench, bench.train(bench.folder / "8bit", *words), *words)


def _resumed(bench: Bench, run: Path, *words: str) -> float:
    again = shutil.copytree(run, run.with_name(f"{run.name}-again"), ignore=shutil.ignore_patterns("export"))
    (again / "done.json").unlink()
    shutil.rmtree(list_checkpoints(again)[-1].folder)
    return _bits_apart(bench.train(again, *words), run)


def repeated(bench: Bench) -> float:
    return _bits_apart(bench.train(bench.folder / "repeated", "data.workers=2", "train.export=never"), bench.run)


def _bits_apart(run: Path, other: Path) -> float:
    lines, files = zip(*(_ended(one) for one in (run, other)), strict=True)
    return each_apart(*lines) if files[0] == files[1] else math.inf


def _ended(run: Path) -> tuple[list[float], dict[str, str]]:
    files = list_checkpoints(run)[-1].manifest["files"]
    return [line["loss"] for line in read_lines(run / "metrics.jsonl")], {n: e["sha256"] for n, e in files.items()}


def exported(bench: Bench) -> float:
    return apart(bench.scores(bench.run / "export", bench.groups), _trained(bench))


def adapted(bench: Bench) -> float:
    return apart(bench.scores(bench.run / "export" / "adapter", bench.groups), _trained(bench))


def _trained(bench: Bench, run: Path | None = None) -> list[float]:
    """Scores of the trained weights as the last checkpoint has them."""
    return bench.scores(list_checkpoints(run or bench.run)[-1].folder, bench.groups)


def merged_dora(bench: Bench) -> float:
    run = bench.train(bench.folder / "dora", "trainable.lora.variant=dora", "trainable.lora.dropout=0")
    return apart(bench.scores(run / "export", bench.groups), _trained(bench, run))


def int8_base(bench: Bench) -> float:
    """The language's weights rounded by hand, row by row to 127 steps of its largest, and held as they were."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(builtin_folder(), bench.folder / "rounded")
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if re.search(r"model\.layers\.\d+\.\w+\.\w+_proj\.weight$", name)]
    for name in names:
        whole = tensors[name].float()
        step = whole.abs().amax(1, keepdim=True) / 127
        tensors[name] = (whole / step).round() * step
    assert names
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = "LoRA, language", "rerank"
    return each_apart(bench.losses(*kind, "model.quantize=int8"), bench.losses(*kind, f"model.path={folder}"))


def rounded(bench: Bench) -> float:
    """What an NF4 export holds is what the merged one becomes when it is loaded in 4 bits."""
    if not find_spec("bitsandbytes"):
        raise NotHere("bitsandbytes is not installed")
    out = bench.folder / "nf4"
    export_target(str(bench.run), out, (), bench.ranks, form="nf4", data=str(bench.groups), limit=math.inf)
    whole = bench.scores(bench.run / "export", bench.groups, "model.quantize=nf4")
    return apart(bench.scores(out, bench.groups), whole)


def served(bench: Bench) -> float:
    """Groups with pictures, sent over HTTP to a server of this run."""
    wanted = bench.scores(bench.run, bench.stills)
    command = [sys.executable, "-m", "litchi", "serve", str(bench.run), "--port", "0"]
    log, found = bench.folder / "serve.log", []
    alone = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
    with log.open("w") as out:
        server = subprocess.Popen([*command, f"train.precision={bench.precision}"], stdout=out, stderr=out, env=alone)
    try:
        url = _wait_for_address(server, log)
        for line in bench.stills.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            documents = [_inline(one, bench.folder) for one in (*row["pos_doc"], *row["neg_docs"])]
            results = _post(f"{url}/v1/rerank", {"query": _inline(row["query"], bench.folder), "documents": documents})
            found += [one["logit"] for one in sorted(results["results"], key=lambda one: one["index"])]
    finally:
        server.terminate()
        server.wait()
    return apart(found, wanted)


def _wait_for_address(server: subprocess.Popen, log: Path) -> str:
    until = time.monotonic() + SERVER_S
    while not (found := re.search(r"serving \S+ on (http://[^\"\s]+)", log.read_text(encoding="utf-8"))):
        if server.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"the server did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.1)
    return found.group(1)


def _inline(content: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A query or document as a client sends it, its picture with it."""
    if "image" not in content:
        return dict(content)
    body = base64.b64encode((folder / content["image"]).read_bytes()).decode()
    return {**content, "image": f"data:image/png;base64,{body}"}


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)


def video_times(bench: Bench) -> float:
    """Positions of pictures and clips against transformers', and of what follows against one more than the largest
    (transformers' own model goes on too early behind a clip)."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    data = [word.format(folder=bench.folder) for word in TASKS["chat"]]
    config = load_config(None, ["model.path=builtin:tiny", *SETTINGS, *data, TRAINED["LoRA, language"]])
    (folder := bench.folder / "positions").mkdir()
    run = prepare_run(config, bench.ranks, folder)
    run.log.close()
    base = Qwen2_5_VLConfig.from_pretrained(builtin_folder())
    with torch.device("meta"):
        oracle = Qwen2_5_VLForConditionalGeneration(base).model
    corpus, most, clips = run.plan.corpus, 0.0, 0
    renderer, merge = corpus.renderers[0], base.vision_config.spatial_merge_size
    for row in range(len(corpus.sources[0].rows)):
        example = corpus.example(row, None)
        found = collate([example], load_patches([example], renderer), renderer.processor).positions[:3]
        for number, at in example.media_at:
            placed = example.media[number]
            clip, behind = placed.media.kind == "video", at + placed.tokens(merge)
            step = placed.step_s * base.vision_config.tokens_per_second if clip else 1.0
            begin = int(found[:, :at].max()) + 1
            wanted = oracle.get_vision_position_ids(begin, torch.tensor(placed.grid), 1, merge, step, device="cpu")
            pairs = (found[:, at:behind], wanted), (found[:, behind], wanted.max() + 1)
            most = max(most, *(float((a - b).abs().max()) for a, b in pairs))
            clips += clip
    assert clips, "no row has a video"
    return most


# ----------------------------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class Check:
    """A named pair. `limits` in fp32 and bf16; `quick`: also run by `--quick`; `twice`: also in bf16."""

    name: str
    equal: str
    run: Callable[[Bench], float]
    limits: tuple[float, float]
    quick: bool = True
    twice: bool = True


CHECKS = (
    Check("packed", "scores of groups in one micro-batch = of each alone", packed, SCORE),
    Check("shared prefix", "scores of a group, its query computed once = of each pair alone", shared, SCORE),
    Check("accumulation", "losses of training in small micro-batches = in one", accumulated, LOSS),
    Check("groups in pieces", "losses of groups cut into pieces = of whole ones", cut_groups, LOSS, quick=False),
    Check("checkpointed activations", "losses with activations computed twice = kept", checkpointed, LOSS),
    Check("kept features", "losses with features of the tower kept = encoded each time", kept_features, LOSS),
    Check("compiled", "losses with compiled blocks = plain ones", compiled, LOSS, quick=False, twice=False),
    Check("resume", "losses, weights and optimizer state of a resumed run = uninterrupted, bit by bit", resumed, BITS),
    Check(
        "8-bit AdamW",
        "the same of a resumed run with its state in 8 bits",
        resumed_8bit,
        BITS,
        quick=False,
        twice=False,
    ),
    Check(
        "repeated", "the same of a second run, with two loaders = of the first, bit by bit", repeated, BITS, quick=False
    ),
    Check("merged export", "scores of the merged export = of the checkpoint", exported, SCORE),
    Check("adapter", "scores of base and adapter = of the checkpoint", adapted, SCORE),
    Check("DoRA", "scores of its merged export = of its checkpoint", merged_dora, SCORE, quick=False, twice=False),
    Check("int8 base", "losses on it = on a base rounded by hand", int8_base, LOSS, quick=False, twice=False),
    Check("nf4 export", "scores of the 4-bit export = of the merged one loaded in 4 bits", rounded, SCORE, quick=False),
    Check("served", "logits over HTTP = scores of `litchi score`", served, SCORE, quick=False),
    Check("video timing", "positions of pictures and clips = those of transformers", video_times, BITS, twice=False),
)


def run_checks(
    folder: Path, ranks: Ranks, *, quick: bool, say: Callable[[str], None], checks: Sequence[Check] = CHECKS
) -> list[Equality]:
    """All checks in fp32, then, unless `quick`, in bf16. What runs say of themselves is of no interest here."""
    os.environ["LITCHI_CACHE"] = str(folder / "cache")  # nothing of an earlier run
    found = []
    for number, precision in enumerate(("fp32",) if quick else ("fp32", "bf16")):
        (folder / precision).mkdir(parents=True)
        bench = Bench(folder / precision, ranks, precision)
        chosen = [one for one in checks if (one.quick or not quick) and (one.twice or not number)]
        for done, check in enumerate(chosen, 1):
            limit = check.limits[number] * (ON_GPU if ranks.device.type == "cuda" and not number else 1)
            start = time.perf_counter()
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    difference, note = check.run(bench), ""
            except NotHere as reason:
                difference, note = None, str(reason)
            except Exception as error:  # one that fails does not hide the others
                difference, note = math.inf, f"{type(error).__name__}: {error}"
            found.append(Equality(check.name, check.equal, precision, difference, limit, note))
            took = f"{time.perf_counter() - start:.1f} s"
            say(f"{done} of {len(chosen)}, {precision}: {check.name}: {note or format(difference, '.1e')} ({took})")
    return found


def format_equalities(found: Sequence[Equality]) -> str:
    """The table as Markdown: a row for each pair, a column for each precision."""
    precisions = list(dict.fromkeys(one.precision for one in found))
    rows = ["| | equal | " + " | ".join(f"{one}, difference (limit)" for one in precisions) + " |"]
    rows.append("|" + "---|" * (2 + len(precisions)))
    for name in dict.fromkeys(one.name for one in found):
        mine = {one.precision: one for one in found if one.name == name}
        cells = [_cell(mine[one]) if one in mine else "" for one in precisions]
        rows.append(f"| {name} | {next(iter(mine.values())).equal} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(one: Equality) -> str:
    if one.difference is None:
        return f"not run: {one.note}"
    return f"{one.difference:.0e} ({one.limit:.0e}){'' if one.passed else f' **no** {one.note}'.rstrip()}"


# --------------------------------------------------------------------------------------------------------- the verb


def check_equalities(*, quick: bool) -> list[Equality]:
    """All checks, in a process of their own. UserError where it ends badly."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "equalities.json"
        file.write_text(json.dumps({"equalities": {"quick": quick}}), encoding="utf-8")
        status = run_ranks(["selfcheck", "--job", str(file)], 1)
        if status:
            raise UserError(f"the equalities ended with status {status}", remedy="What they said stands above")
        return [Equality(**one) for one in json.loads(file.with_suffix(".out").read_text(encoding="utf-8"))]


def run_file(ranks: Ranks, file: Path, *, quick: bool) -> None:
    """What that process does."""
    real = sys.stderr  # which runs are kept from
    found = run_checks(file.parent / "rooms", ranks, quick=quick, say=lambda text: print(text, file=real, flush=True))
    file.with_suffix(".out").write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
