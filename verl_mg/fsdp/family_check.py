"""Proof that a family of `transformers` is computed right: nothing is believed because of a name.

shrunk copy, float32    rows packed, else one call for each: log-probs and gradients of all parameters equal the
                        family's eager attention over each row; then tp and cp ranks equal one rank
real module, its type   rows a b a packed, where b begins as a: both a have the same log-probs, b has them until it
                        differs, and so has a single row a; every layer's attention has read where the rows begin
"""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_gather_json, raised_together
from verl_mg.errors import UserError, one_line
from verl_mg.fsdp.family_reference import SEED, TOLERANCE, Computed, FamilyReference, joined, recorded
from verl_mg.fsdp.mesh import MeshGroups, TensorRanks
from verl_mg.fsdp.model import (
    ATTENTION,
    PackedModule,
    fit_expert_kernels,
    local_part,
    logit_scale_of,
    module_of,
    parameter_splits,
    shard_tensors,
)
from verl_mg.fsdp.packed_rows import RowsReader
from verl_mg.fsdp.replay_check import check_replay
from verl_mg.fsdp.shard_map import ParameterSplit
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import other_choice
from verl_mg.models.shrunk_config import ORDINARY_TOKENS
from verl_mg.sharding.model_table import Head
from verl_mg.sharding.module_table import ModuleTable
from verl_mg.training.logprobs import LOGPROBS
from verl_mg.training.microbatch import TokenShard
from verl_mg.training.model_spec import ModelSpec

GRADIENT_TOLERANCE, SMALL = 1e-4, 1e-6
"""Factors of the largest element of a parameter's gradient, and of all gradients."""
FORM = "form.json"  # file of the result of processes
PROBED, PROBED_ROWS = 21, 4  # tokens of each of the rows that the real module is given, and their number
MEAN_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Factors of the mean of the real module's outputs, for their mean difference, by the type in which it computes."""

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Form(NamedTuple):
    """Form in which a module computes rows."""

    is_packed: bool  # whether all rows of a micro-batch are in one call of the module; otherwise each is in another
    reason: str = ""  # why they are not packed
    # Parameters through which no gradient passes, such as those that choose keys; layers' numbers are `*`.
    idle: Sequence[str] = ()

    @property
    def chosen(self) -> str:
        """Returns what the start of a job says."""
        return "packed" if self.is_packed else f"each by itself, since packed: {self.reason}"

    def check(self, layout: Layout, where: str) -> None:
        """Checks that a layout has it: ranks divide the tokens of packed rows only."""
        if layout.cp > 1 and not self.is_packed:
            raise UserError(
                f"layout {layout}: no cp with rows that are computed each by itself, of {where} ({self.reason}). "
                "Leave out cp."
            )


def needs_proof(table: ModuleTable) -> bool:
    """Returns whether a family has to be checked: it has no table, or layers with a state or selected keys."""
    known = table.builtin
    return known is None or known.config.linear is not None or known.config.indexer is not None


def form_of(table: ModuleTable, longest_row: int) -> Form:
    """Returns the form in which one rank computes rows of a model; UserError if none is right."""
    return FamilyCheck(table.model_dir, table.head, longest_row).form() if needs_proof(table) else Form(is_packed=True)


