"""The forecaster: patches of a series, blocks with any mixer, and all steps of the horizon at once.

    rows -> normalised -> patches -> linear -> blocks -> norm -> the last hidden states -> linear
         -> + linear map of the normalised lookback -> back to the scale of the rows

A block is that of the language model, so two forecasters may differ in their mixer alone. Channels
are independent series that share all weights, unless `mix_channels` is set.

Normalisation is of two kinds. "window" takes the mean and the deviation of the lookback. "running"
takes those of all rows so far, weighted exponentially: with a half-life of h rows, the row that is
n rows back has the weight 2^(-n/h). It is causal, so a series can be read row by row, at constant
cost, with the same result as at once:

    state = model.init_state(series)          # [S] series, which have read nothing
    state = model.observe(rows, state)        # rows [S, n], any number of them
    model.forecast(state)                     # [S, horizon, outputs]

A running forecaster reads a patch when its last row is there. A forecast between two patches reads
the last `patch` rows as one more patch, whose effect on the state is then forgotten.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..mixers import computed_fields, mixer_config
from ..mixers.base import State
from ..mixers.layers import RMSNorm
from ..models.backbone import Block
from ..models.cache import hash_weights
from ..models.config import default_mlp_width
from ..models.decoder import BlockSteps

NORMALIZERS = ("window", "running")
#: Added to the variance of a normaliser, so that a constant series has a deviation.
VARIANCE_FLOOR = 1e-5
#: Patches that are read at once.
SEGMENT = 256
#: The standard deviation of the weights of a linear map with one input; with n it is / sqrt(n).
SPREAD = 0.02 * math.sqrt(768)


@dataclass
class ForecastConfig:
    """Every choice of a forecaster.

    horizon: rows that are forecast. lookback: rows that a forecast is made from; with the running
        normaliser the rows that the linear map sees, while the blocks remember what was before.
    patch: rows of a patch. dim, layers, heads, mlp: the width of the blocks, their number, the
        heads of a mixer and the width of the SwiGLU; None means 8/3 of dim.
    mixer, mixer_config: the mixer's name, and those of its fields that differ from the defaults.
    normalizer: "window" or "running". half_life: that of the running normaliser, in rows.
    quantiles: the levels that are forecast, such as (0.1, 0.5, 0.9), with 0.5 among them; empty for
        one point.
    linear: whether a linear map of the lookback is added to what the blocks say.
    head_patches: how many of the last patches the head sees; None: as many as the lookback has.
    dropout: the share of what a block adds, and of what the head sees, that is dropped in training.
    by_channel: whether every channel has a linear map of the lookback, and an embedding that is
        added to its patches, of its own. Channels are independent all the same.
    mix_channels: whether every block is followed by a linear map over the channels.
    channels: their number, which these two need.
    past, future, static: numbers of further columns: known up to now, known for the horizon as
        well, and one value for each series.
    """

    horizon: int = 96
    lookback: int = 96
    patch: int = 8
    dim: int = 64
    layers: int = 2
    heads: int = 4
    mlp: int | None = None
    mixer: str = "trellis"
    mixer_config: dict[str, Any] = field(default_factory=dict)
    normalizer: str = "window"
    half_life: float = 96.0
    quantiles: tuple[float, ...] = ()
    linear: bool = True
    head_patches: int | None = None
    dropout: float = 0.0
    by_channel: bool = False
    mix_channels: bool = False
    channels: int | None = None
    past: int = 0
    future: int = 0
    static: int = 0

    def __post_init__(self) -> None:
        for name in ("horizon", "lookback", "patch", "dim", "layers", "heads"):
            checks.at_least(name, getattr(self, name), 1)
        for name in ("past", "future", "static"):
            checks.at_least(name, getattr(self, name), 0)
        checks.at_least("mlp", self.mlp, 1, optional=True)
        checks.at_least("head_patches", self.head_patches, 1, optional=True)
        checks.at_least("channels", self.channels, 1, optional=True)
        checks.choice("normalizer", self.normalizer, NORMALIZERS)
        checks.positive("half_life", self.half_life)
        checks.share("dropout", self.dropout)
        checks.flag("linear", self.linear)
        checks.flag("by_channel", self.by_channel)
        checks.flag("mix_channels", self.mix_channels)
        mixer_config(self.mixer, self.mixer_config)
        if self.patch > self.lookback:
            raise ValueError(
                f"patch must be at most the lookback, {self.lookback} rows; got {self.patch}"
            )
        self.quantiles = quantile_levels(self.quantiles)
        if self.mlp is None:
            self.mlp = default_mlp_width(self.dim)
        if self.head_patches is None:
            self.head_patches = -(-self.lookback // self.patch)
        for name in ("by_channel", "mix_channels"):
            if getattr(self, name) and self.channels is None:
                raise ValueError(f"{name} needs channels, the number of channels; got None")
        if self.normalizer == "running" and (self.past or self.future or self.static):
            raise ValueError(
                "a forecaster with the running normaliser reads the series alone; got "
                f"past={self.past}, future={self.future}, static={self.static}"
            )

    def facts(self) -> dict[str, Any]:
        """All fields, and all of the mixer's, as they are now."""
        return {**asdict(self), "mixer_config": computed_fields(self.mixer, self.mixer_config)}

    @property
    def outputs(self) -> int:
        """Numbers for every row of the horizon: the quantiles, or one point."""
        return max(1, len(self.quantiles))

    @property
    def point(self) -> int:
        """Which output is the forecast of a single number: the median, or the point."""
        return self.quantiles.index(0.5) if self.quantiles else 0


