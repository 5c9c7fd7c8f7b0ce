"""Rows with and without images: of a tiny model by `transformers` row by row, and by the FSDP backend packed."""

from functools import cache

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers.tiny_models import noise_image, vision_model
from tests.megatron.training import OPTIMIZER, TEMPERATURE, parts_of
from verl_mg.batch import Batch
from verl_mg.config import FsdpConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model import local_part
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import Layout, Placement
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.trainer import MiniBatch, Objective

FIRST, SECOND, THIRD = noise_image(24, 16, 0), noise_image(9, 33, 1), noise_image(40, 40, 2)
IMAGES = [(FIRST, SECOND), (), (THIRD,), (), (THIRD,), (), (SECOND, THIRD)]
"""Images of each row. With two data-parallel ranks, the second one has rows without images only. Rows of a micro-batch
have the same prompt, or an image in common."""


@cache
def rows_of(architecture):
    """Prompts with the model's own processor, and random responses."""
    processor = AutoProcessor.from_pretrained(vision_model(architecture))
    generator, rows, lengths = torch.Generator().manual_seed(0), [], []
    for number, images in enumerate(IMAGES):
        marker = processor.image_token if "qwen" in architecture else processor.boi_token
        text = "a" + f"{marker}b" * len(images) + "c"
        inputs = processor(text=[text], images=[[i.pixels() for i in images]] if images else None, return_tensors="pt")
        response = torch.randint(1, 20, (4 + number,), generator=generator)
        rows.append(torch.cat([inputs["input_ids"][0], response]))
        lengths.append((len(rows[-1]) - len(response), len(rows[-1])))
    batch = Batch(torch.tensor([total for _, total in lengths]), {"tokens": torch.cat(rows)})
    starts = batch.expand_to_tokens(torch.tensor([prompt for prompt, _ in lengths]))
    batch["loss_mask"] = batch.positions >= starts
    batch["advantages"] = torch.randn(batch.total_tokens, generator=generator)
    batch.images = IMAGES
    return batch


def in_plain_torch(architecture, frozen):
    """(log-probs of each row, gradients by the names of the checkpoint)."""
    folder = vision_model(architecture)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    processor, rows = AutoProcessor.from_pretrained(folder), rows_of(architecture)
    if frozen:
        tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
        tower.requires_grad_(False)
    outputs, losses = [], []
    for row, images in enumerate(IMAGES):
        tokens, mask = rows.row("tokens", row)[None], rows.row("loss_mask", row)
        inputs = dict(processor.image_processor([i.pixels() for i in images], return_tensors="pt")) if images else {}
        inputs = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        marks = torch.isin(tokens, torch.tensor(processor.image_token_ids)).int()
        if "gemma" in architecture:
            inputs["token_type_ids"] = marks
        elif images:
            inputs["mm_token_type_ids"] = marks
        model.model.rope_deltas = None
        log_p = (model(input_ids=tokens, **inputs).logits[0] / TEMPERATURE).log_softmax(-1)[:-1]
        scored = log_p.gather(1, tokens[0, 1:, None]).squeeze(1)[mask[1:]]
        outputs.append(scored.detach())
        losses.append(-(scored * rows.row("advantages", row)[mask]).sum())
    (torch.stack(losses).sum() / rows["loss_mask"].sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs, gradients | dict(of_each_expert(gradients))


def of_each_expert(gradients):
    """Checkpoints of some mixtures have a tensor for each expert, where the module has one for all."""
    for name, stacked in gradients.items():
        prefix, _, kind = name.rpartition(".experts.")
        for number, gradient in enumerate(stacked) if prefix else ():
            parts = gradient.chunk(2) if kind == "gate_up_proj" else (gradient,)
            for part, values in zip(("gate_proj", "up_proj") if len(parts) == 2 else (kind,), parts, strict=True):
                yield f"{prefix}.experts.{number}.{part}.weight", values


def on_ranks(folder, layout, rows, frozen, dtype=torch.float32):
    """(log-probs by row, gradients, names of frozen tensors)."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    options = FsdpConfig(freeze_vision_tower=frozen)
    runner = FsdpRunner(ModelSpec(folder, dtype, fsdp=options), groups)
    share = list(range(groups.coordinates.dp, len(rows), groups.layout.dp))
    micro_batches = [rows.select(share[:1]), rows.select(share[1:])]
    results = runner.infer(micro_batches, TEMPERATURE)
    found = {}
    for numbers, micro, result in zip((share[:1], share[1:]), micro_batches, results, strict=True):
        if result is not None:
            counts = micro["loss_mask"].split(micro.lengths.tolist())
            found |= dict(zip(numbers, result[1].split([int(count.sum()) for count in counts]), strict=True))
    trainer, gradients = FsdpTrainer(runner, OPTIMIZER), []
    step = trainer._step

    def seen():
        named = {n: local_part(trainer._with_gradient(p)) for n, p in trainer._parameters.items()}
        gradients.extend(parts_of(runner, named))
        return step()

    trainer._step = seen
    count = int(rows["loss_mask"].sum())
    trainer.update(MiniBatch(micro_batches, None, count, 0), Objective(policy_gradient, "token-mean", TEMPERATURE))
    return found, gradients


def policy_gradient(tokens):
    return -tokens.logprobs * tokens["advantages"], {}


def plain(name):
    """Checkpoints name the parts of a vision-language module in another order than the module does."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))
