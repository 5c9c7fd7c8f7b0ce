"""The job of `verl-mg eval`, started by itself or under a launcher."""

# It is a `RunningJob` that does not learn, so that every engine, layout and checkpoint of training is evaluated by the
# code that training runs; the price is that the training backend loads the weights first.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config, dump_config
from verl_mg.distributed.collectives import broadcast_json
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.evaluation.configuration import Target, evaluation_config
from verl_mg.evaluation.results import Report, format_report, report_of, write_results
from verl_mg.job.job import RunningJob
from verl_mg.monitor.sample_schema import SAMPLES, FileMetadata, fingerprint
from verl_mg.monitor.sample_writer import SampleWriter
from verl_mg.monitor.status import METRICS, StatusFile
from verl_mg.run.fetch_models import with_fetched_models
from verl_mg.run.job_state import restore_actor
from verl_mg.run.main import on_all_ranks
from verl_mg.run.run_dir import CONFIG
from verl_mg.stores.records import CHECKPOINTS

NAME = "eval"  # name of the command where a run has the name of its recipe


def run_evaluation(
    text: str,
    file: Callable[[], Path | None],
    sets: Sequence[str],
    overrides: Sequence[str],
    output: Path | None,
    as_json: bool,
) -> None:
    """Evaluates MODEL, RUN or RUN@ITERATION on all ranks of the launcher, writes the results, and prints them once."""

    def work(world: World) -> None:
        target = Target.parse(text)
        folder = output or target.output
        quiet = ["job.console=false"] if as_json else []
        config = evaluation_config(target, file(), sets, [*overrides, *quiet], folder)
        world.set_timeouts(config.job)
        report = evaluate(target, with_fetched_models(config, world), world)
        if world.rank == 0:
            shown = report.model_dump_json(indent=2) if as_json else f"{format_report(report)}\nresults {folder}"
            print(shown, flush=True)

    on_all_ranks(work, resumable=False)


def evaluate(target: Target, config: Config, world: World) -> Report:
    """Evaluates a target and writes the results; all ranks call it together."""
    if config.job.deterministic:
        device.compute_deterministically()
    checkpoint, output = target.checkpoint(), config.job.folder
    _open(output, config)
    roles = {"actor", "rollout", "reward"} | ({"frozen_reward_model"} if config.reward.from_model else set())
    with StatusFile(output, NAME, 1, world.rank, world.size) as status:
        job = RunningJob(
            config,
            roles,
            world.store,
            learns=False,
            recipe=NAME,
            from_checkpoint=checkpoint is not None,
            evaluates_only=True,
        )
        world.watch_progress(job.timer)
        status.running(job.timer)
        iteration = restore_actor(job, checkpoint) if checkpoint else target.iteration
        job.start()
        job.begin(0)
        with job.timer("evaluation"):
            results = job.evaluate_sets()
        model = broadcast_json(fingerprint(config.model.path) if world.rank == 0 else None)
        samples = SampleWriter(
            output / SAMPLES,
            world.rank,
            FileMetadata(NAME, model, world.size, agents=tuple(config.rollout.agent_names)),
            job.sample_texts,
            config.record.samples_per_rank,
        )
        samples.write(0, job.rollout.records, ())
        report = report_of(target.text, iteration, config, results)
        if world.rank == 0:
            write_results(output, report, results)
        dist.barrier()  # the run has ended for `verl-mg status` when the results are on disk
        status.log(1, {})
        job.close()
    return report


def _open(output: Path, config: Config) -> None:
    """Makes the output folder on rank 0, in which an earlier evaluation is replaced; UserError for a run's folder."""
    if dist.get_rank() == 0:
        if (output / METRICS).exists() or (output / CHECKPOINTS).exists():
            raise UserError(f"--output {output}: it contains a run. Choose another folder.")
        try:
            output.mkdir(parents=True, exist_ok=True)
            (output / CONFIG).write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--output {output}: cannot be written ({error.strerror}). Choose another folder."
            ) from None
    dist.barrier()
