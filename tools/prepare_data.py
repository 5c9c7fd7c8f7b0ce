r"""Prepares published data sets for training: one JSON line per distinct prompt, with the fields that rewards read.

    python -m tools.prepare_data dapo_math_17k aime_2024 --out data       writes data/NAME.jsonl for each NAME
    python -m tools.prepare_data math_500 --source MATH-500/test.jsonl    of files in place of the names on the hub

Sets are read by their names on the Hugging Face hub, with its cache: HF_HOME is its folder, and HF_HUB_OFFLINE=1
forbids the network. A source may also be a file, a folder, or another name, as in `data.train`. Prompts are lists of
messages, which training renders by the chat template of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.data.records import stored_records
from verl_mg.errors import EXIT_CODE, UserError

Record = Mapping[str, Any]
BOXED = r"\boxed{"
QWEN_MATH = "Please reason step by step, and put your final answer within \\boxed{}."
"""System prompt of the Qwen-Math template (arXiv:2503.20783, appendix on templates)."""


@dataclass(frozen=True)
class PublishedSet:
    """A published data set and how it becomes prompts."""

    sources: tuple[str, ...]
    """Names on the hub, read one after the other."""
    convert: Callable[[Record], Record | None]
    """Makes a record for training; None for one that is left out. KeyError for one of another form."""
    without: str = ""
    """Name of a set whose prompts are left out; "" for none."""
    drawn: int | None = None
    """Number of prompts that are drawn at random; None for all."""


def verl_row(record: Record) -> Record:
    """Converts a row as verl's users publish it: `prompt` is a list of messages, the answer is in `reward_model`."""
    return {"prompt": record["prompt"], "answer": record["reward_model"]["ground_truth"]}


def eurus_row(record: Record) -> Record:
    """Converts a row of Eurus-2-RL-Data: the ground truth is an answer, or the test cases of a program."""
    field = "answer" if record["ability"] == "math" else "tests"
    return {"prompt": record["prompt"], "ability": record["ability"], field: record["reward_model"]["ground_truth"]}


def math_row(record: Record) -> Record | None:
    r"""Converts a row of MATH, whose answer is the last `\boxed{...}` of its solution; None without one."""
    answer = record["answer"] if "answer" in record else last_boxed(record["solution"])
    if not answer:
        return None
    messages = [{"role": "system", "content": QWEN_MATH}, {"role": "user", "content": record["problem"]}]
    return {"prompt": messages, "answer": answer, "level": int(str(record["level"]).removeprefix("Level "))}


def hard_math_row(record: Record) -> Record | None:
    """Converts a row of MATH of levels 3 to 5; None for others and for rows of unknown level."""
    if str(record["level"]).removeprefix("Level ") not in ("3", "4", "5"):
        return None
    return math_row(record)


def code_row(record: Record) -> Record:
    """Converts an instruction with a program that follows it, from Magicoder's or WizardCoder's sets."""
    question, program = ("problem", "solution") if "problem" in record else ("instruction", "output")
    return {"prompt": [{"role": "user", "content": record[question]}], "answer": record[program]}


MATH = ("DigitalLearningGmbH/MATH-lighteval:default:train", "DigitalLearningGmbH/MATH-lighteval:default:test")
MATH_500 = "HuggingFaceH4/MATH-500"
CODE = ("ise-uiuc/Magicoder-OSS-Instruct-75K", "theblackcat102/evol-codealpaca-v1")
SETS = {
    # Each problem is published a hundred times, and each problem of AIME 32 times.
    "dapo_math_17k": PublishedSet(("BytedTsinghua-SIA/DAPO-Math-17k",), verl_row),
    "aime_2024": PublishedSet(("BytedTsinghua-SIA/AIME-2024",), verl_row),
    "eurus_2_rl": PublishedSet(("PRIME-RL/Eurus-2-RL-Data:default:train",), eurus_row),
    "eurus_2_rl_validation": PublishedSet(("PRIME-RL/Eurus-2-RL-Data:default:validation",), eurus_row),
    "math_level_3_to_5": PublishedSet(MATH, hard_math_row, without=MATH_500),
    "math_500": PublishedSet((MATH_500,), math_row),
    "code_instructions": PublishedSet(CODE, code_row),
    "code_prompts_3k": PublishedSet(CODE, code_row, drawn=3000),
}
"""Sets by the names of their files."""


def last_boxed(solution: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` with balanced braces; None without one."""
    start = solution.rfind(BOXED) + len(BOXED)
    depth = 1
    for end in range(start, len(solution)) if start >= len(BOXED) else ():
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[start:end]
    return None


def prepared(chosen: PublishedSet, sources: Sequence[str], without: str, seed: int = 0) -> tuple[list[Record], int]:
    """Returns the distinct records of a set in their order, and the number of rows that were read."""
    seen = {_key(record) for record in _converted(chosen, [without])} if without else set()
    records, rows = [], 0
    for record in _converted(chosen, sources):
        rows += 1
        if record is not None and (key := _key(record)) not in seen:
            seen.add(key)
            records.append(record)
    if chosen.drawn is not None and chosen.drawn < len(records):
        kept = sorted(random.Random(seed).sample(range(len(records)), chosen.drawn))
        records = [records[number] for number in kept]
    return records, rows


def _key(record: Record | None) -> str:
    """Returns the text of the last message, by which a prompt is recognised: other sets have other system prompts."""
    return str(record["prompt"][-1]["content"]).strip() if record else ""


def _converted(chosen: PublishedSet, sources: Sequence[str]) -> Iterator[Record | None]:
    """Yields the converted rows of all sources."""
    for source in sources:
        for place, row in stored_records(source):
            try:
                yield chosen.convert(row)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{place}: not a row of this set ({type(error).__name__}: {error}); it has the fields "
                    f"{', '.join(row)}. Give --source with the set in its published form."
                ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a set that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SETS, metavar="NAME", help=f"sets: {', '.join(SETS)}")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR", help="folder of the files")
    parser.add_argument("--source", action="append", metavar="PATH", help="read this instead; may be repeated")
    parser.add_argument("--without", metavar="PATH", help="leave out the prompts of this instead, if of any")
    options = parser.parse_args(arguments)
    try:
        if (options.source or options.without) and len(options.names) > 1:
            raise UserError("--source: it replaces the sources of one set. Prepare the sets one by one.")
        for name in options.names:
            chosen = SETS[name]
            without = options.without if chosen.without and options.without else chosen.without
            records, rows = prepared(chosen, options.source or chosen.sources, without)
            if not records:
                raise UserError(f"{name}: none of {rows} rows is part of this set. Give --source with another file.")
            _write(options.out / f"{name}.jsonl", records)
            print(f"{options.out / name}.jsonl: {len(records)} prompts of {rows} rows")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def _write(file: Path, records: Iterable[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps(record) + "\n")
    os.replace(unfinished, file)


if __name__ == "__main__":
    sys.exit(main())