def quantile_levels(levels: object) -> tuple[float, ...]:
    """Rising levels between 0 and 1 with 0.5 among them, or none."""
    try:
        found = tuple(float(level) for level in levels)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = (math.nan,)
    rises = all(low < high for low, high in zip((0.0, *found), (*found, 1.0)))
    if found and (not rises or 0.5 not in found):
        raise ValueError(
            f"quantiles must rise between 0 and 1 and have 0.5 among them; got {levels!r}"
        )
    return found


class StreamState(NamedTuple):
    """What is kept of S series: its size does not depend on how many rows they have.

    rows: [S, R], the last rows, zeros before the first. sums: [S, 3] in fp64, the weighted number,
    sum and sum of squares of all rows up to the last patch. hidden: [S, K, dim], what the head sees
    of the last patches. layers: a state for each block. seen: how many rows were read.
    """

    rows: Tensor
    sums: Tensor
    hidden: Tensor
    layers: tuple[State, ...]
    seen: int


class Level(NamedTuple):
    """Where a normalised series has its zero and its one, in fp64."""

    center: Tensor
    scale: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        """rows [..., n] normalised, in their own dtype."""
        return ((rows - self.center[..., None]) / self.scale[..., None]).to(rows.dtype)

    def undo(self, out: Tensor) -> Tensor:
        """out [..., horizon, outputs] in the scale of the rows."""
        return (out * self.scale[..., None, None] + self.center[..., None, None]).to(out.dtype)


