"""Reference of a family of `transformers`: a shrunk copy of a model, with its own eager attention, row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.errors import UserError, one_line
from verl_mg.fsdp.model import HEAD, generic
from verl_mg.fsdp.output import body_of
from verl_mg.models.shrunk_config import LONGEST_ROW, ORDINARY_TOKENS, narrow_module, shrink
from verl_mg.models.transformers_module import read_module_config, takes
from verl_mg.sharding.model_table import Head

TOLERANCE = 1e-5  # of float32 outputs, times the largest of them
ROW_LENGTHS = (LONGEST_ROW // 3, LONGEST_ROW, LONGEST_ROW - 2)
"""Tokens of the rows. The last one crosses, after the longest, nearly every bound that this crosses."""
SEED = 0


@dataclass(frozen=True)
class Computed:
    """Outputs and gradients of a module over rows."""

    outputs: Tensor  # (n,) float32, log-probs or values of the scored tokens of all rows
    gradients: Mapping[str, Tensor]  # by the names of parameters; without those that no token reaches
    hidden: Mapping[str, Tensor]  # outputs of the parts of the module by their names, tokens first, as they end


class FamilyReference:
    """Shrunk copy of the model of a directory, whose rows cross the bounds that the longest row of the job crosses."""

    def __init__(self, model_dir: Path, head: Head, longest_row: int, divisor: int = 1) -> None:
        self.where, self._head = str(model_dir / "config.json"), head
        config = read_module_config(model_dir)
        what = f"{self.where}: a narrow copy of it, over rows in proportion to {longest_row} tokens,"
        self._with_user_errors = partial(_as_user_error, what)
        with self._with_user_errors():
            self.config = shrink(config, longest_row, divisor).config

    @cached_property
    def micro_batches(self) -> list[Batch]:
        """Rows of three lengths, then the first one again."""
        # After a longer one: a module may keep frequencies of the longest row so far.
        vocab, generator = self.config.get_text_config().vocab_size, torch.Generator().manual_seed(SEED)
        lengths = torch.tensor(ROW_LENGTHS)
        total = int(lengths.sum())
        rows = Batch(lengths, {"tokens": torch.randint(*ORDINARY_TOKENS, (total,), generator=generator) % vocab})
        rows["loss_mask"] = torch.ones(total, dtype=torch.bool)
        rows["weights"] = torch.randn(total, generator=generator)
        return [rows, rows.select([0])]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers, the value head's too."""
        return {**self._module.state_dict(), **({f"{HEAD}.weight": self._score} if self._head == "value" else {})}

    @cached_property
    def computed(self) -> Computed:
        """Outputs, gradients and parts of all rows, one after another."""
        outputs: list[Tensor] = []
        gradients: dict[str, Tensor] = {}
        hidden: dict[str, list[Tensor]] = {}
        with self._with_user_errors():
            for rows in self.micro_batches:
                for number in range(len(rows)):
                    # A fresh copy for each row: nothing that it keeps is of another row.
                    module = self.fresh_module()
                    with recorded(module, hidden):
                        output = self.alone(module, rows.row("tokens", number))
                    (output * rows.row("weights", number)[1:].to(output.device)).sum().backward()
                    outputs.append(output.detach())
                    for name, parameter in module.named_parameters():
                        if parameter.grad is not None:
                            gradients[name] = gradients.get(name, 0) + parameter.grad
        if self._score.grad is not None:
            gradients[f"{HEAD}.weight"] = self._score.grad
        return Computed(torch.cat(outputs), gradients, joined(hidden))

    @property
    def idle(self) -> list[str]:
        """Names, with `*` for numbers, of the parameters that no gradient reaches in any layer."""
        reached = {generic(name) for name, gradient in self.computed.gradients.items() if gradient.any()}
        return sorted({generic(name) for name, _ in self._module.named_parameters()} - reached)

    def check(self) -> None:
        """Checks that the family itself generates from left to right, and computes the same twice; else UserError."""
        tokens = self.micro_batches[0].row("tokens", 1)
        end = len(tokens) * 2 // 3
        changed = torch.cat([tokens[:end], tokens[end:].flip(0)])
        with torch.no_grad(), self._with_user_errors():
            first, again, other = (self.alone(self.fresh_module(), row) for row in (tokens, tokens, changed))
        bound = TOLERANCE * max(1.0, float(first.abs().max()))
        differences = float((first - again).abs().max()), float((first - other)[: end - 1].abs().max())
        if not first.isfinite().all():
            raise UserError(f"{self.where}: random weights of its family give NaN. Use another model.")
        if differences[0] > bound:
            raise UserError(
                f"{self.where}: two passes over the same row differ by {differences[0]:.2g} nats. Use a model without "
                "random choices."
            )
        if differences[1] > bound:
            raise UserError(
                f"{self.where}: tokens attend to later ones, which change log-probs by {differences[1]:.2g} nats. Use "
                "a model that generates from left to right."
            )

    def alone(self, module: Any, tokens: Tensor) -> Any:
        """Returns the log-probs or values of one row, (t - 1,), by the module's own forward."""
        ids = tokens.to(device.current_device())[None]
        options = {"use_cache": False} if takes(module, "use_cache") else {}
        if self._head == "value":
            values: Tensor = (
                body_of(module)(input_ids=ids, **options).last_hidden_state[0, :-1].float() @ self._score[0]
            )
            return values
        logits: Tensor = module(input_ids=ids, **options).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def fresh_module(self) -> Any:
        """Returns a copy of the module, with its weights, that has kept nothing of other rows."""
        return copy.deepcopy(self._module)

    @cached_property
    def _module(self) -> Any:
        with self._with_user_errors():
            module: Any = narrow_module(self.config).requires_grad_(True)
        module.get_input_embeddings().padding_idx = None  # as in `module_of`
        return module.to(device.current_device())

    @cached_property
    def _score(self) -> Tensor:
        hidden = self.config.get_text_config().hidden_size
        values = torch.randn(1, hidden, generator=torch.Generator().manual_seed(SEED)) / hidden**0.5
        return values.to(device.current_device()).requires_grad_()


@contextmanager
def recorded(module: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Context manager that appends the outputs of all parts of a module, tokens first."""

    def hook(name: str) -> Callable[..., None]:
        def record(part: nn.Module, inputs: Any, output: Any) -> None:
            values = next(iter(output.values()), None) if isinstance(output, Mapping) else output
            values = next(iter(values), None) if isinstance(values, tuple | list) else values
            if isinstance(values, Tensor) and values.dim() > 1:
                seen.setdefault(name, []).append(
                    values.detach().flatten(0, 1) if values.shape[0] == 1 else values.detach()
                )

        return record

    hooks = [part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def joined(seen: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Returns the outputs of all calls, one after another, of the parts of which they fit together."""
    return {
        name: torch.cat(list(values))
        for name, values in seen.items()
        if len({(tuple(each.shape[1:]), type(each)) for each in values}) == 1
    }


@contextmanager
def _as_user_error(what: str) -> Iterator[None]:
    """Turns exceptions of a family's own code into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: it is the code of any family
        raise UserError(
            f"{what} does not run in transformers ({one_line(error)}). Use shorter rows, or another model."
        ) from error
