from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.engines.scoring_server import ScoringServer, TokenScore
from verl_mg.roles.role import ForwardPass
from verl_mg.training.token_outputs import LOGPROBS, TokenOutputs


class RemoteTeacher:
    """Teacher on a server outside the job, which each rank asks about its rows, `parallel` requests at a time."""

    def __init__(self, server: ScoringServer, parallel: int) -> None:
        self._server, self._parallel = server, parallel

    def prepare(self, batch: Batch, call: str, outputs: TokenOutputs = LOGPROBS) -> ForwardPass:
        """Returns the requests for log-probs or likeliest tokens, which are sent where a model would compute."""
        assert not outputs.hidden  # servers return no hidden states

        def work() -> Tensor:
            return asyncio.run(self._score(batch, outputs.top)).to(outputs.dtype)

        # Each rank scores its own rows, so nothing is delivered.
        return ForwardPass(f"{self._server.key}.{call}", work, lambda column: column)

    async def _score(self, batch: Batch, k: int) -> Tensor:
        """Returns the column: log-probs (tokens,), or log-probs and ids (tokens, 2, k) of the likeliest tokens."""
        slots = asyncio.Semaphore(self._parallel)
        rows = batch["loss_mask"].split(batch.lengths.tolist())

        async def of_row(row: int, scored: Tensor) -> Tensor:
            # Nothing predicts the first token of a row.
            places = [place for place in scored.nonzero().flatten().tolist() if place > 0]
            column = torch.zeros(len(scored), 2, k) if k else torch.zeros(len(scored))
            if places:
                async with slots:
                    scores = await self._server.score(batch.row("tokens", row).tolist(), places[0], k)
                column[places] = _as_tensor([scores[place - places[0]] for place in places], k)
            return column

        columns = await asyncio.gather(*(of_row(row, scored) for row, scored in enumerate(rows)))
        empty = torch.zeros(0, 2, k) if k else torch.zeros(0)
        return torch.cat([empty, *columns])


def _as_tensor(scores: Sequence[TokenScore], k: int) -> Tensor:
    if not k:
        return torch.tensor([score.logprob for score in scores])
    return torch.tensor([score.likeliest for score in scores]).transpose(1, 2)
