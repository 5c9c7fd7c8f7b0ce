"""Changes of a response's score before an advantage is estimated from it."""

from torch import Tensor

from verl_mg.errors import UserError


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns (n,) float32 penalty of long responses, from -1 to 0: DAPO, arXiv:2503.14476, equation 13.

    0 up to max_length - buffer tokens, from there falling in a line to -1 at max_length, and -1 above.

    Args:
        lengths: (n,) tokens of the responses.
        max_length: tokens; 20480 in the paper.
        buffer: tokens, from 1 to max_length; 4096 in the paper.
    """
    if not 1 <= buffer <= max_length:
        raise UserError(f"the overlong buffer is {buffer} tokens of {max_length}. Write 1 to {max_length}")
    return ((max_length - buffer - lengths).double() / buffer).clamp(-1, 0).float()
