"""Samples that wait in a checkpoint, written and read again."""

import math

import pytest
import torch
from pydantic import ValidationError

from verl_mg.engines.engine import Sample
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport
from verl_mg.engines.trajectory import ConversationTurn, Segment, Trajectory
from verl_mg.images import Image
from verl_mg.rewards import Reward
from verl_mg.run.sample_state import REPORTS, SampleState, images_of, reports_of

KEYS = SelectedKeys(torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([[5, 6]], dtype=torch.uint8))


def reported(tokens: int) -> tuple[SampledSupport, torch.Tensor]:
    """Two candidates of the last token, and one likeliest token in the place of each."""
    sizes = torch.tensor([0] * (tokens - 1) + [2], dtype=torch.int32)
    top = torch.full((tokens, 2, 1), -math.inf)
    return SampledSupport(sizes, torch.tensor([8, 5], dtype=torch.int32)), top


def agent_sample() -> Sample:
    generator = torch.Generator().manual_seed(0)

    def experts(count: int) -> torch.Tensor:
        return torch.randint(0, 8, (count, 2, 1), dtype=torch.int16, generator=generator)

    segments = (
        Segment((5, 6, 7), (0.0, -1 / 3, -math.pi), (-1, 4, 5), False, routed_experts=experts(2)),
        Segment(
            (5, 6, 900, 8),
            (0.0, 0.0, 0.0, -1e-30),
            (-1, -1, -1, 3),
            True,
            0,
            2,
            experts(3),
            *reported(4),
            (Image(b"a"),),
            selected_keys=KEYS,
        ),
    )
    call = {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"x": "\\ud800"}'}}
    question = {"role": "user", "content": "ü"}
    turns = (
        ConversationTurn(0, "policy", True, 0.1, 0.2, (question,), {"tool_calls": [call]}, 1, 2, "stop"),
        ConversationTurn(1, "other", False, 0.3, 1e-9, (), {"content": "half of a pair: \ud800"}, 3, 1, "length"),
    )
    # The log of an agent may contain names of files in another encoding.
    trajectory = Trajectory(segments, turns, Reward(1 / 7, {"form": -0.1}, "42"), "log \udcff\n", "failed")
    return Sample(11, (), (), (), "timeout", trajectory=trajectory)


def plain_sample() -> Sample:
    images = (Image(b"a"), Image(b"b"), Image(b"a"))
    experts = torch.ones(4, 2, 1, dtype=torch.int16)
    return Sample(3, (1, 2), (-0.1, -0.2), (0, 1), "length", experts, *reported(2), images=images, selected_keys=KEYS)


@pytest.mark.parametrize("sample", [agent_sample(), plain_sample()], ids=["agent", "plain"])
def test_sample_state_in_json_gives_the_same_sample(sample):
    text, reports = SampleState.of(sample).model_dump_json(), reports_of("partial", sample)
    again = SampleState.model_validate_json(text).to_sample("partial", reports, images_of(sample))
    assert len(images_of(sample)) == (1 if sample.trajectory else 2)
    assert again == sample  # without the reports, which are compared by key
    keys = [f"{name}/partial/{number}" for name in REPORTS for number in (["11/1"] if sample.trajectory else ["3"])]
    assert reports.keys() == {*keys, *(["routed_experts/partial/11/0"] if sample.trajectory else [])}
    read = reports_of("partial", again)
    assert read.keys() == reports.keys() and all(torch.equal(read[key], tensor) for key, tensor in reports.items())


def test_sample_state_has_highest_token_and_oldest_version_of_all_segments():
    sample = agent_sample()
    assert SampleState.of(sample).highest_token == 900 and SampleState.of(plain_sample()).highest_token == 2
    assert min(sample.generated_versions) == 3 and len(sample.generated_versions) == 3


def test_sample_state_of_a_segment_with_too_few_versions_is_refused():
    tree = SampleState.of(agent_sample()).model_dump()
    tree["trajectory"]["segments"][0]["policy_versions"] = (1,)
    with pytest.raises(ValidationError, match="must have the same length"):
        SampleState.model_validate(tree)
