"""The reward role: samples are scored while others are generated, and `wait` collects the scores.

    rank 1, whose engine has generated a sample             rank 0, which has got its row
    submit: the engine's loop starts to score it, number 7
    threads of the reward functions compute                 columns generated_by = 1, score_id = 7
    wait: receives the numbers of requested scores      ◀── wait: requests score 7 of rank 1
          waits for their results, and names their parts ─▶       knows all parts that rewards of any rank have
          sends the values                              ──▶       column `reward`

Requests and names are exchanges of all ranks, so `wait` is a collective and ends with the slowest score. Values are
messages between two ranks, and there are none where rows are on the rank that generated them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.algorithms.aggregation import segment_totals
from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.prompt_feed import PromptFeed
from verl_mg.data.prompts import Prompt
from verl_mg.data.rendering import OPENING_TOKENS, reply_opening
from verl_mg.distributed.collectives import all_gather_bytes, all_gather_json, exchange_bytes
from verl_mg.engines.engine import Sample as GeneratedSample
from verl_mg.engines.trajectory import ConversationTurn, without_agent
from verl_mg.errors import UserError
from verl_mg.models.special_tokens import exact_text
from verl_mg.rewards import AsyncScorer, Reward, Sample
from verl_mg.rewards.sample import wrong_agents
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import RewardModel
from verl_mg.rows.samples import (
    Conversation,
    GeneratedRows,
    RolloutRecord,
    agent_reward,
    conversation_of,
    final_turn,
    final_turns,
    row_id,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ANSWER = 0
"""Value of the column `answer` where a reward reports no final answer."""
NOT_SCORED = -1
"""Value of the column `score_id` of rows that were not submitted."""
PART = "reward."
"""Prefix of the columns with the parts of the reward."""


@dataclass(frozen=True)
class SampleTexts:
    """Rows and tokens of the policy as reward functions see them.

    prompt "<user>2+3?<assistant><think>", tokens "a </think> 5 <eos>"
    Sample(prompt="<user>2+3?<assistant>", response="<think>a</think>5")

    The response of an agent's sample is the policy's last reply, by the same rule.
    """

    prompts: PromptFeed
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]  # tokens that end a response; as its last token they are no part of its text

    def of_row(self, batch: Batch, row: int) -> Sample:
        """Returns a row of a batch with the columns tokens, prompt_id, prompt_length and truncated."""
        prompt = self.prompts.by_id(int(batch["prompt_id"][row]))
        response = batch.row("tokens", row)[int(batch["prompt_length"][row]) :]
        return self.of_tokens(prompt, response.tolist(), bool(batch["truncated"][row]))

    def of_tokens(self, prompt: Prompt, tokens: Sequence[int], truncated: bool, opening: str | None = None) -> Sample:
        """Returns a response to a prompt with the special tokens that the policy has written in it.

        `opening` is what the chat template has written of the reply; None: as it has in the prompt.
        """
        ended = bool(tokens) and tokens[-1] in self.stop_token_ids
        of_prompt = self._opening if prompt.templated and prompt.text.endswith(self._opening) else ""
        begun = of_prompt if opening is None else opening
        response = begun + self._decode(tokens[:-1] if ended else tokens)
        finish: Literal["length", "stop"] = "length" if truncated else "stop"
        return Sample(prompt.text.removesuffix(of_prompt), response, prompt.answer, prompt.record, finish, len(tokens))

    def of_conversation(
        self, prompt: Prompt, conversation: Conversation, segment: Callable[[int], Sequence[int]], truncated: bool
    ) -> Sample:
        """Returns the policy's last reply in a conversation, whose segments have the tokens `segment(number)`."""
        turn = final_turn(conversation)
        if turn is None:
            return self.of_tokens(prompt, (), truncated, "")
        replies = {
            name: self._of_turn(prompt, last, segment(last.segment), truncated).response
            for name, last in final_turns(conversation).items()
        }
        return replace(self._of_turn(prompt, turn, segment(turn.segment), truncated), replies=replies)

    def _of_turn(self, prompt: Prompt, turn: ConversationTurn, tokens: Sequence[int], truncated: bool) -> Sample:
        start = turn.prompt_tokens
        # The agent's messages are others than the record's, so each context says whether the template begins a reply.
        before = self._decode(tokens[max(start - OPENING_TOKENS, 0) : start])
        opening = self._opening if before.endswith(self._opening) else ""
        return self.of_tokens(prompt, tokens[start : start + turn.tokens], truncated, opening)

    @cached_property
    def _opening(self) -> str:
        return reply_opening(self.tokenizer)

    def _decode(self, tokens: Sequence[int]) -> str:
        return exact_text(self.tokenizer, tokens)


