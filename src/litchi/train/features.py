"""A run's features of a frozen vision tower: the store it reads and adds to, and all of them before step 1.

`train.features`: `off` runs the tower in every step, `cache` keeps what it gives, `precompute` has it all beforehand.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from uuid import uuid4

import PIL
import torch
from torch import Tensor
from torch.utils.data import Dataset

from litchi.batch.balance import share_pictures
from litchi.batch.collate import join_patches
from litchi.batch.cost import Grid
from litchi.batch.loader import Corpus, StepPlan, prepare_ahead
from litchi.batch.pictures import decode_pictures, look_up
from litchi.config import Config
from litchi.data.features import FORMAT, FeatureStore, PictureName
from litchi.data.media import RULES
from litchi.data.verdicts import cache_root
from litchi.dist import Ranks, barrier, gather_objects
from litchi.errors import MachineError, UserError
from litchi.evaluate.run import EvalSet
from litchi.model.family import has_part, part
from litchi.model.features import TowerFeatures, identify_tower
from litchi.model.kernels import choose_kernels
from litchi.model.precision import COMPUTE, HELD
from litchi.parallel.apply import Wrapped
from litchi.train.progress import count_progress

PATCHES = 16_384  # of the pictures that are handed over together

Progress = Callable[[int, int], None]


def open_features(config: Config, wrapped: Wrapped, ranks: Ranks) -> FeatureStore | None:
    """The store of this run's features, which the owner adds to; None where none are kept. Collective."""
    if config.train.features == "off":
        return None
    owner, precision, device = wrapped.owner, wrapped.precision, ranks.device
    here = owner.shares.first and has_part(owner.hf, owner.family.vision)
    cut = asdict(owner.spec)
    # they decide the grid, by which features are found, and so does the number of a video's frames
    del cut["min_pixels"], cut["max_pixels"], cut["video"]
    weights = next(part(owner.hf, owner.family.vision).parameters()).dtype if here else None
    dtype = weights if precision in HELD else COMPUTE[precision]
    cast = COMPUTE[precision] if wrapped.sharded and precision not in HELD else None
    kernel = choose_kernels(owner.attention, device, COMPUTE[precision]).name
    facts = {
        "format": [FORMAT, RULES, PIL.__version__, torch.__version__],
        "cut": cut,
        "window": config.data.window,
        "compute": [precision, str(cast), device.type, kernel],
    }
    identity, known = gather_objects((identify_tower(owner, facts) if ranks.is_main else "", str(dtype)))[0]
    store = FeatureStore(
        cache_root() / "features" / identity,
        width=owner.hf.config.get_text_config().hidden_size,  # type: ignore[union-attr,operator]
        dtype=getattr(torch, known.removeprefix("torch.")),
        writer=ranks.rank,
    )
    alone = device.type == "cpu" or config.train.deterministic
    owner.features = TowerFeatures(store, alone, cast) if here else None
    return store


def prepare_features(
    config: Config,
    wrapped: Wrapped,
    ranks: Ranks,
    plan: StepPlan,
    eval_sets: Sequence[EvalSet],
    say: Callable[[str], None],
) -> None:
    """Say where features are kept; compute all of them where that is asked for. Collective."""
    store = plan.corpus.features
    if store is None:
        return
    say(f"features of {len(store):,} pictures are kept in {store.folder}")
    if config.train.features == "precompute":
        stages = plan.curriculum
        specs = [plan.corpus.spec] if stages is None else list(dict.fromkeys((*stages.specs, stages.full)))
        parts: list[Part] = [(replace(plan.corpus, spec=spec), range(sum(plan.corpus.sizes))) for spec in specs]
        parts += [(one.corpus, one.rows) for one in eval_sets]
        show = count_progress("encoding pictures", enabled=ranks.is_main)
        count = precompute(wrapped, ranks, parts, workers=config.data.workers, progress=show)
        say(f"all {count:,} pictures of the data are encoded")


# ------------------------------------------------------------------------------------------------ all before step 1


Part = tuple[Corpus, Sequence[int]]  # some rows of a corpus
Picture = tuple[int, int, int, Grid]  # number of the part, row, number of `name_picture`, grid


