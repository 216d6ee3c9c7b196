"""Two forecasts that every model is measured beside: repeat the last row, and NLinear.

NLinear subtracts the last row of a lookback, maps what is left to the horizon by one linear map
with a bias that all channels share, and adds the last row again. Its weights have a closed form,
ridge regression over all windows of the training part, so it has no seed and no learning rate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .windows import Windows

#: The weight of the squared weights, for every number that is regressed on.
RIDGE = 1e-3
#: Numbers that are held in memory at once while windows are summed up.
_NUMBERS = 2**24


def repeat_last(horizon: int) -> Callable[[Tensor], Tensor]:
    """The forecast [B, H, C] that repeats the last row of a lookback [B, L, C]."""
    return lambda lookback: lookback[:, -1:].expand(-1, horizon, -1)


def nlinear(train: Windows, ridge: float = RIDGE) -> Callable[[Tensor], Tensor]:
    """NLinear fitted to all training windows, in fp64.

    ridge: is multiplied by the number of regressed rows and added to the diagonal of the normal
        equations, which are then solved.
    """
    lookback, horizon = train.lookback, train.horizon
    size = max(1, _NUMBERS // ((lookback + horizon) * train.channels))
    gram = torch.zeros(lookback + 1, lookback + 1, dtype=torch.float64)
    moment = torch.zeros(lookback + 1, horizon, dtype=torch.float64)
    rows = 0
    for past, target in train.batches(size):
        last = past[:, -1:]
        x = (past - last).transpose(1, 2).flatten(0, 1).double()
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        y = (target - last).transpose(1, 2).flatten(0, 1).double()
        gram += x.T @ x
        moment += x.T @ y
        rows += len(x)
    penalty = torch.full((lookback + 1,), ridge * rows, dtype=torch.float64)
    penalty[-1] = 0  # the bias; the last row minus itself is always zero, so the rest is not
    weights = torch.linalg.solve(gram + penalty.diag(), moment)

    def forecast(past: Tensor) -> Tensor:
        last = past[:, -1:]
        x = (past - last).transpose(1, 2).double()
        mapped = x @ weights[:-1] + weights[-1]
        return mapped.transpose(1, 2).to(past.dtype) + last

    return forecast