class ForecastModel(nn.Module):
    def __init__(self, config: ForecastConfig, outputs: int | None = None):
        """outputs: numbers for every row of the horizon, by default those of the configuration."""
        super().__init__()
        self.config = config
        self.outputs = outputs or config.outputs
        dim, features = config.dim, 1 + config.past + config.future
        assert config.mlp is not None
        assert config.head_patches is not None
        self.embed = nn.Linear(config.patch * features, dim)
        self.blocks = nn.ModuleList(
            Block(dim, config.heads, config.mlp, 1e-6, config.mixer, config.mixer_config)
            for _ in range(config.layers)
        )
        self.channel_maps = nn.ModuleList(
            ChannelMap(dim, config.channels or 0)
            for _ in range(config.layers if config.mix_channels else 0)
        )
        self.norm = RMSNorm(dim, 1e-6)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.head_patches * dim, config.horizon * self.outputs)
        kinds = (config.channels or 1) if config.by_channel else 1
        self.linear = LookbackMap(config, kinds) if config.linear else None
        self.channel_embedding = (
            nn.Parameter(torch.zeros(kinds, dim)) if config.by_channel else None
        )
        self.static_map = nn.Linear(config.static, dim) if config.static else None
        self.future_map = (
            nn.Sequential(
                nn.Linear(config.future + dim, dim), nn.SiLU(), nn.Linear(dim, self.outputs)
            )
            if config.future
            else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights. The first forecast of a series is the mean of its lookback."""
        outputs = {
            id(output)
            for block in self.blocks
            for output in (block.mixer.output_projection, block.mlp.down_proj)  # type: ignore
        }

        def draw(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                std = SPREAD / math.sqrt(module.in_features)
                if id(module) in outputs:
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

        self.apply(draw)
        nn.init.zeros_(self.head.weight)
        if self.future_map is not None:
            nn.init.zeros_(self.future_map[-1].weight)  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """A hash of the configuration and of every weight: states of this model alone carry it."""
        digest = hashlib.sha256(json.dumps(self.config.facts(), sort_keys=True).encode())
        hash_weights(digest, self)
        return digest.hexdigest()

    def forward(
        self,
        rows: Tensor,
        mask: Tensor | None = None,
        past: Tensor | None = None,
        future: Tensor | None = None,
        static: Tensor | None = None,
    ) -> Tensor:
        """The forecasts [B, horizon, C, outputs] after rows [B, T, C].

        With the window normaliser T is the lookback; with the running one it may be any number.
        mask: [B, T, C], 0 where a row is missing; such rows count as the mean. past: [B, T, past],
        future: [B, T + horizon, future] and static: [B, static], for a model that has them.
        """
        config = self.config
        batch, length, channels = rows.shape
        self._check_channels(channels)
        series = rows.transpose(1, 2).flatten(0, 1)
        if config.normalizer == "running":
            if mask is not None:
                raise ValueError("mask is for the window normaliser; the running one reads all")
            state = self.observe(series, self.init_state(len(series)))
            return self._channels_last(self.forecast(state), batch)
        if length != config.lookback:
            raise ValueError(f"rows must be the lookback, {config.lookback} rows; got {length}")
        valid = None if mask is None else mask.transpose(1, 2).flatten(0, 1).to(series)
        level = window_level(series, valid)
        normal = level.apply(series)
        if valid is not None:
            normal = normal * valid
        extra = [None if x is None else x[:, :length] for x in (past, future)]
        given = [x.repeat_interleave(channels, 0) for x in extra if x is not None]
        tokens = self.embed(self._patches(torch.cat([normal[..., None], *given], dim=-1)))
        if self.static_map is not None:
            assert static is not None
            tokens = tokens + self.static_map(static).repeat_interleave(channels, 0)[:, None]
        hidden, _ = self._encode(tokens, None)
        out = self._head(hidden[:, -config.head_patches :], normal)  # type: ignore[operator]
        if self.future_map is not None:
            assert future is not None
            ahead = future[:, length:].repeat_interleave(channels, 0)
            known = hidden[:, -1:].expand(-1, config.horizon, -1)
            out = out + self.future_map(torch.cat([ahead, known], dim=-1))
        return self._channels_last(level.undo(out), batch)

    # The running normaliser.

    def init_state(self, series: int) -> StreamState:
        """The state of so many series that have read nothing."""
        self._check_running()
        self._check_channels(series)
        config, weight = self.config, self.embed.weight
        kept = config.lookback + config.patch
        assert config.head_patches is not None
        return StreamState(
            rows=weight.new_zeros(series, kept),
            sums=weight.new_zeros(series, 3, dtype=torch.float64),
            hidden=weight.new_zeros(series, config.head_patches, config.dim),
            layers=tuple(block.mixer.init_state(series) for block in self.blocks),  # type: ignore
            seen=0,
        )

    def observe(self, rows: Tensor, state: StreamState) -> StreamState:
        """The state after further rows [S, n] of every series."""
        for part in rows.split(SEGMENT * self.config.patch, dim=1):
            state, _, _ = self._advance(part, state)
        return state

    def forecast(self, state: StreamState) -> Tensor:
        """The forecasts [S, horizon, outputs] from a state."""
        hidden, level = self._latest(state)
        lookback = state.rows[:, -self.config.lookback :]
        unseen = torch.arange(self.config.lookback, 0, -1, device=lookback.device) > state.seen
        normal = level.apply(lookback).masked_fill(unseen, 0.0)
        return level.undo(self._head(hidden, normal))

    def forecasts_within(self, rows: Tensor, places: Tensor) -> Tensor:
        """The forecasts [S, M + 1, horizon, outputs] that are made while rows [S, T] are read.

        places: [M], numbers of patches, after each of which one forecast is made. The last forecast
        is the one after all rows, which need not end with a patch.
        """
        config = self.config
        state, hiddens, levels = self.init_state(len(rows)), [], []
        for part in rows.split(SEGMENT * config.patch, dim=1):
            state, one, at = self._advance(part, state)
            hiddens.append(one)
            levels.append(at)
        hidden = torch.cat(hiddens, dim=1)
        level = Level(*(torch.cat(each, dim=1) for each in zip(*levels)))
        assert config.head_patches is not None
        seen = F.pad(hidden, (0, 0, config.head_patches, 0)).unfold(1, config.head_patches, 1)
        last, last_level = self._latest(state)
        sees = torch.cat([seen[:, places + 1].transpose(2, 3), last[:, None]], dim=1)
        ends = torch.cat([(places + 1) * config.patch, places.new_tensor([rows.shape[1]])])
        before = F.pad(rows, (config.lookback, 0)).unfold(1, config.lookback, 1)[:, ends]
        every = Level(
            torch.cat([level.center[:, places], last_level.center[:, None]], dim=1),
            torch.cat([level.scale[:, places], last_level.scale[:, None]], dim=1),
        )
        unseen = torch.arange(config.lookback, 0, -1, device=rows.device) > ends[:, None]
        normal = every.apply(before).masked_fill(unseen, 0.0)
        return every.undo(self._head(sees, normal))

    def levels(self, rows: Tensor) -> Level:
        """The levels [S, N] after each patch of rows [S, T], of which the first is the first."""
        count = rows.shape[1] // self.config.patch
        patches = rows[:, : count * self.config.patch].unflatten(1, (count, self.config.patch))
        sums, found = rows.new_zeros(len(rows), 3, dtype=torch.float64), []
        for part in patches.split(SEGMENT, dim=1):
            found.append(self._decayed(sums, part))
            sums = found[-1][:, -1]
        return _level_of(torch.cat(found, dim=1))

    def _check_channels(self, series: int) -> None:
        needed = self.config.channels
        if (self.config.by_channel or self.config.mix_channels) and series % (needed or 1):
            raise ValueError(f"this forecaster is for {needed} channels; got {series} series")

    def _check_running(self) -> None:
        if self.config.normalizer != "running":
            raise ValueError(
                "a stream needs a forecaster that was trained with normalizer='running'; this one "
                f"has {self.config.normalizer!r}, which normalises every window by itself"
            )

    def _advance(self, rows: Tensor, state: StreamState) -> tuple[StreamState, Tensor, Level]:
        """(the state after rows [S, n], hidden [S, N, dim] and levels of the N patches read)."""
        config, patch = self.config, self.config.patch
        pending = state.seen % patch
        joined = torch.cat([state.rows, rows.to(state.rows)], dim=1)
        fresh = joined[:, joined.shape[1] - rows.shape[1] - pending :]
        count = fresh.shape[1] // patch
        patches = fresh[:, : count * patch].unflatten(1, (count, patch))
        sums = self._decayed(state.sums, patches)
        level = _level_of(sums)
        hidden, layers = patches.new_zeros(len(rows), 0, config.dim), state.layers
        if count:
            hidden, layers = self._encode(self.embed(level.apply(patches)), state.layers)
        # Copies: a view would keep all rows that were read at once in memory.
        kept = torch.cat([state.hidden, hidden], dim=1)[:, -config.head_patches :]  # type: ignore
        latest = joined[:, -state.rows.shape[1] :]
        after = StreamState(
            latest.clone(), sums[:, -1].clone() if count else state.sums, kept.clone(), layers,
            state.seen + rows.shape[1],
        )  # fmt: skip
        return after, hidden, level

    def _latest(self, state: StreamState) -> tuple[Tensor, Level]:
        """(hidden [S, K, dim] that the head sees now, the present level)."""
        patch = self.config.patch
        pending = state.seen % patch
        if pending == 0:
            return state.hidden, _level_of(state.sums)
        part = state.rows[:, -pending:]
        sums = state.sums * self._decay**pending + self._weighted(part)
        level = _level_of(sums)
        unseen = torch.arange(patch, 0, -1, device=part.device) > state.seen
        normal = level.apply(state.rows[:, -patch:]).masked_fill(unseen, 0.0)
        hidden, _ = self._encode(self.embed(normal[:, None]), state.layers)
        return torch.cat([state.hidden[:, 1:], hidden], dim=1), level

    def _read_one(
        self, tokens: Tensor, states: tuple[State, ...]
    ) -> tuple[Tensor, tuple[State, ...]] | None:
        """One patch [S, dim] read in a compiled call; None where PyTorch is to read it."""
        if self.training or self.channel_maps or torch.compiler.is_compiling():
            return None
        steps = self.__dict__.get("_steps")
        if steps is None or not steps.reads(self.blocks, self.norm):
            # Not as a submodule, in which every weight would count twice.
            steps = self.__dict__["_steps"] = BlockSteps(self.blocks, self.norm)
        return steps.read(tokens, states)

    @property
    def _decay(self) -> float:
        return 2.0 ** (-1 / self.config.half_life)

    def _weighted(self, rows: Tensor) -> Tensor:
        """The weighted number, sum and sum of squares [..., 3] of rows [..., n]."""
        wide = rows.double()
        back = torch.arange(rows.shape[-1] - 1, -1, -1, device=rows.device, dtype=torch.float64)
        weights = self._decay**back
        powers = torch.stack([torch.ones_like(wide), wide, wide.square()], dim=-1)
        return (powers * weights[:, None]).sum(-2)

    def _decayed(self, before: Tensor, patches: Tensor) -> Tensor:
        """The sums [S, N, 3] after each of the patches [S, N, patch], from those before [S, 3]."""
        count = patches.shape[1]
        step = self._decay**self.config.patch
        place = torch.arange(count, device=patches.device, dtype=torch.float64)
        apart = place[:, None] - place
        weights = torch.where(apart >= 0, step ** apart.clamp(min=0), 0.0)
        old = before[:, None] * (step ** (place + 1))[:, None]
        return old + weights @ self._weighted(patches)

    # What both normalisers share.

    def _encode(
        self, tokens: Tensor, states: tuple[State, ...] | None
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Patches [S, N, dim] to hidden states, and the states of the blocks behind them."""
        if self.channel_embedding is not None:
            by_channel = tokens.unflatten(0, (-1, len(self.channel_embedding)))
            tokens = (by_channel + self.channel_embedding[:, None]).flatten(0, 1)
        if states is not None and tokens.shape[1] == 1:
            found = self._read_one(tokens[:, 0], states)
            if found is not None:
                return found[0][:, None], found[1]
        x, after = self.dropout(tokens), []
        for number, block in enumerate(self.blocks):
            y, state = block(x, None if states is None else states[number])
            x = x + self.dropout(y - x) if self.training and self.config.dropout else y
            if self.channel_maps:
                x = self.channel_maps[number](x)
            after.append(state)
        return self.norm(x), tuple(after)

    def _head(self, hidden: Tensor, normal: Tensor) -> Tensor:
        """[..., K, dim] and the normalised lookback [..., L] to [..., horizon, outputs]."""
        missing = self.config.head_patches - hidden.shape[-2]  # type: ignore[operator]
        if missing:
            hidden = F.pad(hidden, (0, 0, missing, 0))
        out = self.head(self.dropout(hidden).flatten(-2))
        out = out.unflatten(-1, (self.config.horizon, self.outputs))
        return out if self.linear is None else out + self.linear(normal)[..., None]

    def _patches(self, x: Tensor) -> Tensor:
        """[S, L, features] -> [S, N, patch * features]; zeros in front where N is not whole."""
        patch = self.config.patch
        x = F.pad(x, (0, 0, -x.shape[1] % patch, 0))
        return x.unflatten(1, (-1, patch)).flatten(2)

    def _channels_last(self, forecasts: Tensor, batch: int) -> Tensor:
        """[B * C, horizon, outputs] -> [B, horizon, C, outputs]"""
        return forecasts.unflatten(0, (batch, -1)).transpose(1, 2)


class LookbackMap(nn.Module):
    """A linear map from the lookback to the horizon, one for all channels or one for each.

    It starts as zero, so that the first forecast is the mean.
    """

    def __init__(self, config: ForecastConfig, kinds: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kinds, config.horizon, config.lookback))
        self.bias = nn.Parameter(torch.zeros(kinds, config.horizon))

    def forward(self, x: Tensor) -> Tensor:
        """[S, ..., lookback] -> [S, ..., horizon]"""
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0], self.bias[0])
        by_channel = x.reshape(-1, len(self.weight), *x.shape[1:]).transpose(0, 1)
        flat = by_channel.reshape(len(self.weight), -1, x.shape[-1])
        out = torch.baddbmm(self.bias[:, None], flat, self.weight.transpose(1, 2))
        out = out.reshape(*by_channel.shape[:-1], -1).transpose(0, 1)
        return out.reshape(*x.shape[:-1], -1)


