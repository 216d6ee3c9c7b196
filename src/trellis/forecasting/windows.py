"""The field's protocol for long horizons: splits, scaling, windows, and the error of forecasts.

A file of the protocol has a date in its first column and a channel in each of the others. Of N
rows, the first are for training, then come validation and test:

    ETTh*        8640, 2880 and 2880 rows; the rest of the file is not used
    ETTm*        four times as many
    other files  int(0.7 N) for training, int(0.2 N) at the end for the test, the rest between

Every channel is scaled by the mean and the standard deviation of its training rows. A window is a
lookback and the horizon after it. Windows start at every row; the first target of the validation
and of the test is the first row of that part, so their first lookback lies in the part before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks

PARTS = ("train", "validation", "test")
#: A cell so many interquartile ranges away from the median of its channel is far from the others.
#: It is taken for a glitch, which does not count in the usual course of a cycle, unless its place
#: in the cycle is that far from the others in most cycles.
GLITCH = 50.0
#: How strongly a window's swing is drawn to zero, as a share of what a whole cycle tells of it.
SHRINK = 0.1
SPLITS = ("auto", "etth", "ettm", "ratio")
_ETTH = (8640, 2880, 2880)


class Scaler(NamedTuple):
    """The mean and the population standard deviation of every channel, and how a cycle runs.

    A channel that is constant has the scale 1, so that it becomes zeros instead of NaN.
    cycle: [W, C], how far the mean of the first, second, ... row of all cycles, such as the hours
    of a day, is from the mean of all rows, apart from a linear trend. It is subtracted from the
    rows before they are scaled, and added to their forecasts, so a forecaster learns what differs
    from the usual day.
    """

    mean: np.ndarray
    scale: np.ndarray
    cycle: np.ndarray | None = None

    @classmethod
    def of(cls, values: np.ndarray, season: int | None = None, first: int = 0) -> Scaler:
        """The scaler of rows [N, C].

        season: the rows of a cycle; None: rows have none. first: the place of the first row in its
        cycle, or any number that has this remainder.

        Raises ValueError if there are fewer than two cycles, or at numbers whose squares fp64
        cannot hold.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            mean, scale = values.mean(0), values.std(0)
        if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
            raise ValueError("numbers beyond 1e150 are too large to be scaled")
        # The deviation of equal numbers is not zero after rounding, but tiny beside them.
        constant = scale <= 1e-9 * np.maximum(np.abs(mean), 1e-300)
        cycle = None if season is None else cls._cycle_of(values - mean, season, first)
        return cls(mean, np.where(constant, 1.0, scale), cycle)

    @staticmethod
    def _cycle_of(values: np.ndarray, season: int, first: int) -> np.ndarray:
        checks.at_least("season", season, 2)
        if len(values) < 2 * season:
            raise ValueError(
                f"a season of {season} rows needs at least two of them; there are {len(values)} "
                "rows to learn it from"
            )
        place = (first + np.arange(len(values))) % season

        def by_place(rows: np.ndarray) -> np.ndarray:
            """The mean [season, C] of rows [N, C] at every place of the cycle, without NaN."""
            before = first % season
            cycles = -(-(before + len(rows)) // season)
            full = np.full((cycles * season, rows.shape[1]), math.nan)
            full[before : before + len(rows)] = rows
            return np.nanmean(full.reshape(cycles, season, -1), 0)

        far = far_cells(values)
        # What comes at most cycles, such as a peak every night, is no glitch.
        usual = by_place(far.astype(float)) > 0.5
        values = np.where(far & ~usual[place], math.nan, values)
        # Least squares with a number for every place and one line: without the line, a trend would
        # look like a sawtooth in every cycle.
        time = np.where(np.isnan(values), math.nan, np.arange(len(values))[:, None])
        time = time - np.nanmean(time, 0)
        level, when = by_place(values), by_place(time)
        apart, moved = time - when[place], values - level[place]
        slope = np.nansum(apart * moved, 0) / np.maximum(np.nansum(np.square(apart), 0), 1e-12)
        cycle = level - when * slope
        return cycle - cycle.mean(0)

    def apply(self, values: np.ndarray, first: int = 0) -> np.ndarray:
        """Rows [N, C] in the file's units, scaled. first: the place of the first in its cycle."""
        return (values - self.mean - self.usual(values, first)) / self.scale

    def scaled(self, values: np.ndarray, first: int = 0) -> np.ndarray:
        """The same in fp32; a number that is far too large for its channel becomes infinite."""
        with np.errstate(over="ignore"):
            return self.apply(values, first).astype(np.float32)

    def undo(self, values: np.ndarray, first: int = 0) -> np.ndarray:
        """From scaled rows [N, ..., C] back to the file's units."""
        return values * self.scale + self.mean + self.usual(values, first)

    def usual(self, values: np.ndarray, first: int = 0) -> np.ndarray | float:
        """What the cycle has at the rows [N, ..., C] of `values`, in the file's units."""
        if self.cycle is None:
            return 0.0
        found = self.cycle[(first + np.arange(len(values))) % len(self.cycle)]
        return found.reshape(len(values), *(1,) * (values.ndim - 2), -1)


def far_cells(values: np.ndarray) -> np.ndarray:
    """Where rows [N, C] are far from the others of their channel, by GLITCH; NaN is not.

    Nothing is far in a channel of which half is one number, such as the rain of a dry year.
    """
    low, middle, high = np.nanquantile(values, [0.25, 0.5, 0.75], axis=0)
    return np.abs(values - middle) > GLITCH * np.where(high > low, high - low, np.inf)


def swing(rows: Tensor, usual: Tensor, whole: Tensor) -> Tensor:
    """How much more of the usual course than once the rows of each window have: [B, 1, C].

    On a dull day, when little of the usual happens, the swing is near -1; on a day like the mean of
    all days it is 0. It is a least-squares fit that is drawn to zero, most where a window shows
    little of the cycle, and kept between -1 (nothing of the usual course) and 1/2 (half as much
    again: what is far larger has other causes than the cycle).

    rows: [B, L, C] without the usual course. usual: [B, L, C], that course, in the same scale.
    whole: [B, 1, C], its mean square over a whole cycle.
    """
    course = usual - usual.mean(1, keepdim=True)
    shared = (rows * course).sum(1, keepdim=True)
    weight = course.square().sum(1, keepdim=True) + SHRINK * rows.shape[1] * whole
    return (shared / weight.clamp(min=1e-12)).clamp(-1.0, 0.5)


class Course(NamedTuple):
    """The usual course of a cycle beside the scaled rows [N, C] that it was subtracted from.

    rows: [N, C], what was subtracted. whole: [N, C], the mean square over a whole cycle.
    """

    rows: Tensor
    whole: Tensor

    @classmethod
    def of(cls, scaler: Scaler, values: np.ndarray, first: int = 0) -> Course:
        """That of a scaler with a cycle, for rows [N, C] of which the first has this place."""
        assert scaler.cycle is not None
        rows = scaler.usual(values, first) / scaler.scale
        whole = np.square(scaler.cycle / scaler.scale).mean(0)
        both = (rows, np.broadcast_to(whole, rows.shape))
        return cls(*(torch.from_numpy(part.astype(np.float32)) for part in both))

    @classmethod
    def joined(cls, parts: Sequence[Course]) -> Course:
        return cls(*(torch.cat(part) for part in zip(*parts)))


def split_of(file: str | Path, split: str = "auto") -> str:
    """ "etth", "ettm" or "ratio": `split`, or, where it is "auto", by the name of the file."""
    checks.choice("split", split, SPLITS)
    if split != "auto":
        return split
    name = Path(file).name.lower()
    return next((kind for kind in ("etth", "ettm") if name.startswith(kind)), "ratio")


def bounds_of(rows: int, split: str) -> tuple[int, int, int]:
    """Where the training, the validation and the test part of a file of `rows` rows end."""
    if split == "ratio":
        train, test = int(0.7 * rows), int(0.2 * rows)
        return train, rows - test, rows
    factor = 4 if split == "ettm" else 1
    train, validation, test = (factor * part for part in _ETTH)
    ends = train, train + validation, train + validation + test
    if rows < ends[2]:
        raise ValueError(f"the split {split!r} needs {ends[2]} rows; the file has {rows}")
    return ends


class Windows:
    """The windows of some stretches of scaled rows: window i is a lookback and its horizon."""

    def __init__(
        self,
        values: Tensor,
        spans: Sequence[tuple[int, int]],
        lookback: int,
        horizon: int,
        course: Course | None = None,
    ):
        """values: rows [N, C]. spans: the first row of each stretch, and the row after its last.

        No window reaches from one stretch into another: they may be different series.
        course: the usual course of a cycle that was subtracted from the rows, once. So much more of
        it as a window's `swing` says is subtracted by `take`, from lookback and target alike. A
        forecaster with the running normaliser reads `values` instead.
        """
        self.values, self.spans, self.course = values, list(spans), course
        self.lookback, self.horizon = lookback, horizon
        length = lookback + horizon
        self.starts = torch.cat(
            [torch.arange(begin, max(begin, end - length + 1)) for begin, end in self.spans]
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def channels(self) -> int:
        return self.values.shape[1]

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(lookbacks [B, L, C], targets [B, H, C]) of the windows with these numbers [B]."""
        rows = self._rows(index)
        both = self.values[rows]
        if self.course is not None:
            both = both - self._swing(rows) * self.course.rows[rows]
        return both[:, : self.lookback], both[:, self.lookback :]

    def subtracted(self, index: Tensor) -> Tensor:
        """The usual course that `take` leaves out of these windows, [B, L + H, C].

        Added to what `take` returns it gives the scaled rows.
        """
        rows = self._rows(index)
        if self.course is None:
            return torch.zeros_like(self.values[rows])
        return (1 + self._swing(rows)) * self.course.rows[rows]

    def _rows(self, index: Tensor) -> Tensor:
        return self.starts[index, None] + torch.arange(self.lookback + self.horizon)

    def _swing(self, rows: Tensor) -> Tensor:
        """The swing [B, 1, C] of the windows that have these rows [B, L + H]."""
        assert self.course is not None
        past = rows[:, : self.lookback]
        whole = self.course.whole[past[:, :1]]
        return swing(self.values[past], self.course.rows[past], whole)

    def batches(self, size: int, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """All windows in their order, `size` at a time; the last batch may be smaller.

        most: takes only so many windows, spread evenly.
        """
        for index in evenly(len(self), most).split(size):
            yield self.take(index)


def evenly(count: int, most: int | None) -> Tensor:
    """The numbers from 0 to count - 1, or `most` of them, spread evenly."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most).round().long()


class Benchmark:
    """A file by the protocol: rows scaled by the training part, and windows of every part."""

    def __init__(self, values: np.ndarray, split: str, season: int | None = None):
        """values: rows [N, C] in the file's units. split: "etth", "ettm" or "ratio".

        season: the rows of a cycle, whose usual course over the training part is subtracted, as
        much of it as a window shows (`swing`). It is the same in forecast and truth, so errors are
        those of the scaled rows as without it.
        """
        self.split, self.season = split, season
        self.ends = bounds_of(len(values), split)
        self.scaler = Scaler.of(values[: self.ends[0]], season)
        scaled = self.scaler.apply(values[: self.ends[2]])
        self.values = torch.from_numpy(scaled.astype(np.float32))
        self.course = None if season is None else Course.of(self.scaler, scaled)

    def windows(self, part: str, lookback: int, horizon: int) -> Windows:
        """Raises ValueError if the part has no whole window."""
        checks.choice("part", part, PARTS)
        number = PARTS.index(part)
        begin = 0 if number == 0 else self.ends[number - 1]
        first = begin if number == 0 else begin - lookback
        spans = [(first, self.ends[number])]
        windows = Windows(self.values, spans, lookback, horizon, self.course)
        if first < 0 or not len(windows):
            raise ValueError(
                f"no window of {lookback} + {horizon} rows fits the {part} part, which has "
                f"{self.ends[number] - begin} rows"
            )
        return windows


class Errors(NamedTuple):
    """Means over windows x horizon x channels: of the squared and the absolute error, and of the
    pinball loss of quantiles, which is None for forecasts of a single number."""

    mse: float
    mae: float
    pinball: float | None = None

    @property
    def score(self) -> float:
        """What a forecaster is chosen by: the pinball loss of quantiles, else the squared error."""
        return self.mse if self.pinball is None else self.pinball

    def __str__(self) -> str:
        quantiles = "" if self.pinball is None else f"  pinball loss {self.pinball:.4f}"
        return f"MSE {self.mse:.4f}  MAE {self.mae:.4f}{quantiles}"


class ErrorSums:
    """Errors that are summed up batch by batch."""

    def __init__(self, levels: tuple[float, ...] = ()):
        """levels: those of the quantiles that are forecast, with 0.5 among them; empty for points.
        The errors are then those of the median."""
        self.levels = levels
        self.squared = self.absolute = self.pinball = 0.0
        self.count = 0

    def add(self, out: Tensor, target: Tensor) -> None:
        """Adds forecasts of targets [...]: points [...], or quantiles [..., Q]."""
        if self.levels:
            self.pinball += float(pinball(out.double(), target, self.levels)) * target.numel()
            out = out[..., self.levels.index(0.5)]
        difference = (out - target).double()
        self.squared += float(difference.square().sum())
        self.absolute += float(difference.abs().sum())
        self.count += target.numel()

    def errors(self) -> Errors:
        quantiles = self.pinball / self.count if self.levels else None
        return Errors(self.squared / self.count, self.absolute / self.count, quantiles)


def pinball(out: Tensor, target: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Twice the mean pinball loss of quantiles [..., Q]; for the median it is the MAE."""
    level = out.new_tensor(levels)
    short = target[..., None] - out
    return 2 * torch.maximum(level * short, (level - 1) * short).mean()


def errors(
    forecast: Callable[[Tensor], Tensor],
    windows: Windows,
    size: int = 256,
    most: int | None = None,
    levels: tuple[float, ...] = (),
) -> Errors:
    """The errors of `forecast`, a map from lookbacks [B, L, C] to points [B, H, C], or to the
    quantiles [B, H, C, Q] at the levels.

    size: windows at a time. most: so many windows, spread evenly; None takes all.
    """
    sums = ErrorSums(levels)
    for lookback, target in windows.batches(size, most):
        sums.add(forecast(lookback), target)
    return sums.errors()
