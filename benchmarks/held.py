"""What the fullest rank holds of the weights in every offered layout, of the real members on pretended ranks.

    python benchmarks/held.py 7b 32b 72b --ranks 8 16 64 1024

Builds every layout on the meta device with `apply_parallel` over a fake process group, at its first and its last rank,
and prints the bytes of bf16 weights. No memory of that size is needed; it takes about 2 s for each rank.
"""

from __future__ import annotations

import argparse
import time

from litchi.model.sizes import size_config
from litchi.parallel.dry import build_dry, make_dry, measure_held, pretend_ranks
from litchi.parallel.mesh import offer_layouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="+")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8])
    args = parser.parse_args()
    for name in args.members:
        for ranks in args.ranks:
            for layout in offer_layouts(size_config(name), ranks):
                start, held = time.perf_counter(), []
                for rank in sorted({0, layout.ranks - 1}):
                    owner, tied = make_dry(size_config(name))
                    with pretend_ranks(rank, ranks) as pretended:
                        held.append(measure_held(build_dry(owner, layout, pretended, tied=tied).model).weights_bytes)
                seconds = time.perf_counter() - start
                print(f"{name} {ranks:5d} ranks  {max(held) / 1e9:8.3f} GB  {layout}  ({seconds:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
