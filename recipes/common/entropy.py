"""Entropy bonus, a term of the loss that keeps the policy exploring (arXiv:1602.01783, section 4)."""

from verl_mg.training.loss_inputs import LossInputs, LossOutput


def add_entropy_bonus(output: LossOutput, inputs: LossInputs, coefficient: float) -> LossOutput:
    """Returns the loss minus coefficient times the entropy of each token's distribution, in nats.

    It is added after off-policy weights, because it belongs to the distribution, not to the token that was drawn
    from it.

    Args:
        output: (tokens,) loss and its metrics.
        inputs: tokens of the micro-batch.
        coefficient: loss per nat; with 0 the output is returned as it is.
    """
    if coefficient == 0:
        return output
    loss, metrics = output
    return loss - coefficient * inputs.entropy, metrics