class RewardRole:
    """Scores samples by the reward functions of the job, or by its frozen reward model.

    The engine loop submits each sample on the rank whose engine generated it; results stay there until `wait` sends
    them to the ranks of the rows, which the columns `generated_by` (rank) and `score_id` (number there) identify.
    `scorer` is None where the model scores; `source_scorers` are of sources that have their own reward functions, by
    `Prompt.reward`. The column `agent` has numbers of `agent_names`.
    """

    def __init__(
        self,
        scorer: AsyncScorer | None,
        texts: SampleTexts,
        context: JobContext,
        records: Sequence[RolloutRecord],
        model: RewardModel | None = None,
        has_agents: bool = False,
        source_scorers: Mapping[str, AsyncScorer] | None = None,
        agent_names: Sequence[str] = (),
    ) -> None:
        self._scorer, self._sample_texts, self._model = scorer, texts, model
        self._has_agents, self._agent_names = has_agents, tuple(agent_names)
        self._source_scorers = dict(source_scorers or {})
        self._timer, self._records = context.timer, records
        self._next_id = itertools.count()
        self._agent_rewards: dict[int, Reward] = {}
        """Rewards that agents have returned, by number of the score."""
        self._collected: list[int] = []
        self._scorer_of: dict[int, AsyncScorer] = {}
        """Reward functions that score a sample, by number of the score."""
        self._acting: dict[int, frozenset[str]] = {}
        """Agents with trained turns, by number of the score; of samples whose agents have names."""

    def start_iteration(self) -> dict[str, float]:
        """Reads the weights of a mixture on rank 0, for all ranks; returns them as metrics."""
        self.discard(self._collected)
        self._collected = []
        mixture = self._scorer.mixture if self._scorer else None
        if mixture is None:
            return {}
        # The file may change while a job runs: one rank reads it, so that all have the same weights.
        mixture.use(all_gather_json(mixture.refresh() if dist.get_rank() == 0 else {})[0])
        return {f"reward/weight/{name}": weight for name, weight in mixture.weights.items()}

    def submit(self, prompt: Prompt, sample: GeneratedSample) -> int:
        """Starts to score a complete sample of this rank's engine, from any thread; returns the number of the score."""
        # An agent's own reward is the reward of its sample, and no reward function is called. Where it has none, reward
        # functions score its last reply, see `final_turn`.
        truncated = sample.finish != "stop"
        if sample.trajectory is not None:
            segments = sample.trajectory.segments
            truncated |= any(segment.truncated for segment in segments)
            return self._submit_conversation(
                prompt, conversation_of(sample.trajectory), lambda number: segments[number].tokens, truncated
            )
        if self._scorer_for(prompt) is None:
            return NOT_SCORED
        return self._submit(prompt, self._sample_texts.of_tokens(prompt, sample.tokens, truncated))

    def submit_rows(self, rows: GeneratedRows) -> list[int]:
        """Starts to score rows that come from a checkpoint; returns the number of each row's score."""
        batch = rows.batch
        episodes = without_agent(batch["trajectory"])
        truncated = segment_totals(batch["truncated"], episodes) > 0
        score_ids: dict[int, int] = {}
        for row in batch.first_rows.tolist():
            episode = int(episodes[row])
            if episode in score_ids:  # one score for an episode, whatever its agents and rows
                continue
            prompt = self._sample_texts.prompts.by_id(int(batch["prompt_id"][row]))
            text = rows.conversations.get(episode)
            if text is not None:
                segment = partial(_segment_tokens, batch, episode)
                scored = self._submit_conversation(prompt, json.loads(text), segment, bool(truncated[row]))
            else:
                scored = self._submit(prompt, self.sample(batch, row))
            score_ids[episode] = scored
        return [score_ids[episode] for episode in episodes.tolist()]

    def _submit_conversation(
        self, prompt: Prompt, conversation: Conversation, segment: Callable[[int], Sequence[int]], truncated: bool
    ) -> int:
        reward = agent_reward(conversation)
        if reward is None:
            return self._submit(prompt, self._sample_texts.of_conversation(prompt, conversation, segment, truncated))
        score_id = next(self._next_id)
        self._agent_rewards[score_id] = reward
        self._acting[score_id] = frozenset(final_turns(conversation))
        return score_id

    def _submit(self, prompt: Prompt, sample: Sample) -> int:
        scorer = self._scorer_for(prompt)
        if scorer is None:
            return NOT_SCORED
        score_id = next(self._next_id)
        self._acting[score_id] = frozenset(sample.replies)
        self._scorer_of[score_id] = scorer
        scorer.submit(score_id, sample)
        return score_id

    def _scorer_for(self, prompt: Prompt) -> AsyncScorer | None:
        return self._source_scorers[prompt.reward] if prompt.reward else self._scorer

    def discard(self, score_ids: Iterable[int]) -> None:
        """Drops samples that are not waited for, scored or not."""
        for score_id in score_ids:
            self._agent_rewards.pop(score_id, None)
            self._acting.pop(score_id, None)
            if scorer := self._scorer_of.pop(score_id, None):
                scorer.discard(score_id)

    @property
    def scores_single_samples(self) -> bool:
        """Returns whether samples are scored one by one as they complete, and not whole batches by a reward model."""
        return self._model is None

    def poll(self, score_id: int) -> dict[str, float] | None:
        """Returns `scores`, None while they are computed; from any thread."""
        is_agents = score_id in self._agent_rewards
        if not is_agents and self._scorer is not None and not self._scorer.is_scored(score_id):
            return None
        return self.scores(score_id)

    def scores(self, score_id: int) -> dict[str, float]:
        """Waits for the rewards of a sample of this rank, by the agents that have trained turns in it; of agents
        without names by "". UserError if a reward function failed."""
        reward = self._result(score_id)
        return {name: reward.of(name).value for name in sorted(self._acting[score_id]) or ("",)}

    def wait(self, batch: Batch) -> Tensor:
        """Waits until the rows of a batch are scored; all ranks call it together.

        Returns (n,) float32, for each row the reward of its trajectory. Adds the sequence columns `reward.PART`
        (float32, NaN where a reward has no such part) and `answer` (int64, equal for equal final answers, NO_ANSWER
        where there is none) to the batch. Rows of a replay keep the reward that they have. UserError if a reward
        function failed.
        """
        if "reward" in batch:
            return batch["reward"]
        if self._model is not None:
            columns = self._score_by_model(self._model, batch)
        else:
            with self._timer("wait_reward"):
                columns = self._collect(batch)
        of_batch = [record for record in self._records if record.batch is batch]  # none of a part of a batch
        for name, values in columns.items():
            if name != "reward":
                batch.put(name, values, ColumnKind.SEQUENCE)
            for record in of_batch:
                record.add(name, values, ColumnKind.SEQUENCE)
        return columns["reward"]

    def sample(self, batch: Batch, row: int) -> Sample:
        """Returns a row as a reward function sees it; see `SampleTexts.of_row`."""
        return self._sample_texts.of_row(batch, row)

    def close(self) -> None:
        """Releases the resources of the reward functions."""
        for scorer in (*([self._scorer] if self._scorer else []), *self._source_scorers.values()):
            scorer.close()

    def _score_by_model(self, model: RewardModel, batch: Batch) -> dict[str, Tensor]:
        """Returns the columns of the model's scores: of the last row of each trajectory without another."""
        last = batch.last_rows
        scores = model.compute_scores(batch if len(last) == len(batch) else batch.select(last))[batch.trajectory_index]
        answers = torch.full((len(batch),), NO_ANSWER, dtype=torch.int64)
        if not (self._has_agents or self._source_scorers):
            return {"reward": scores, "answer": answers}
        # Rewards of agents, and of sources with their own reward function, come before the model's.
        columns = self._collect(batch)
        return columns | {"reward": torch.where(batch["score_id"] == NOT_SCORED, scores, columns["reward"])}

    def _result(self, score_id: int) -> Reward:
        if score_id in self._agent_rewards:  # which `AgentRunner` has checked
            return self._agent_rewards[score_id]
        reward = self._scorer_of[score_id].result(score_id)
        if wrong := wrong_agents(reward, self._acting[score_id], self._agent_names):
            raise UserError(f"reward: {wrong}.")
        return reward

    def _collect(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the columns of the rows' scores, fetched from the ranks that generated them; NaN where not scored."""
        here, generated_by, score_ids = dist.get_rank(), batch["generated_by"], batch["score_id"]
        agents = batch["agent"] if "agent" in batch else torch.zeros_like(score_ids)
        scored = score_ids != NOT_SCORED
        rows = {rank: (scored & (generated_by == rank)).nonzero().flatten() for rank in generated_by.unique().tolist()}
        # A rank does not know which of its scores others need.
        wanted = torch.stack([generated_by, score_ids, agents], dim=1)
        away = wanted[scored & (generated_by != here)].flatten()
        requests = [part.clone().view(torch.int64).view(-1, 3) for part in all_gather_bytes(away.view(torch.uint8))]
        requests[here] = wanted[scored]
        requested = [request[request[:, 0] == here, 1:].tolist() for request in requests]
        names = self._agent_names or ("",)
        rewards = [[self._result(i).of(names[agent]) for i, agent in pairs] for pairs in requested]
        self._collected += [i for pairs in requested for i, _ in pairs]
        local_parts = {part for replies in rewards for reward in replies for part in reward.parts}
        # A part that only some ranks have seen is a column on all, or batches would not fit together.
        parts = sorted({part for of_rank in all_gather_json(list(local_parts)) for part in of_rank})
        replies = {rank: _packed(of_rank, parts) for rank, of_rank in enumerate(rewards)}
        local = replies.pop(here)
        row_bytes = 8 + 4 * (1 + len(parts))
        received = exchange_bytes(replies, {rank: len(part) * row_bytes for rank, part in rows.items() if rank != here})
        scores = torch.full((1 + len(parts), len(batch)), math.nan)
        answers = torch.full((len(batch),), NO_ANSWER, dtype=torch.int64)
        for rank, data in (received | {here: local}).items():
            of_rank = rows.get(rank, [])
            if count := len(of_rank):
                answers[of_rank] = data[: 8 * count].view(torch.int64)
                scores[:, of_rank] = data[8 * count :].view(torch.float32).view(count, 1 + len(parts)).T
        columns = ["reward", *(f"{PART}{part}" for part in parts)]
        return {name: column.clone() for name, column in zip(columns, scores, strict=True)} | {"answer": answers}


def _segment_tokens(batch: Batch, episode: int, segment: int) -> list[int]:
    (row,) = (batch["sample_id"] == row_id(episode, segment)).nonzero().flatten().tolist()
    tokens: list[int] = batch.row("tokens", row).tolist()
    return tokens


def scoring_reward(reward: RewardRole | None) -> RewardRole:
    """Returns the reward by which groups are filtered while others are generated; UserError without such a reward."""
    if reward is None or not reward.scores_single_samples:
        raise UserError(
            "reward.function: groups are filtered as their samples are scored one by one, and this job has no reward "
            "function. Give one, or let the recipe sample in rounds."
        )
    return reward


def _packed(rewards: Sequence[Reward], parts: Sequence[str]) -> Tensor:
    """Returns uint8: the numbers of the answers, then of each reward its value and its parts, NaN where it has none."""
    answers = torch.tensor([_answer_number(reward) for reward in rewards], dtype=torch.int64)
    values = [[reward.value, *(reward.parts.get(part, math.nan) for part in parts)] for reward in rewards]
    return torch.cat([answers.view(torch.uint8), torch.tensor(values, dtype=torch.float32).flatten().view(torch.uint8)])


def _answer_number(reward: Reward) -> int:
    """Returns a number of the final answer that is the same on every rank."""
    # Not `hash`, which Python salts in each process.
    if reward.answer is None:
        return NO_ANSWER
    digest = hashlib.blake2b(reward.answer.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1  # fits int64, and is not NO_ANSWER