class ChannelMap(nn.Module):
    """x + a linear map, over the channels, of the normed x [S, N, dim]; it starts as x alone."""

    def __init__(self, dim: int, channels: int):
        super().__init__()
        self.channels = channels
        self.norm = RMSNorm(dim, 1e-6)
        self.weight = nn.Parameter(torch.zeros(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x).unflatten(0, (-1, self.channels))
        return x + torch.einsum("cd,bdnh->bcnh", self.weight, normed).flatten(0, 1)


def window_level(series: Tensor, valid: Tensor | None = None) -> Level:
    """The mean and the deviation of series [..., L]; rows that are not valid do not count."""
    wide = series.double()
    weight = torch.ones_like(wide) if valid is None else valid.double()
    powers = torch.stack([weight, weight * wide, weight * wide.square()], dim=-1)
    return _level_of(powers.sum(-2))


def _level_of(sums: Tensor) -> Level:
    """The level from the weighted number, sum and sum of squares [..., 3]."""
    count, total, squares = sums.unbind(-1)
    count = count.clamp(min=1e-12)
    center = total / count
    variance = (squares / count - center.square()).clamp(min=0)
    return Level(center, (variance + VARIANCE_FLOOR).sqrt())


def match_parameters(config: ForecastConfig, wanted: int) -> ForecastConfig:
    """The configuration with the MLP width that comes nearest to so many parameters."""

    def count(width: int) -> int:
        with torch.device("meta"):
            model = ForecastModel(ForecastConfig(**{**asdict(config), "mlp": width}))
        return sum(parameter.numel() for parameter in model.parameters())

    per_column = 3 * config.dim * config.layers
    width = max(1, round(1 + (wanted - count(1)) / per_column))
    return ForecastConfig(**{**asdict(config), "mlp": width})
