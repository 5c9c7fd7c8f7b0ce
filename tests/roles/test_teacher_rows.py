"""Rows that a teacher reads with another prompt or another tokenizer, and its log-probs at the student's tokens."""

import pytest
import torch

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt, teacher_prompt
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer
from verl_mg.roles.teacher_rows import OtherPrompts, OtherTokens

STUDENT = character_tokenizer("0123456789= ")
TEACHER = character_tokenizer(" =9876543210", words=("00", "11", "22", "= 1"))


def row(prompt: str, response: str, ends: bool = True) -> tuple[list[int], list[int]]:
    end = [STUDENT.eos_token_id] if ends else []
    return STUDENT.encode(prompt), STUDENT.encode(response) + end


def batch() -> Batch:
    """Three responses, of which the second is cut, and in the third a tool has written the last two characters."""
    rows = [row("1=", "112 00"), row("22=", "0002", ends=False), row("3=", "11 = 111")]
    made = Batch.from_rows([*prompt, *response] for prompt, response in rows)
    made["prompt_length"] = torch.tensor([len(prompt) for prompt, _ in rows])
    made["loss_mask"] = made.positions >= made.expand_to_tokens(made["prompt_length"])
    made["loss_mask"][-3:-1] = False
    made["sample_id"], made["prompt_id"] = torch.arange(3), torch.tensor([4, 5, 4])
    return made


def test_other_prompts_keep_responses_and_return_their_columns():
    prompts = {4: [7, 7, 7, 7], 5: [8]}
    student = batch()
    student["support_sizes"] = student["loss_mask"] * (student.positions % 3).int()
    student["support_ids"] = torch.arange(int(student["support_sizes"].sum()), dtype=torch.int32)
    rows = OtherPrompts(prompts.__getitem__, 64, "teachers.self.prompt").read(student)
    read = rows.batch
    assert torch.equal(read["support_ids"], student["support_ids"]) and len(read["support_ids"]) > 9
    assert read.lengths.tolist() == [4 + 7, 1 + 4, 4 + 9]
    for number, prompt in enumerate((prompts[4], prompts[5], prompts[4])):
        length = int(student["prompt_length"][number])
        nothing = [0] * len(prompt)
        for name, front in (("tokens", prompt), ("loss_mask", nothing), ("support_sizes", nothing)):
            assert read.row(name, number).tolist() == front + student.row(name, number)[length:].tolist()
    column = torch.arange(1.0, read.total_tokens + 1)[:, None] * torch.tensor([1.0, 10.0])
    restored = rows.restore(column * read["loss_mask"][:, None])
    assert torch.equal(restored[student["loss_mask"]], column[read["loss_mask"]])
    assert not restored[~student["loss_mask"]].any() and rows.spans is None


def test_other_prompts_that_are_too_long_or_of_agents_are_refused():
    reader = OtherPrompts(lambda _: [1] * 60, 64, "teachers.self.prompt")
    with pytest.raises(UserError, match=r"teachers.self.prompt: a response with .* has 69 tokens, more than the 64"):
        reader.read(batch())
    agents = batch()
    agents["prefix_of"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"teachers.self.prompt: the samples are of agents"):
        reader.read(agents)


def test_other_tokens_add_up_over_pieces_of_text():
    student = batch()
    stops = frozenset({STUDENT.eos_token_id})
    reader = OtherTokens(lambda _: [9, 9], STUDENT, TEACHER, stops, "teachers.other.tokenizer")
    rows = reader.read(student)
    texts = [TEACHER.convert_ids_to_tokens(rows.batch.row("tokens", number)[2:]) for number in range(3)]
    space = TEACHER.convert_ids_to_tokens(TEACHER.encode(" "))[0]
    assert texts == [["11", "2", space, "00", "<eos>"], ["00", "0", "2"], ["11", space, "= 1", "11", "<eos>"]]
    # Of the third, "= 1" is a token of the teacher and three of the student's; a tool has written "11".
    spans = [[0, 0, 1, 2, 3, 3, 4], [5, 5, 6, 7], [8, 8, 9, 10, 10, 10, -1, -1, 12]]
    assert rows.spans is not None
    found = [part.tolist() for part in rows.spans.split(student.lengths.tolist())]
    assert found == [[-1] * 2 + spans[0], [-1] * 3 + spans[1], [-1] * 2 + spans[2]]
    scored = [part.tolist() for part in rows.batch["loss_mask"].split(rows.batch.lengths.tolist())]
    assert scored == [[False] * 2 + [True] * 5, [False] * 2 + [True] * 3, [False] * 2 + [True] * 3 + [False, True]]
    column = torch.arange(1.0, rows.batch.total_tokens + 1) * rows.batch["loss_mask"]
    restored = rows.restore(column)
    assert restored.sum() == column.sum()
    for span in range(13):
        at = (rows.spans == span).nonzero().flatten()
        if len(at):
            assert restored[at[-1]] > 0 and not restored[at[:-1]].any()


def prompt(text: str, templated: bool) -> Prompt:
    content = "1+1"
    shown = f"<user>{content}<assistant>" if templated else content
    return Prompt(
        0, (), shown, "2", {"hint": "{answer}"}, messages=[{"role": "user", "content": content}], templated=templated
    )


@pytest.mark.parametrize(
    ("templated", "expected"), [(False, "1+1 is 2 {answer}"), (True, "<user>1+1 is 2 {answer}<assistant>")]
)
def test_teacher_prompt_fills_the_template_once(templated, expected):
    tokenizer = character_tokenizer("0123456789+ {}isanwer")
    tokens = teacher_prompt(prompt("", templated), "{prompt} is {answer} {hint}", tokenizer, "teachers.self.prompt")
    assert tokenizer.decode(tokens) == expected
    with pytest.raises(UserError, match=r"no field 'proof' for teachers.self.prompt. Write one of: answer, hint"):
        teacher_prompt(prompt("", templated), "{proof}", tokenizer, "teachers.self.prompt")
