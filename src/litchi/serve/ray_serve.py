"""The server on more than one machine: a deployment of Ray Serve whose replicas are each a whole Litchi server.

    serve run litchi.serve.ray_serve:build target=runs/NAME replicas=4 gpus=1

A replica has its engine in a process of its own, as `litchi serve` has, and answers the same API under the same limits;
Ray spreads requests over replicas, starts them again, and adds some under load (`pip install 'litchi[serve,ray]'`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from litchi.config import load_config
from litchi.errors import MachineError, UsageError, UserError
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import read_keys

WORDS = {  # what `serve run` is given
    "target": "TARGET, on a path that all machines have",
    "overrides": "key=value words, separated by spaces",
    "replicas": "how many, or auto: as many as the load needs",
    "most": "replicas that auto goes up to (8)",
    "gpus": "of each replica (0)",
    "cpus": "of each replica (1)",
    "api_key_file": "as of litchi serve",
    "engine_url": "as of litchi serve",
}


def build(args: Mapping[str, str]) -> Any:
    """The application `serve run` starts, from its `key=value` words.

    Raises:
        UsageError: a word that is not known, or no target; MachineError: Ray Serve is not installed.
    """
    odd = sorted(set(args) - set(WORDS))
    if odd or "target" not in args:
        raise UsageError(
            f"{odd[0]} is no word of this deployment" if odd else "target is not given",
            why=f"it takes {', '.join(WORDS)}",
        )
    try:
        from ray import serve
    except ImportError as error:
        remedy = "pip install 'litchi[serve,ray]', on every machine"
        raise MachineError("Ray Serve", why=str(error), remedy=remedy) from None
    deployment = serve.deployment(
        name="litchi", max_ongoing_requests=64, max_queued_requests=256, graceful_shutdown_timeout_s=60, **share(args)
    )
    spec = EngineSpec(args["target"], tuple(shlex.split(args.get("overrides", ""))), url=args.get("engine_url"))
    key_file = args.get("api_key_file")

    class Replica:
        """What Ray holds; requests go to the app."""

    return deployment(serve.ingress(lambda: make_replica(spec, key_file))(Replica)).bind()


def share(args: Mapping[str, str]) -> dict[str, Any]:
    """How many replicas there are, and what each takes of a machine. UsageError for what is no number."""
    try:
        each = {"num_cpus": float(args.get("cpus", 1)), "num_gpus": float(args.get("gpus", 0))}
        if args.get("replicas", "1") != "auto":
            return {"ray_actor_options": each, "num_replicas": int(args.get("replicas", 1))}
        most = {"min_replicas": 1, "max_replicas": int(args.get("most", 8)), "target_ongoing_requests": 16}
    except ValueError as error:
        raise UsageError(f"{error}", why="replicas, most, gpus and cpus are numbers") from None
    return {"ray_actor_options": each, "autoscaling_config": most}


def make_replica(spec: EngineSpec, key_file: str | None) -> Any:
    """The ASGI app of a replica, in its process: the front of `litchi serve` and an engine behind it."""
    from litchi.serve.fetch import Fetcher
    from litchi.serve.front import Front, write_log
    from litchi.serve.limits import Gate
    from litchi.serve.metrics import Metrics
    from litchi.serve.pool import Pool
    from litchi.serve.server import make_app
    from litchi.serve.start import run_engine

    words = [word for word in spec.overrides if word.startswith("serve")]
    limits = load_config(None, ["task=rerank", *words], need=()).serve

    def fail(error: UserError) -> None:
        write_log(event=f"error: {error}")
        os._exit(1)  # Ray starts another replica

    metrics = Metrics(lambda: pool.running)
    pool = Pool(
        run_engine, spec, 1, limits, say=lambda text: write_log(event=text), note=metrics.see_batch, fail=fail,
        say_ready=lambda: write_log(event=f"a replica of {spec.name} is ready"),
    )  # fmt: skip
    gate = Gate(read_keys(key_file), limits.rate, limits.concurrency)
    front = Front({spec.name: pool}, limits, gate, Fetcher(frozenset(), limits.body_mb * 2**20), metrics)
    return make_app(front, pool.start, pool.stop)
