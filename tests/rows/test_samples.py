"""Rows of samples against loops over the segments."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_mg.data import Prompt
from verl_mg.engines.engine import Sample
from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport
from verl_mg.engines.trajectory import MAX_SAMPLES, MAX_SEGMENTS, NOT_GENERATED, Segment, Trajectory
from verl_mg.errors import UserError
from verl_mg.rows.samples import OptionalColumns, samples_to_batch

VERSION = 7
tokens = st.lists(st.tuples(st.integers(0, 50), st.integers(NOT_GENERATED, 6)), min_size=1, max_size=6)


@st.composite
def segments(draw, agents=("",)):
    parts = []
    for number, entries in enumerate(draw(st.lists(tokens, max_size=4))):
        versions = tuple(version for _, version in entries)
        logprobs = tuple(0.0 if v == NOT_GENERATED else -0.25 * i for i, v in enumerate(versions))
        prefix = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        parts.append(
            Segment(
                tuple(token for token, _ in entries),
                logprobs,
                versions,
                draw(st.booleans()),
                prefix,
                0 if prefix is None else draw(st.integers(0, len(entries))),
                torch.full((len(entries) - 1, 2, 1), number, dtype=torch.int16),
                agent=draw(st.sampled_from(agents)),
            )
        )
    return tuple(parts)


@given(st.lists(st.tuples(st.integers(0, 30), segments(), st.booleans()), min_size=1, max_size=4))
def test_samples_to_batch_of_trajectories_has_a_row_for_each_segment(drawn):
    prompts = [Prompt(100 + n, (9,) * (1 + n), "", None, {}) for n in range(len(drawn))]
    ids = [40 * n + offset for n, (offset, _, _) in enumerate(drawn)]
    samples = [
        Sample(i, (), (), (), "timeout" if late else "stop", trajectory=Trajectory(parts, (), None))
        for i, (_, parts, late) in zip(ids, drawn, strict=True)
    ]
    batch = samples_to_batch(prompts, samples, VERSION, OptionalColumns((2, 1)))
    expected = []
    for i, prompt, (_, parts, late) in zip(ids, prompts, drawn, strict=True):
        nothing = Segment(prompt.tokens, (0.0,) * len(prompt.tokens), (NOT_GENERATED,) * len(prompt.tokens), late)
        for number, part in enumerate(parts or (nothing,)):
            written = [place for place, version in enumerate(part.policy_versions) if version >= 0]
            before = number if part.prefix_of is None else part.prefix_of
            expected.append(
                {
                    "trajectory": i,
                    "sample_id": i * MAX_SEGMENTS + number,
                    "prompt_id": prompt.id,
                    "prompt_length": written[0] if written else len(part.tokens),
                    "policy_version": min((part.policy_versions[p] for p in written), default=VERSION),
                    "truncated": late or part.truncated,
                    "prefix_of": i * MAX_SEGMENTS + before,
                    "prefix_length": part.prefix_length,
                    "tokens": list(part.tokens),
                    "policy_versions": list(part.policy_versions),
                    "loss_mask": [version >= 0 for version in part.policy_versions],
                    "rollout_logprobs": list(part.logprobs),
                }
            )
            known = [] if part.routed_experts is None else part.routed_experts[:, 0, 0].tolist()
            experts = batch.row("routed_experts", len(expected) - 1)[:, 1, 0].tolist()
            assert experts == [*known, *[-1] * (len(part.tokens) - len(known))]
    for name in expected[0]:
        values = batch[name] if batch.kind(name).name == "SEQUENCE" else None
        found = [batch.row(name, row) if values is None else values[row] for row in range(len(batch))]
        assert [value.tolist() for value in found] == [row[name] for row in expected], name


@given(st.lists(segments(("solver", "critic")), min_size=1, max_size=4))
def test_samples_to_batch_of_agents_with_names_has_a_trajectory_for_each_that_trains(drawn):
    prompts = [Prompt(n, (9,), "", None, {}) for n in range(len(drawn))]
    samples = [Sample(n, (), (), (), "stop", trajectory=Trajectory(parts, (), None)) for n, parts in enumerate(drawn)]
    batch = samples_to_batch(prompts, samples, VERSION, OptionalColumns((2, 1), agent_names=("critic", "solver")))
    columns = ("agent", "trajectory", "sample_id", "prefix_of", "prefix_length")
    rows = list(zip(*(batch[name].tolist() for name in columns), strict=True))
    expected = []
    for sample, parts in enumerate(drawn):
        trains = {part.agent for part in parts if max(part.policy_versions) >= 0} or {"solver", "critic"}
        ids = {number: sample * MAX_SEGMENTS + number for number, part in enumerate(parts) if part.agent in trains}
        for number, i in ids.items():
            part = parts[number]
            agent = 1 if part.agent == "solver" else 0
            prefix = (ids[part.prefix_of], part.prefix_length) if part.prefix_of in ids else (i, 0)
            expected.append((agent, agent * MAX_SAMPLES + sample, i, *prefix))
        if not parts:
            expected.append((0, sample, sample * MAX_SEGMENTS, sample * MAX_SEGMENTS, 0))
    assert rows == expected


def test_samples_to_batch_without_agents_has_a_trajectory_for_each_row():
    prompts = [Prompt(3, (1, 2), "", None, {}), Prompt(4, (1,), "", None, {})]
    samples = [Sample(8, (5, 6), (-1.0, -2.0), (2, 1), "length"), Sample(9, (), (), (), "stop")]
    batch = samples_to_batch(prompts, samples, VERSION)
    assert batch["trajectory"].tolist() == batch["sample_id"].tolist() == [8, 9]
    assert batch["policy_version"].tolist() == [1, VERSION] and batch["truncated"].tolist() == [True, False]
    assert batch["prompt_length"].tolist() == [2, 1] and not {"prefix_of", "prefix_length"} & set(batch.names())
    assert batch["loss_mask"].tolist() == [False, False, True, True, False]


def test_samples_to_batch_with_selected_keys_has_those_of_fed_tokens():
    prompts = [Prompt(n, (1, 2), "", None, {}) for n in range(3)]
    keys = SelectedKeys(torch.tensor([0, 0, 2], dtype=torch.int32), torch.tensor([[3, 4], [5, 6]], dtype=torch.uint8))
    segment = Segment((1, 5, 3), (0, -0.1, 0), (-1, 2, -1), False, selected_keys=keys[:2])
    samples = [
        Sample(0, (5, 6), (-1.0, -2.0), (2, 1), "stop", selected_keys=keys),
        Sample(1, (), (), (), "stop"),
        Sample(2, (), (), (), "stop", trajectory=Trajectory((segment,), (), None)),
    ]
    batch = samples_to_batch(prompts, samples, VERSION, OptionalColumns(num_selecting=2))
    assert batch["selection_sizes"].tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert batch["selected_keys"].tolist() == [[3, 4], [5, 6]] and batch["selected_keys"].dtype is torch.uint8
    none = samples_to_batch([], [], VERSION, OptionalColumns(num_selecting=2))
    assert none["selected_keys"].shape == (0, 2) and "selected_keys" not in samples_to_batch([], [], VERSION).names()


def support(*candidates):
    flat = [token for own in candidates for token in own]
    sizes = torch.tensor([len(own) for own in candidates], dtype=torch.int32)
    return SampledSupport(sizes, torch.tensor(flat, dtype=torch.int32))


def test_samples_to_batch_with_candidates_has_those_of_responses_and_segments():
    prompts = [Prompt(n, (1, 2), "", None, {}) for n in range(3)]
    plain = Sample(0, (5, 6), (-1.0, -2.0), (2, 1), "stop", support=support([9, 5], []))
    segment = Segment((1, 5, 3), (0, -0.1, 0), (-1, 2, -1), False, support=support([], [5, 7, 8], []))
    samples = [
        plain,
        Sample(1, (), (), (), "stop"),
        Sample(2, (), (), (), "stop", trajectory=Trajectory((segment,), (), None)),
    ]
    batch = samples_to_batch(prompts, samples, VERSION, OptionalColumns(has_support=True))
    assert batch["support_sizes"].tolist() == [0, 0, 2, 0, 0, 0, 0, 3, 0]
    assert batch["support_ids"].tolist() == [9, 5, 5, 7, 8] and batch["support_ids"].dtype is torch.int32
    assert "support_ids" not in samples_to_batch(prompts, samples, VERSION).names()
    none = samples_to_batch([], [], VERSION, OptionalColumns(has_support=True))
    assert {"support_sizes", "support_ids"} <= set(none.names())
    for broken in (None, support([9, 4], [])):  # silent, and without the token that was drawn
        with pytest.raises(UserError, match=r"^algorithm\.support: the engine of sample_id 0 reported tokens without"):
            samples_to_batch(prompts[:1], [replace(plain, support=broken)], VERSION, OptionalColumns(has_support=True))