@torch.no_grad()
def check_module(packed: PackedModule, reader: RowsReader, shard: TokenShard, dtype: torch.dtype, where: str) -> None:
    """Checks the real module by two short passes; all ranks of the placement call it together."""
    generator = torch.Generator().manual_seed(SEED)
    vocab = packed.module.config.get_text_config().vocab_size
    tokens = torch.arange(*ORDINARY_TOKENS) % vocab
    if reader.packer:
        tokens = tokens[~reader.packer.of_images(tokens)]
    row, other = tokens[torch.randint(len(tokens), (2, PROBED), generator=generator)]
    begun = torch.cat([row[: PROBED // 2], other[PROBED // 2 :]])
    outputs = []
    for tokens in (torch.cat([row, begun, row]), row):  # PROBED_ROWS
        rows = Batch(torch.full((len(tokens) // PROBED,), PROBED), {"tokens": tokens})
        rows["loss_mask"] = torch.ones(len(tokens), dtype=torch.bool)
        try:
            micro = reader.micro_batch(rows, shard, device.current_device(), len(rows))
            outputs += packed(micro, 1.0, LOGPROBS)[0].unflatten(0, (len(rows), -1))
        except Exception as failure:  # of any kind: it is the code of any family, and of its processor of images
            raise UserError(f"{where}: its module does not run ({one_line(failure)}). Use another model.") from failure
        attended = micro.packed.attended
        kinds = tuple({type(part) for part in attended})
        missed = [n for n, p in packed.module.named_modules() if isinstance(p, kinds) and p not in attended]
        if missed:
            raise UserError(f"{where}: {missed[0]} does not read where rows begin. Use another model.")
    first, prefix, second, alone = outputs
    same = PROBED // 2 - 1
    for values, wanted, what in (
        (second, first, "differ when it is computed again"),
        (alone, first, "depend on the rows after it"),
        (prefix[:same], first[:same], "depend on later tokens, or on other rows"),
    ):
        error = float((values - wanted).abs().mean())
        if not error <= MEAN_TOLERANCES[dtype] * max(1.0, float(wanted.abs().mean())):
            raise UserError(
                f"{where}: the outputs of a row {what}, by {error:.2g} on average. A narrow copy of it is right: look "
                "for a library of kernels that is installed, or use another model."
            )


class DifferenceError(Exception):
    """Difference between a module and what its family defines; the message says where it is and how large."""


class FamilyChecks:
    """Checks of the families of a job's roles, each made once."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Path, Head, Placement], Form] = {}
        self._replays: set[Path] = set()

    def form(self, spec: ModelSpec, groups: MeshGroups) -> Form:
        """Returns the form in which the ranks of a placement compute rows; all ranks of the job call it together.

        UserError on all of them where the ranks do not compute what the family defines.
        """
        key = spec.path, spec.head, groups.placement
        if key not in self._forms:
            form = self._forms[key] = self.check(spec, groups)
            if not form.is_packed and dist.get_rank() == 0:
                slow = f"a call for each row, slow for short ones. {other_choice(spec.path)}"
                log.warning("%s: rows are computed %s; %s", spec.path / "config.json", form.chosen, slow)
        return self._forms[key]

    def check_replay(self, spec: ModelSpec, groups: MeshGroups) -> None:
        """Checks that a family replays prescribed experts; all ranks of the job call it together, as `form`."""
        with raised_together(UserError):
            if spec.path not in self._replays:
                self._replays.add(spec.path)
                if groups.is_member:
                    check_replay(FamilyReference(spec.path, spec.head, spec.longest_row))

    def check(self, spec: ModelSpec, groups: MeshGroups) -> Form:
        """Does the same as `form`, without its memory and its warning."""
        here, check = None, None
        with raised_together(UserError):
            if groups.is_member:
                ranks = groups.layout.tp * groups.layout.cp
                check = FamilyCheck(spec.path, spec.head, spec.longest_row, ranks)
                here = check.form()
        # Packed only where it is right on all ranks, which may have different devices: they divide rows in one form.
        form = min((Form(*each) for each in all_gather_json(here) if each), key=lambda each: each.is_packed)
        with raised_together(UserError):
            if check:
                check.check_ranks(form, groups)
        return form


def form_on_ranks(model_dir: Path, head: Head, longest_row: int, layout: Layout) -> Form:
    """Returns the form of a model under a layout, on as many new processes as this has ranks; UserError as in a job."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = Path(folder), ModelSpec(model_dir, torch.float32, head, longest_row=longest_row), layout
        multiprocessing.spawn(_check_rank, arguments, nprocs=layout.ranks)
        form, error = json.loads((Path(folder) / FORM).read_bytes())
    if error:
        raise UserError(error)
    return Form(*form)


def _check_rank(rank: int, folder: Path, spec: ModelSpec, layout: Layout) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), layout.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks)
    try:
        result = FamilyChecks().check(spec, MeshGroups(Placement.on(layout, layout.ranks))), ""
    except UserError as error:
        result = None, str(error)  # type: ignore[assignment]
    if rank == 0:
        (folder / FORM).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class FamilyCheck:
    """Check of a shrunk copy of the model of a directory, of which only config.json is read.

    `divisor`, the ranks of tensor and context parallelism, divides the heads of the copy.
    """

    def __init__(self, model_dir: Path, head: Head, longest_row: int, divisor: int = 1) -> None:
        self._dir, self._head = model_dir, head
        self._reference = FamilyReference(model_dir, head, longest_row, divisor)

    def form(self) -> Form:
        """Returns the form in which one rank computes rows as the family defines them; UserError if none does."""
        self._reference.check()
        reasons: list[str] = []
        for is_packed in (True, False):
            try:
                self._compare(is_packed, None)
                return Form(is_packed, "; ".join(reasons), self._reference.idle)
            except DifferenceError as difference:
                reasons.append(str(difference))
        raise UserError(
            f"{self._reference.where}: rows are computed as the family defines them neither packed ({reasons[0]}) nor "
            f"each by itself ({reasons[1]}). Use shorter rows, if it is right for them. {other_choice(self._dir)}"
        )

    def check_ranks(self, form: Form, groups: MeshGroups) -> None:
        """Checks that ranks of tp and cp compute what one rank does; all ranks of the placement call it together."""
        layout, where = groups.layout, self._reference.where
        shared = [(name, size) for name, size in (("tp", layout.tp), ("cp", layout.cp)) if size > 1]
        if not shared:
            return
        form.check(layout, where)
        try:
            self._compare(form.is_packed, groups)
        except DifferenceError as difference:
            sizes, names = (" and ".join(parts) for parts in ([f"{n}{s}" for n, s in shared], [n for n, _ in shared]))
            raise UserError(
                f"layout {layout}: {sizes} does not compute {where} as one rank does ({difference}). Leave out {names}."
            ) from None

    def _compare(self, is_packed: bool, groups: MeshGroups | None) -> None:
        """Compares a module, on one rank or divided, with the reference; `DifferenceError` if it differs, or fails."""
        ranks = groups.tensor_ranks if groups else TensorRanks()
        shard = groups.token_shard(groups.layout.cp) if groups else TokenShard(1, 1)
        packed, splits, summed = _on_all_ranks(groups, lambda: self._built(is_packed, groups, ranks))
        computed = _on_all_ranks(groups, lambda: self._computed(packed, is_packed, shard))
        for name, gradient in computed.gradients.items():
            if name in summed:
                dist.all_reduce(gradient, group=ranks.group)
            if shard.group is not None:
                dist.all_reduce(gradient, group=shard.group)
        self._check_equal(computed, splits, ranks)

    def _built(
        self, is_packed: bool, groups: MeshGroups | None, ranks: TensorRanks
    ) -> tuple[PackedModule, dict[str, ParameterSplit], frozenset[str]]:
        """Returns this rank's module, how it is divided, and the parameters whose gradients tensor ranks sum."""
        try:
            module = module_of(copy.deepcopy(self._reference.config), self._dir, self._head, torch.float32, is_packed)
        except UserError as error:  # some families build only the attention that they know
            cause = error.__cause__ or error
            is_replaced = not (isinstance(cause, KeyError) and ATTENTION in cause.args)
            what = (
                f"it does not build: {one_line(cause)}" if is_replaced else "transformers cannot replace its attention"
            )
            raise DifferenceError(what) from error
        scale = logit_scale_of(module, self._head, self._dir)
        summed = shard_tensors(module, groups.tensor_mesh if groups else None, self._reference.where)
        splits = parameter_splits(module, 1)
        _load(module, self._reference.weights, splits, ranks)
        fit_expert_kernels(module)
        return PackedModule(module, scale, ranks), splits, summed

    def _computed(self, packed: PackedModule, is_packed: bool, shard: TokenShard) -> Computed:
        place, reader = device.current_device(), RowsReader(1, is_packed)
        outputs: list[Tensor] = []
        hidden: dict[str, list[Tensor]] = {}
        for rows in self._reference.micro_batches:
            micro = reader.micro_batch(rows, shard, place, len(rows))
            with recorded(packed.module, hidden):
                output = packed(micro, 1.0, LOGPROBS)[0]
            (output * rows["weights"][micro.token_index].to(place)).sum().backward()
            outputs.append(output.detach())
        named = packed.module.named_parameters()
        gradients = {name: local_part(p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in named}
        return Computed(torch.cat(outputs), gradients, joined(hidden))

    def _check_equal(self, computed: Computed, splits: Mapping[str, ParameterSplit], ranks: TensorRanks) -> None:
        expected = self._reference.computed
        error = _largest(computed.outputs - expected.outputs)
        if not error <= TOLERANCE * max(1.0, _largest(expected.outputs)):  # NaN is an error too
            raise DifferenceError(f"{_first_difference(computed, expected)} differs, outputs by {error:.2g} nats")
        smallest = SMALL * max(map(_largest, expected.gradients.values()))
        for name, gradient in computed.gradients.items():
            whole = expected.gradients.get(name)
            wanted = torch.zeros_like(gradient) if whole is None else splits[name].part(whole, ranks.index, ranks.count)
            error, size = (
                float(values.abs().max()) if values.numel() else 0.0 for values in (gradient - wanted, wanted)
            )
            if not error <= GRADIENT_TOLERANCE * size + smallest:
                raise DifferenceError(f"the gradient of {name} differs by {error:.2g} of at most {size:.2g}")


def _on_all_ranks(groups: MeshGroups | None, step: Callable[[], Result]) -> Result:
    """Returns the result of a step; an error on one rank of a placement is raised on all, which would wait for it."""
    together = raised_together(UserError, DifferenceError, group=groups.host_group) if groups else nullcontext()
    with together:
        try:
            return step()
        except (UserError, DifferenceError):
            raise
        except Exception as failure:  # of any kind: it is the code of any family
            raise DifferenceError(one_line(failure)) from failure


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _load(module: Any, weights: Mapping[str, Tensor], splits: Mapping[str, ParameterSplit], ranks: TensorRanks) -> None:
    """Gives a module without memory this rank's part of weights."""
    place, made = device.current_device(), {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in made:  # a tied parameter stays one
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=place), parameter.requires_grad)
                part._parameters[name] = made[parameter]
    with torch.no_grad():
        kept = module.state_dict(keep_vars=True)
        for name, tensor in [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if n in kept)]:
            local_part(tensor).copy_(splits[name].part(weights[name], ranks.index, ranks.count))


def _first_difference(computed: Computed, expected: Computed) -> str:
    """Returns the name of the first part of a module whose output differs."""
    for name, values in computed.hidden.items():
        wanted = expected.hidden.get(name)
        if wanted is None or wanted.shape != values.shape or isinstance(values, DTensor):
            continue
        if not (values - wanted).abs().max() <= 10 * TOLERANCE * wanted.abs().max().clamp(min=1.0):
            return name
    return "the output layer"
