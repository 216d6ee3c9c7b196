"""Training of a forecaster: random windows of the training part, early stopping on validation."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from .. import checks
from ..training.optimization import decayed_names
from .baselines import RIDGE
from .model import ForecastModel, Level, window_level
from .windows import Errors, ErrorSums, Windows, errors, evenly, pinball

LOSSES = ("mse", "mae", "huber")
#: The recipe of `trellis forecast fit` and of all tables of docs/forecasting.md, chosen on the
#: validation part of ETTh1; docs/lab-notebook.md has what was tried.
RECIPE_FIT = {
    "loss": "huber", "steps": 3000, "learning_rate": 1e-3, "check_every": 50, "patience": 10,
    "validation_windows": 600, "average": 0.99,
}  # fmt: skip
#: Weights of the squared difference of a channel's linear map from the one that all share, of which
#: the one that does best on validation is taken; at infinity the maps are equal.
APART = (0.1, 1.0, 10.0, 100.0, math.inf)
#: With the running normaliser, forecasts of one segment that the loss of a step counts.
PLACES = 8


@dataclass
class FitOptions:
    """How a forecaster is trained.

    steps: the most steps. batch: series of a step; a window of 7 channels is 7 series.
    learning_rate: the highest; it rises over the first `warmup` of the steps and falls to zero over
        all of them, as a half cosine. weight_decay: of AdamW.
    loss: of a model with one output; a model with quantiles takes the pinball loss.
    check_every: steps between looks at the validation error. patience: looks without a better one
        after which training ends. The weights of the best look are kept: the one with the lowest
        squared error or, for quantiles, the lowest pinball loss.
    validation_windows: windows of a look, spread evenly over the validation part, or forecasts of a
        stream; None takes all.
    context: with the running normaliser, the rows that a training segment has.
    clip: the largest norm of the gradient.
    average: the decay of a running mean of the weights: 0.99 for about the last 100 steps, or the
        last ninth of all steps if that is less. It is that mean which is looked at and kept; 0
        takes the weights as they are.
    solve: whether the model's linear map of the lookback starts as the least-squares solution over
        the training part, which has a closed form; the blocks then learn what it leaves.
    linear_rate: the learning rate of a map that was solved, as a multiple of `learning_rate`; 0
        leaves it as it is.
    seed: of the weights, the windows and the dropout.
    """

    steps: int = 1500
    batch: int = 448
    learning_rate: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    loss: str = "mse"
    check_every: int = 100
    patience: int = 5
    validation_windows: int | None = 1000
    context: int = 512
    clip: float = 1.0
    average: float = 0.99
    solve: bool = True
    linear_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "check_every", "patience", "context"):
            checks.at_least(name, getattr(self, name), 1)
        checks.at_least("seed", self.seed, 0)
        checks.at_least("validation_windows", self.validation_windows, 1, optional=True)
        checks.positive("learning_rate", self.learning_rate)
        checks.at_least("weight_decay", self.weight_decay, 0, whole=False)
        checks.at_least("linear_rate", self.linear_rate, 0, whole=False)
        checks.positive("clip", self.clip)
        checks.share("warmup", self.warmup)
        checks.share("average", self.average)
        checks.flag("solve", self.solve)
        checks.choice("loss", self.loss, LOSSES)


def recipe_model(lookback: int, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of ForecastConfig by the recipe, for a lookback of so many rows, but for those given.

    A patch is an eighth of the lookback, but at least 16 rows. A lookback is a few patches, so
    the memories of Trellis are small: 4 heads of 16 channels and 16 slots. Other mixers have their
    default sizes.
    given: fields that the user chose; those of mixer_config are chosen one by one. With
        normalizer="running" the recipe is that of streams: a half-life of 200 rows, and patches of
        8 rows, since a stream reads a patch when it is full.
    """
    fields = given.get("mixer_config", {})
    if not isinstance(fields, dict):
        raise ValueError(
            f"mixer_config must be a table of the mixer's fields, such as {{slots = 16}}; got "
            f"{fields!r}"
        )
    streaming = given.get("normalizer") == "running"
    patch = 8 if streaming else max(16, lookback // 8)
    stream = {"normalizer": "running", "half_life": 200.0} if streaming else {}
    mixer = {"shape": "model"} if given.get("mixer", "trellis") == "trellis" else {}
    return {
        "patch": min(lookback, patch), "dim": 64, "layers": 1, "heads": 4, "dropout": 0.3,
        "by_channel": True, **stream, **given,
        "mixer_config": {**mixer, **fields},
    }  # fmt: skip


class Look(NamedTuple):
    """One look at the validation part; the last three are those of Errors."""

    step: int
    loss: float | None  # of the training steps since the look before; None before the first
    mse: float
    mae: float
    pinball: float | None = None

    @property
    def errors(self) -> Errors:
        return Errors(self.mse, self.mae, self.pinball)


class Fit(NamedTuple):
    """What a training found.

    best: the look whose weights were kept. seconds: of the clock. cpu_seconds: of the processor, on
    all threads, in which other programs on the machine do not count.
    """

    best: Look
    looks: list[Look]
    seconds: float
    cpu_seconds: float


def fit(
    model: nn.Module,
    train: Windows,
    validation: Windows,
    options: FitOptions,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda steps: None,
) -> Fit:
    """Trains a model in place and leaves it with the weights that did best on validation.

    model: maps lookbacks [B, L, C] to forecasts [B, H, C, outputs], such as a ForecastModel.
    say: gets a line after every look at the validation part but the one before the first step.
    advance: gets 1 after every step.

    Raises ValueError if the loss is not finite, or if a part has no window.
    """
    start, worked = time.monotonic(), time.process_time()
    running = getattr(getattr(model, "config", None), "normalizer", "window") == "running"
    if running and options.context < model.config.patch:  # type: ignore
        raise ValueError(
            f"context must be at least a patch, {model.config.patch} rows; got "  # type: ignore
            f"{options.context}"
        )
    if not len(train) or not len(validation):
        raise ValueError(
            f"train and validation must have windows of {train.lookback} + {train.horizon} rows; "
            f"got {len(train)} and {len(validation)} windows"
        )
    draws = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)  # of the dropout
    model.eval()
    solved: set[str] = set()
    if options.solve and isinstance(model, ForecastModel) and model.linear is not None:
        solve_linear(model, train, lambda: validate(model, validation, options).score)
        solved = {f"linear.{name}" for name, _ in model.linear.named_parameters()}
        # A map that stays as it is has no gradient, which would count when gradients are clipped.
        model.linear.requires_grad_(options.linear_rate > 0)
    measure = loss_of(model, options.loss)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, solved, options),
        lr=options.learning_rate, weight_decay=options.weight_decay, betas=(0.9, 0.95),
    )  # fmt: skip
    mean = AveragedModel(model, multi_avg_fn=_running_mean(options.average)).eval()
    found = validate(model, validation, options)
    looks = [Look(0, None, *found)]
    best = looks[0]
    kept = copy.deepcopy(model.state_dict())
    total, since = 0.0, 0
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step - 1, options) * group["share"]
        model.train()
        if running:
            assert isinstance(model, ForecastModel)
            loss = _segment_loss(model, train, options, draws, measure)
        else:
            size = max(1, options.batch // train.channels)
            index = torch.randint(len(train), (size,), generator=draws)
            lookback, target = train.take(index)
            loss = measure(model(lookback), target)
        if not math.isfinite(float(loss.detach())):
            raise ValueError(
                f"the loss of step {step} is not finite; a smaller learning_rate than "
                f"{options.learning_rate:g} may help"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        mean.update_parameters(model)
        total, since = total + float(loss.detach()), since + 1
        advance(1)
        if step % options.check_every and step < options.steps:
            continue
        found = validate(mean.module, validation, options)
        look = Look(step, total / since, *found)
        looks.append(look)
        total, since = 0.0, 0
        say(
            f"step {step}/{options.steps}  loss {look.loss:.4f}  validation {look.errors}  "
            f"{time.monotonic() - start:.0f} s"
        )
        if look.errors.score < best.errors.score or math.isnan(best.errors.score):
            best, kept = look, copy.deepcopy(mean.module.state_dict())
        elif sum(later.step > best.step for later in looks) >= options.patience:
            break
    model.load_state_dict(kept)
    model.eval()
    return Fit(best, looks, time.monotonic() - start, time.process_time() - worked)


Tensors = tuple[Tensor, ...] | list[Tensor]


def _running_mean(decay: float) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """What AveragedModel does with its weights at every step. Early, the mean forgets faster."""

    @torch.no_grad()
    def update(means: Tensors, weights: Tensors, steps: Tensor | int) -> None:
        count = int(steps)
        share = 1 - min(decay, (1 + count) / (10 + count))
        for mean, weight in zip(means, weights):
            mean.lerp_(weight, share)

    return update


def _parameter_groups(
    model: nn.Module, solved: set[str], options: FitOptions
) -> list[dict[str, Any]]:
    """Groups of AdamW: what decays, what does not, and what was solved. share: of the rate."""
    decayed = decayed_names(model)
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "kept": [], "solved": []}
    for name, parameter in model.named_parameters():
        kind = "solved" if name in solved else "decayed" if name in decayed else "kept"
        groups[kind].append(parameter)
    return [
        {"params": groups["decayed"], "share": 1.0},
        {"params": groups["kept"], "share": 1.0, "weight_decay": 0.0},
        {"params": groups["solved"], "share": options.linear_rate, "weight_decay": 0.0},
    ]


@torch.no_grad()
def solve_linear(
    model: ForecastModel,
    train: Windows,
    error: Callable[[], float] | None = None,
    ridge: float = RIDGE,
) -> float:
    """Sets the linear map of the lookback to the least-squares solution over the training part.

    The forecast is center + scale * (W z + b) with z = (x - center) / scale, so W and b are the
    weights of x - center and of the scale in a regression of y - center.

    Where every channel has a map of its own, its squared difference from the map that all channels
    would share has a weight, one of APART. error: the error on validation of the model as it is, by
    which that weight is chosen; without it all channels have the shared map. Returns the weight.

    ridge: the weight of the squared weights, for every number that is regressed on.
    """
    assert model.linear is not None
    kinds, horizon, lookback = model.linear.weight.shape
    gram = torch.zeros(kinds, lookback + 1, lookback + 1, dtype=torch.float64)
    moment = torch.zeros(kinds, lookback + 1, horizon, dtype=torch.float64)
    rows = 0
    for past, level, target in _regressed(model, train):  # [S, n, L], [S, n], [S, n, H]
        x = torch.cat([past.double() - level.center[..., None], level.scale[..., None]], dim=-1)
        y = target.double() - level.center[..., None]
        x, y = (part.unflatten(0, (-1, kinds)).transpose(0, 1).flatten(1, 2) for part in (x, y))
        gram += x.transpose(1, 2) @ x
        moment += x.transpose(1, 2) @ y
        rows += x.shape[1]
    one = torch.eye(lookback + 1, dtype=torch.float64)
    shared = torch.linalg.solve(gram.sum(0) + ridge * rows * kinds * one, moment.sum(0))
    left = moment - gram @ shared

    def put(apart: float) -> None:
        assert model.linear is not None
        own = 0.0 if math.isinf(apart) else torch.linalg.solve(gram + apart * rows * one, left)
        solved = (shared + own).expand(kinds, -1, -1)
        model.linear.weight.copy_(solved[:, :-1].transpose(1, 2))
        model.linear.bias.copy_(solved[:, -1])

    best = math.inf
    if kinds > 1 and error is not None:
        found = {}
        for apart in APART:
            put(apart)
            found[apart] = error()
        best = min(found, key=lambda apart: math.inf if math.isnan(found[apart]) else found[apart])
    put(best)
    return best


def _regressed(model: ForecastModel, train: Windows) -> Iterator[tuple[Tensor, Level, Tensor]]:
    """Lookbacks [S, n, L], their levels [S, n] and targets [S, n, H] of all training windows."""
    config, values = model.config, train.values
    size = max(1, 2**22 // ((train.lookback + train.horizon) * train.channels))
    if config.normalizer == "window":
        for lookback, target in train.batches(size):
            series = lookback.permute(2, 0, 1)
            yield series, window_level(series), target.permute(2, 0, 1)
        return
    for begin, end in train.spans:
        # Levels are taken where a patch ends, so the stretch is read once for each start in it.
        for shift in range(config.patch):
            rows = values[begin + shift : end - train.horizon].T
            if rows.shape[1] < train.lookback:
                continue
            level = model.levels(rows)
            ends = torch.arange(1, level.center.shape[1] + 1) * config.patch
            ends = ends[ends >= train.lookback]
            for part in ends.split(size):
                at = part // config.patch - 1
                past = rows[:, part[:, None] - train.lookback + torch.arange(train.lookback)]
                ahead = values[begin + shift + part[:, None] + torch.arange(train.horizon)]
                found = Level(level.center[:, at], level.scale[:, at])
                yield past, found, ahead.permute(2, 0, 1)


def rate_of(step: int, options: FitOptions) -> float:
    """The learning rate of a step, counted from 0."""
    warmup = max(1, round(options.warmup * options.steps))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def loss_of(model: nn.Module, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of forecasts [..., outputs] against targets [...]."""
    levels = levels_of(model)
    if levels:
        return lambda out, target: pinball(out, target, levels)
    plain: nn.Module = {"mse": nn.MSELoss, "mae": nn.L1Loss, "huber": nn.HuberLoss}[name]()
    return lambda out, target: plain(out[..., 0], target)


@torch.no_grad()
def validate(model: nn.Module, windows: Windows, options: FitOptions) -> Errors:
    """The errors of a model on the validation part, or on so many of its windows."""
    if getattr(getattr(model, "config", None), "normalizer", "window") == "running":
        assert isinstance(model, ForecastModel)
        return _errors_between_patches(model, windows, options)
    levels = levels_of(model)
    forecast = model if levels else point_of(model)
    size, most = window_batch(windows), options.validation_windows
    return errors(forecast, windows, size, most, levels)


def levels_of(model: nn.Module) -> tuple[float, ...]:
    """The levels of the quantiles that a model forecasts; empty for points."""
    return getattr(getattr(model, "config", None), "quantiles", ())


def point_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The single forecasts [B, H, C] of a model, from lookbacks [B, L, C]."""
    place = model.config.point if isinstance(model, ForecastModel) else 0
    return lambda lookback: model(lookback)[..., place]


def window_batch(windows: Windows) -> int:
    """Windows at a time, so that about a thousand series are in memory."""
    return max(1, 1024 // windows.channels)


def _segment_loss(
    model: ForecastModel,
    train: Windows,
    options: FitOptions,
    draws: torch.Generator,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The loss of some forecasts while segments of the training part are read.

    The last forecast of a segment is made between two patches, as often as it happens in a stream.
    """
    config, horizon = model.config, train.horizon
    room = torch.tensor([end - begin - horizon for begin, end in train.spans])
    chances = (room - config.lookback + 1).clamp(min=0).double()
    begin, end = train.spans[int(torch.multinomial(chances, 1, generator=draws))]
    context = min(options.context, end - begin - horizon)
    cut = int(torch.randint(config.patch, (), generator=draws))
    rows = max(config.patch, context - cut)
    patches = rows // config.patch
    warm = min(config.lookback // config.patch, patches) - 1
    places = torch.randperm(patches - warm, generator=draws)[:PLACES].sort().values + warm
    size = max(1, options.batch * config.lookback // (context * train.channels))
    starts = torch.randint(begin, end - rows - horizon + 1, (size,), generator=draws)
    ends = torch.cat([(places + 1) * config.patch, torch.tensor([rows])])
    segment = train.values[starts[:, None] + torch.arange(rows)]  # [B, T, C]
    out = model.forecasts_within(segment.transpose(1, 2).flatten(0, 1), places)
    at = starts[:, None, None] + ends[:, None] + torch.arange(horizon)  # [B, M, H]
    target = train.values[at].permute(0, 3, 1, 2).flatten(0, 1)  # [B * C, M, H]
    return measure(out, target)


def _errors_between_patches(model: ForecastModel, windows: Windows, options: FitOptions) -> Errors:
    """The errors of a stream over the part, at the end of every patch, or of so many of them.

    Each stretch is a stream of its own, which begins `context` rows before the first target, or
    where the stretch begins if the rows before it are of another series.
    """
    patch, lookback, horizon = model.config.patch, windows.lookback, windows.horizon
    sums = ErrorSums(levels_of(model))
    streams = []
    for begin, end in windows.spans:
        first, stop = begin + lookback, end - horizon  # rows before the first and last target
        if stop < first:
            continue
        start = max(0, first - options.context) if len(windows.spans) == 1 else begin
        places = torch.arange(-(-(first - start) // patch) - 1, (stop - start) // patch)
        streams.append((start, stop, places))
    counts = [len(places) for _, _, places in streams]
    chosen = torch.zeros(sum(counts), dtype=torch.bool)
    chosen[evenly(len(chosen), options.validation_windows)] = True
    for (start, stop, places), wanted in zip(streams, chosen.split(counts)):
        if not wanted.any():
            continue
        rows, places = windows.values[start:stop].T, places[wanted]
        out = model.forecasts_within(rows, places)
        ends = torch.cat([(places + 1) * patch, torch.tensor([rows.shape[1]])])
        target = windows.values[start + ends[:, None] + torch.arange(horizon)]
        sums.add(out if sums.levels else out[..., 0], target.permute(2, 0, 1))
    return sums.errors()
