"""Function of `ifeval` in its worker processes; the package is imported before the first time limit begins."""

from typing import Any

import if_verifiable.ifbench
import if_verifiable.ifeval
from langdetect import DetectorFactory

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward

DetectorFactory.seed = 0  # otherwise the languages that it detects differ from call to call


def evaluate(
    benchmark: str, prompt: str, instructions: list[str], arguments: list[dict[str, Any]], response: str
) -> Reward:
    """Returns the reward of a response, with a part for each pair of level and mode; its value is the first part."""
    kind = if_verifiable.IFEvalSample if benchmark == "ifeval" else if_verifiable.IFBenchSample
    record = kind(0, prompt, instructions, arguments)
    try:
        _, scores = if_verifiable.evaluate_output_for_sample(benchmark, record, response)
    except Exception as error:
        if type(error) is LookupError:  # of nltk, whose message is a page
            raise UserError(
                f"rewards.ifeval: data of nltk is missing ({str(error).strip().splitlines()[0]}). Run: python -m "
                "nltk.downloader punkt punkt_tab averaged_perceptron_tagger_eng stopwords."
            ) from None
        raise UserError(
            f"rewards.ifeval: the instructions {', '.join(instructions)} of the prompt {prompt[:60]!r} cannot be "
            f"checked ({type(error).__name__}: {error}). Correct their kwargs."
        ) from None
    parts = {
        "prompt_strict": scores.binary_strict,
        "prompt_loose": scores.binary_loose,
        "instruction_strict": scores.partial_strict,
        "instruction_loose": scores.partial_loose,
    }
    return Reward(scores.binary_strict, parts)
