"""Letters of multiple-choice answers as people and models write them."""

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Sample
from verl_mg.rewards.choice import letter_of, score

WRITTEN = {
    "Answer: C": "C",
    "Some reasoning.\nAnswer: $C$": "C",
    "**Answer:** C": "C",
    "**Answer: C**": "C",
    "The correct answer is (C).": "C",
    "So the final answer is **C**, as A has the wrong sign.": "C",
    "The answer is option C": "C",
    "answer choice is C) 3 mol": "C",
    "the answer is \\(\\text{C}\\)": None,
    "\\boxed{C}": "C",
    "\\boxed{\\text{(C)}}": "C",
    "\\boxed{\\textbf{C}} and Answer: A": "C",
    "First I thought the answer is A. Then: the answer is B.": "B",
    "(C)": "C",
    "I compare them.\n\n**C.**": "C",
    "A is wrong because of B.": None,
    "The answer is A's neighbour": None,
    "The answer is Anthracene": None,
    "answer: c": None,
    "The answer is E": None,
    "": None,
    "<think>The answer is A</think>The answer is D": "D",
    "<think>The answer is A</think>I do not know.": None,
}


@pytest.mark.parametrize("response", WRITTEN)
def test_letter_of_common_forms_is_read(response):
    assert letter_of(response, "ABCD") == WRITTEN[response]


def test_score_compares_letters_and_counts_answers():
    def of(response: str, answer: str | None, **options: int):
        return score(Sample("?", response, answer, {}, "stop"), **options)

    right, wrong, none = of("Answer: B", "B"), of("Answer: B", "(c)"), of("Hm.", "B")
    assert (right.value, right.answer, right.parts) == (1.0, "B", {"correct": 1.0, "answered": 1.0})
    assert (wrong.value, wrong.answer, wrong.parts["answered"]) == (0.0, "B", 1.0)
    assert (none.value, none.answer, none.parts["answered"]) == (0.0, None, 0.0)
    assert of("Answer: J", "J", choices=10).value == 1.0
    with pytest.raises(UserError, match="the answer 'E' is not one of the letters ABCD"):
        of("Answer: E", "E")
