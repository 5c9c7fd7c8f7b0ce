"""The command line: `verl-mg train RECIPE --config FILE [a.b=c ...]`, `plan`, `trace` and `quickstart`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import NoReturn

from verl_mg.errors import EXIT_CODE, UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake ends in one line and exit code 2."""
    # Libraries draw bars over each other's lines on every rank; ours is the one that counts iterations.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        chosen, rest = _parser().parse_known_args(arguments)
        # argparse takes no positional arguments after an option: overrides may stand on both sides of --config.
        if unknown := [text for text in rest if text.startswith("-") or not hasattr(chosen, "overrides")]:
            raise UserError(f"unknown argument {unknown[0]!r}; see verl-mg --help")
        if rest:
            chosen.overrides += rest
        chosen.run(chosen)
    except UserError as error:
        # Every rank makes this mistake alike: one line is enough.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="verl-mg", description="Reinforcement learning of language models over Megatron.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a recipe; start it with torchrun for more than one rank")
    train.add_argument("recipe", help="a Python file with iteration(job, cfg), such as recipes/grpo.py")
    train.add_argument("--config", help="a YAML file")
    train.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file")
    train.set_defaults(run=_train)
    quickstart = commands.add_parser("quickstart", help="teach a tiny model to add, in minutes, on any machine")
    quickstart.add_argument("--output", default="runs/quickstart", help="where the run goes (default: %(default)s)")
    quickstart.set_defaults(run=_quickstart)
    _add_plan(commands)
    _add_trace(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser("plan", help="memory, weight sync and predicted seconds of a job's layouts, on paper")
    plan.add_argument("--model", required=True, help="a Hugging Face model directory, or a config.json")
    plan.add_argument("--ranks", required=True, type=int, help="how many GPUs the job has")
    plan.add_argument("--train", metavar="LAYOUT", help="Megatron's layout, such as tp4-pp4-ep8")
    plan.add_argument("--rollout", metavar="LAYOUT", help="the layout of an SGLang engine, such as tp8-ep8")
    plan.add_argument("--search", action="store_true", help="rank the layouts that fit, of the sides not given")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    numbers: dict[str, tuple[float, str]] = {
        "--top": (5, "how many layouts a search shows"),
        "--node": (8, "ranks of a node"),
        "--memory": (80.0, "GiB of a device"),
        "--reserve": (6.0, "GiB of a device that are kept free"),
        "--intra-node": (400.0, "GB/s of a rank to others of its node"),
        "--inter-node": (50.0, "GB/s of a rank to other nodes"),
        "--sequence": (8192, "tokens of a sample, prompt and response"),
        "--micro-batch": (8192, "tokens of a micro-batch"),
        "--batch": (4 * 2**20, "tokens of an iteration, over all ranks"),
    }
    for name, (default, meaning) in numbers.items():
        what = f"{meaning} (default: %(default)s)"
        plan.add_argument(name, type=type(default), default=default, metavar="N", help=what)
    recompute = "the layers of which only inputs are kept, or attention's matrix alone (default: %(default)s)"
    plan.add_argument("--recompute", choices=("full", "selective"), default="full", help=recompute)
    plan.set_defaults(run=_plan)


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser("trace", help="read off SGLang's own loader what each of its ranks holds of a model")
    trace.add_argument("model", help="a Hugging Face model directory; config.json is enough")
    trace.add_argument("--rollout", metavar="LAYOUT", default="tp2", help="of the engine (default: %(default)s)")
    trace.add_argument("--output", metavar="FILE", default="dialect.json", help="(default: %(default)s)")
    trace.set_defaults(run=_trace)


def _train(arguments: argparse.Namespace) -> None:
    # Both libraries tell every rank what they would rather have installed; the README says what is optional.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    from verl_mg.config import load_config
    from verl_mg.job.recipe import load_recipe
    from verl_mg.job.world import World

    world = World.join()
    try:
        recipe = load_recipe(arguments.recipe)
        config = load_config(arguments.config, arguments.overrides, recipe.config)
        from verl_mg.job.loop import run

        run(recipe, config, world)
    except UserError as error:
        world.leave_with(error)
    except Exception:
        if world.someone_erred():
            world.follow()
        raise
    world.leave()


def _quickstart(arguments: argparse.Namespace) -> None:
    from verl_mg.quickstart import quickstart

    quickstart(arguments.output)


def _plan(arguments: argparse.Namespace) -> None:
    from verl_mg.paper.command import run

    run(arguments)


def _trace(arguments: argparse.Namespace) -> None:
    from verl_mg.layout import EngineLayout
    from verl_mg.rollout.sglang.tracer import write_trace

    write_trace(arguments.model, arguments.output, EngineLayout.parse(arguments.rollout))
    print(f"dialect {arguments.output}")
