"""Writes the tables of docs/coming_from_verl.md from that of `verl-mg from-verl`.

python -m tools.docs.write_verl_tables

A table is between the comments `<!-- options -->` or `<!-- defaults -->` and `<!-- end -->`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_mg.config import tree_for
from verl_mg.from_verl.job import DEFAULTS, VerlJob
from verl_mg.from_verl.rows import Row
from verl_mg.from_verl.table import ROWS
from verl_mg.from_verl.translate import MISSING, converted, default_of
from verl_mg.job.recipe import load_recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming_from_verl.md"
JOBS = {
    "ppo": {"algorithm.adv_estimator": "gae"},
    "grpo": {"algorithm.adv_estimator": "grpo"},
    "gspo": {"algorithm.adv_estimator": "grpo", "aorr.actor.policy_loss.loss_mode": "gspo"},
    "clip_cov": {"algorithm.adv_estimator": "grpo", "aorr.actor.policy_loss.loss_mode": "clip_cov"},
    "kl_cov": {"algorithm.adv_estimator": "grpo", "aorr.actor.policy_loss.loss_mode": "kl_cov"},
    "dapo": {"algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True},
}
"""Jobs of verl in which everything else is its default, by recipe; further ones differ from these in nothing else."""
WITH_MEGATRON = {"aorr.actor.strategy": "megatron"}


def document() -> str:
    """Returns the text of the page with today's tables."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, lines in (("options", options()), ("defaults", defaults())):
        table = "\n".join(lines)
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{start}{table}\n{end}{after}"
    return text


def options() -> list[str]:
    """Returns the lines of the table of all keys."""
    lines = ["| verl | here | its default there | note |", "|---|---|---|---|"]
    for row in ROWS:
        defaults = [_shown(DEFAULTS[key]) for key in row.theirs if key in DEFAULTS and not key.startswith("critic.")]
        here = ", ".join(f"`{key}`" for key in row.ours) or "nothing"
        # Some versions have further keys, such as grad_offload.
        theirs = ", ".join(f"`{key}`" for key in row.theirs if key in DEFAULTS or key.endswith((".*", "kwargs")))
        lines.append(f"| {theirs} | {here} | {', '.join(defaults) if len(row.theirs) == 1 else ''} | {row.note} |")
    return lines


def defaults() -> list[str]:
    """Returns the lines of the table of values that differ where neither file has the key."""
    differing: dict[tuple[str, str, str, str], list[str]] = {}
    for name, given in JOBS.items():
        recipe = load_recipe(name)
        tree = tree_for(recipe.config)
        job = VerlJob({**given, "aorr.rollout.name": "vllm"})
        values = converted(job, recipe)
        for key, value in values.items():
            ours = default_of(tree, key)
            row = _row_of(key, job)
            if ours is not MISSING and value != ours and row is not None and key not in NAMED:
                differing.setdefault((_theirs(row, key), key, _shown(value), _shown(ours)), []).append(name)
    lines = ["| verl | here | verl's default | our default | recipes |", "|---|---|---|---|---|"]
    for (theirs, key, value, ours), names in differing.items():
        of = "all" if len(names) == len(JOBS) else ", ".join(names)
        lines.append(f"| `{theirs}` | `{key}` | {value} | {ours} | {of} |")
    return lines


NAMED = {"model.path", "data.train", "data.test", "reward.function", "job.output", "tracking.name", "rollout.engine"}
"""Keys of paths and names, which every job has to write."""


def _row_of(key: str, job: VerlJob) -> Row | None:
    return next((row for row in ROWS if key in row.ours and row.when.holds(job)), None)


def _theirs(row: Row, key: str) -> str:
    """Returns the key of verl that sets one of ours: the one of the same name, or the first."""
    name = key.rpartition(".")[2]
    return next((theirs for theirs in row.theirs if theirs.endswith(f".{name}") and "fsdp" in theirs), None) or next(
        (theirs for theirs in row.theirs if theirs.endswith(f".{name}")), row.theirs[0]
    )


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.startswith("${"):
        return "that of `" + value.strip("${}").replace("oc.select:", "") + "`"
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else None
    return f"`{text or value}`" if value != "" else '`""`'


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
