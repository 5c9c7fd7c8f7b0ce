"""Choice of the log-probs that the policy is compared with in its update, which are from before the update.

recompute    a forward pass of the actor over the batch
rollout      as the engine reported them when it sampled: saves the pass; the ratio of new to old probability then
             contains the difference between engine and trainer, and the versions of a sample's weights
skip         from the update itself, without their gradient: saves the pass; the same result where a batch is used
for
             one optimizer step, since the policy has not changed yet
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo


def _fits(choice: str, info: ValidationInfo) -> str:
    """Checks the choice against the fields of the recipe, all of which come before it: pydantic validates in order."""
    values: dict[str, Any] = info.data
    if choice != "recompute" and "off_policy" in values and values["off_policy"].enabled:
        raise ValueError("off_policy compares the actor's log-probs with the rollout's. Write recompute")
    if choice != "skip":
        return choice
    if values.get("num_minibatches", 1) * values.get("num_epochs", 1) > 1:
        raise ValueError(
            "skip is for one optimizer step of a batch: num_minibatches and num_epochs must be 1. Write recompute"
        )
    if "kl" in values and values["kl"].in_reward:
        raise ValueError("kl.placement=reward needs log-probs before the update. Write recompute or rollout")
    return choice


# The default of a recipe may not fit keys that are written.
CHECKED = Field(validate_default=True)
OldLogprobs = Annotated[Literal["recompute", "rollout", "skip"], CHECKED, AfterValidator(_fits)]
"""Choice of a recipe that reads old log-probs in its loss only; its last field."""
OldLogprobsInUse = Annotated[Literal["recompute", "rollout"], CHECKED, AfterValidator(_fits)]
"""Choice of a recipe that reads old log-probs before the update too; its last field."""