def precompute(
    wrapped: Wrapped, ranks: Ranks, parts: Sequence[Part], *, workers: int, progress: Progress | None = None
) -> int:
    """Compute the features of all pictures of some rows that are not kept yet, each rank a share by patches.

    Afterwards the tower waits in the machine's memory: it is not called again.

    Returns:
        How many pictures there are.

    Raises:
        UserError: a picture cannot be read; MachineError: the disk has no room for them.
    """
    store = parts[0][0].features
    assert store is not None
    pictures = list_pictures(parts)
    encoders = _encoders(wrapped, ranks, store.folder)
    shares = share_pictures([grid for *_, grid in pictures], max(1, len(encoders)))
    mine = [pictures[n] for n in shares[encoders.index(ranks.rank)]] if ranks.rank in encoders else []
    _refuse_full_disk(store, sum(t * h * w for *_, (t, h, w) in pictures) // wrapped.owner.spec.merge**2)
    failed: UserError | None = None
    try:
        _encode_all(wrapped, parts, mine, workers, progress)
    except UserError as error:
        failed = error
    first = next((error for error in gather_objects(failed) if error is not None), None)
    if first is not None:
        raise first
    store.refresh()
    if wrapped.owner.features is not None and ranks.device.type != "cpu":
        part(wrapped.owner.hf, wrapped.owner.family.vision).to("cpu")
    return len(pictures)


def list_pictures(parts: Sequence[Part]) -> list[Picture]:
    """Each distinct picture and grid of some rows once. Pure, the same on all ranks."""
    seen: set[tuple[int, Grid]] = set()
    out = []
    for number, (corpus, rows) in enumerate(parts):
        for row in rows:
            _, cost, _ = corpus.find(row)
            for name, grid in zip(cost.names, cost.grids, strict=True):
                if (name, grid) not in seen:
                    seen.add((name, grid))
                    out.append((number, row, name, grid))
    return out


def _encoders(wrapped: Wrapped, ranks: Ranks, folder: Path) -> list[int]:
    """The ranks that share this rank's pictures with it: those with a tower, where it matters on machines that see the
    same folder. Collective."""
    mark = folder / gather_objects(f"seen-{uuid4().hex}")[0]
    if ranks.is_main:
        mark.touch()
    barrier()
    group = "shared" if mark.exists() else socket.gethostname()
    told = gather_objects((group, wrapped.owner.features is not None))
    if ranks.is_main:
        mark.unlink()
    return [rank for rank, (where, able) in enumerate(told) if able and where == group]


def _refuse_full_disk(store: FeatureStore, rows: int) -> None:
    """Before hours of computing whose result would find no place. Collective."""
    disk = os.statvfs(store.folder)
    free, wanted = disk.f_bavail * disk.f_frsize, rows * store.row_bytes - store.held_bytes
    if any(gather_objects(wanted > free)):
        raise MachineError(
            f"train.features=precompute needs {wanted / 1e9:,.1f} GB",
            where=store.folder,
            why=f"{free / 1e9:,.1f} GB are free there",
            remedy="Name a folder on a larger disk in LITCHI_CACHE, lower data.pixels.max, or use train.features=cache",
        )


def _encode_all(
    wrapped: Wrapped, parts: Sequence[Part], mine: Sequence[Picture], workers: int, progress: Progress | None
) -> None:
    features = wrapped.owner.features
    jobs = list(_pieces(mine))
    done = 0
    for job, (pixels, grids, names) in zip(
        jobs, prepare_ahead(_Pictures(parts, jobs), range(len(jobs)), workers), strict=True
    ):
        if names:
            assert isinstance(features, TowerFeatures)
            with wrapped.compute():
                features.encode(wrapped.owner, pixels, grids, names)
        done += len(job)
        if progress is not None:
            progress(done, len(mine))


def _pieces(pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
    """Neighbours that have at most PATCHES together, or one that has more."""
    piece: list[Picture] = []
    held = 0
    for picture in pictures:
        t, h, w = picture[3]
        if piece and held + t * h * w > PATCHES:
            yield piece
            piece, held = [], 0
        piece.append(picture)
        held += t * h * w
    if piece:
        yield piece


class _Pictures(Dataset):
    """number -> (pixels, grids, names) of those of a job that are not kept, or the UserError that is in the way."""

    def __init__(self, parts: Sequence[Part], jobs: Sequence[Sequence[Picture]]):
        self.parts, self.jobs = parts, jobs

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int):
        try:
            return self._load(self.jobs[number])
        except UserError as error:
            return error

    def _load(self, job: Sequence[Picture]) -> tuple[Tensor, list[Grid], list[PictureName]]:
        pixels, grids, names = [], [], []
        for number, row, name, grid in job:
            corpus = self.parts[number][0]
            placed, source, renderer = corpus.picture(row, name, grid)
            assert corpus.features is not None
            _, kept = look_up([(placed, source)], corpus.features)
            for patches in decode_pictures([(placed, source)], renderer, corpus.spec, kept).values():
                pixels.append(patches)
                grids.append(grid)
                names += kept.names
        return torch.from_numpy(join_patches(pixels)), grids, names
