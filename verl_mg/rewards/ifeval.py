"""Reward for verifiable instructions, IFEval [arXiv:2311.07911] and IFBench, by the optional package if-verifiable.

A record has `prompt`, `instruction_id_list` and `kwargs`, as in google/IFEval and allenai/IFBench_test.
"""

import importlib
from typing import Any, Literal, get_args

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import answer_part
from verl_mg.rewards.reward import Reward, Sample

Benchmark = Literal["ifeval", "ifbench"]
Level = Literal["prompt", "instruction"]
Mode = Literal["strict", "loose"]
# Seed of the package's detector of languages, whose results otherwise differ from call to call.
SEED = 0


class Score:
    """Scores how many of a record's instructions a response follows."""

    # Checkers share the state of libraries.
    parallel = 1

    def __init__(self, benchmark: Benchmark = "ifeval", level: Level = "prompt", mode: Mode = "strict") -> None:
        """Imports the package.

        Args:
            benchmark: the set that the instructions are of.
            level: whether the reward is 1.0 where all instructions are followed, or the share that is.
            mode: loose: an instruction is also followed where it is without the first or last line, or without `*`.
        """
        for name, value, kind in (("benchmark", benchmark, Benchmark), ("level", level, Level), ("mode", mode, Mode)):
            if value not in (known := get_args(kind)):
                raise UserError(f"rewards.ifeval: {name} {value!r} is unknown. Write {' or '.join(known)}.")
        try:
            import if_verifiable
            from langdetect import DetectorFactory

            registry = importlib.import_module(f"if_verifiable.{benchmark}")
        except ImportError as error:
            raise UserError(
                f"reward verl_mg.rewards.ifeval: the package if-verifiable is not installed ({error}). Run: "
                "pip install 'verl-mg[ifeval]'."
            ) from None
        DetectorFactory.seed = SEED
        self._package, self._benchmark, self._known = if_verifiable, benchmark, frozenset(registry.INSTRUCTION_DICT)
        self._value = f"{level}_{mode}"

    def score(self, sample: Sample) -> Reward:
        """Returns the reward of a response, with a part for each pair of level and mode, such as `prompt_strict`."""
        instructions, arguments = _instructions(sample)
        if unknown := set(instructions) - self._known:
            raise UserError(
                f"rewards.ifeval: {min(unknown)} is no instruction of {self._benchmark}. Set the option benchmark."
            )
        package = self._package
        kind = package.IFEvalSample if self._benchmark == "ifeval" else package.IFBenchSample
        record = kind(sample.record.get("key", 0), str(sample.record.get("prompt", "")), instructions, arguments)
        try:
            _, scores = package.evaluate_output_for_sample(self._benchmark, record, answer_part(sample.response))
        except LookupError as error:  # nltk's message is a page
            raise UserError(
                f"rewards.ifeval: data of nltk is missing ({str(error).strip().splitlines()[0]}). Run: python -m "
                "nltk.downloader punkt punkt_tab averaged_perceptron_tagger_eng stopwords."
            ) from None
        parts = {
            "prompt_strict": scores.binary_strict,
            "prompt_loose": scores.binary_loose,
            "instruction_strict": scores.partial_strict,
            "instruction_loose": scores.partial_loose,
        }
        return Reward(parts[self._value], parts)


def _instructions(sample: Sample) -> tuple[list[str], list[dict[str, Any]]]:
    names, arguments = sample.record.get("instruction_id_list"), sample.record.get("kwargs")
    if not (isinstance(names, list) and isinstance(arguments, list) and len(names) == len(arguments) > 0):
        raise UserError(
            f"rewards.ifeval: the record of the prompt {sample.prompt[:60]!r} has no instruction_id_list with as many "
            "kwargs. Use records of google/IFEval."
        )
    return names, [dict(each or {}) for each in arguments]
