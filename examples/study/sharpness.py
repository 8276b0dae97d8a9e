"""The sharpness of the loss around the logits of the last token, in closed form.

Keskar et al. (2017) measure how much a loss can rise in a box around a point; Lee et al., "To FP8 and Back Again"
(2024), take the logits of the last token for that point, since in a causal model it sees all others. They search the
box. No search is needed: the derivative of the cross-entropy is softmax(z)_j > 0 in every logit but the target's, and
softmax(z)_y - 1 < 0 in that one, everywhere. So the maximum is the corner where z_y is lowest and all others highest.
"""

import torch
from torch import Tensor

EPSILON = 5e-4


def sharpness(logits: Tensor, target: Tensor, epsilon: float = EPSILON) -> Tensor:
    """100 (max L(z + d) - L(z)) / (1 + L(z)) over the box |d_i| <= epsilon (|z_i| + 1); L is the cross-entropy.

    Args:
        logits: z, of shape [..., classes].
        target: y, the index of the class that is right, of shape [...].
        epsilon: half the relative width of the box.

    Returns:
        The sharpness of each, float64, of shape [...].
    """
    z = logits.double()
    reach = epsilon * (z.abs() + 1)
    y = target.unsqueeze(-1)
    worst = (z + reach).scatter(-1, y, (z - reach).gather(-1, y))
    loss = _cross_entropy(z, y)
    return 100 * (_cross_entropy(worst, y) - loss) / (1 + loss)


def _cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(z, -1) - z.gather(-1, y).squeeze(-1)
