"""`--engine ray`: the same ranks as workers of Ray Train, on the cluster Ray is connected to or on this machine.

Ray places one worker per GPU, tells it who it is in torchrun's variables, and starts all of them again when one or
its machine is lost; the run then resumes from its newest checkpoint. Ray is an optional extra.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from litchi.errors import MachineError, UserError

if TYPE_CHECKING:
    from litchi.dist import Ranks

RETRIES = 3  # starts after the first: a machine may be lost, but what fails four times is no accident
WAIT_S = 3600  # of the process group, as in `start_ranks`


def run_on_ray(body: Callable[[Ranks], object], procs: int | None, *, output: str, retries: int = RETRIES) -> None:
    """Run `body` on `procs` workers, by default one per GPU of the cluster, and wait.

    Args:
        body: what each rank does; it resumes where an earlier start left off. It travels to the workers by pickle.
        procs: workers.
        output: the run's folder, next to which Ray keeps what it notes about the workers.
        retries: how often all workers are started again.

    Raises:
        MachineError: Ray is not installed; UserError: what a worker raised.
    """
    try:
        import ray
        from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise MachineError(
            "--engine ray: Ray is not installed",
            remedy="Run pip install 'litchi[ray]', on every machine of the cluster",
        ) from None

    class EndAtOnce(UserCallback):
        """An error of settings, data or a signal is the same at every start: raised here, it ends the run."""

        def after_exception(self, run_context: object, worker_exceptions: Mapping[int, BaseException]) -> None:
            error = said_by(worker_exceptions)
            if error is not None and error.status != MachineError.status:
                raise error

    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # else every line of a rank comes twice
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(procs or 1, os.cpu_count() or 1)}
    ray.init(include_dashboard=False, logging_level="ERROR", ignore_reinit_error=True, **local)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    folder, place = Path.cwd(), Path(output).absolute()

    def work() -> None:
        from litchi.model.build import quiet_libraries
        from litchi.parallel.launch import join_ranks

        os.chdir(folder)  # paths are relative to where the command was given
        quiet_libraries()
        body(join_ranks())

    trainer = TorchTrainer(
        work,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=WAIT_S),
        scaling_config=ScalingConfig(num_workers=procs or max(1, gpus), use_gpu=gpus > 0),
        run_config=RunConfig(
            name=f"{place.name}.ray",
            storage_path=str(place.parent),
            failure_config=FailureConfig(max_failures=retries),
            callbacks=[EndAtOnce()],
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise explain(error, retries) from error


def said_by(failures: Mapping[int, BaseException]) -> UserError | None:
    """The error of the first rank that raised one of ours; Ray may have wrapped it."""
    found = [getattr(failures[rank], "_base_exc", failures[rank]) for rank in sorted(failures)]
    return next((error for error in found if isinstance(error, UserError)), None)


def explain(error: BaseException, retries: int) -> UserError:
    """Word what Ray says of a failed run: the error a worker raised, or which rank failed with what."""
    cause = getattr(error, "controller_failure", None)
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    ours = cause if isinstance(cause, UserError) else said_by(failures)
    if ours is not None:
        return ours
    rank, failed = min(failures.items(), default=(None, cause or error))
    text = str(failed).strip().splitlines() or [type(failed).__name__]
    return UserError(
        text[-1].strip(),
        where="Ray" if rank is None else f"rank {rank}",
        why=f"it failed in all {retries + 1} starts" if failures else None,
        remedy="The workers' own words stand above; the same command resumes",
    )
