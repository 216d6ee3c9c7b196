"""A forecaster in the units of its user: fitted to a file, saved, loaded, and asked for forecasts.

file = read_series("sales.csv")
forecaster = fit_file(file, ForecastConfig(horizon=24, lookback=96), FitOptions(steps=500))
forecaster.save("sales.safetensors")
forecaster = Forecaster.load("sales.safetensors")
forecaster.predict(file)          # a list of forecasts, one for each series of the file
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..figures import figure
from ..files import write_whole
from ..models.cache import pack_tensors, read_tensors
from .fitting import Fit, FitOptions, fit
from .model import ForecastConfig, ForecastModel
from .series import Series, SeriesFile, Step, moment, need_rows
from .windows import Course, Scaler, Windows, swing

FORMAT = "trellis-forecaster"
FORMAT_VERSION = 2
#: The share of the rows of each series, at its end, that early stopping looks at.
VALIDATION = 0.2
#: The least spread of the numbers of a channel, in deviations: below, they look alike beside its
#: farthest ones, since a window's deviation is taken to be at least 0.003 (VARIANCE_FLOOR).
RESOLVED = 1e-3
#: The share of a channel's numbers that may be faults; more of them are what the channel does.
FAULTS = 0.01
#: So many numbers say how far apart those of a channel are.
SEVERAL = 8
#: The name of the cycle among the tensors of a file.
_CYCLE = "cycle"


@dataclass
class Forecast:
    """The forecast of one series of a file, in its units.

    dates: [H] of the horizon. values: [H, C, outputs]. levels: of the quantiles; empty for points.
    """

    names: list[str]
    dates: list[Any]
    values: np.ndarray
    levels: tuple[float, ...]
    point: int


class Forecaster:
    """A trained model, and how the series of its file were scaled.

    scalers: the mean and the deviation of every channel, by name. A series of a long file that was
    not there in training is scaled by its own rows.
    about: facts for the user, such as the validation error.
    cycle: [W, C], the usual course of a day or another cycle of W rows; see Scaler. Rows have their
    places in it by their dates.
    """

    def __init__(
        self,
        model: ForecastModel,
        scalers: dict[str, tuple[float, float]],
        about: dict[str, Any] | None = None,
        cycle: np.ndarray | None = None,
    ):
        self.model = model.eval()
        self.scalers = scalers
        self.about = about or {}
        if cycle is not None and (cycle.ndim != 2 or cycle.shape[1] != len(scalers)):
            raise ValueError(
                f"cycle must have shape [W, {len(scalers)}], a column for each channel; got "
                f"{list(cycle.shape)}"
            )
        self.cycle = cycle

    @property
    def config(self) -> ForecastConfig:
        return self.model.config

    @property
    def names(self) -> list[str]:
        return list(self.scalers)

    @property
    def season(self) -> int | None:
        """The rows of a cycle, or None."""
        return None if self.cycle is None else len(self.cycle)

    def scaler(self, names: Sequence[str] | None = None) -> Scaler:
        """The scaler of these channels, by default of all."""
        every = self.names
        chosen = [self.scalers[name] for name in (every if names is None else names)]
        cycle = self.cycle
        if cycle is not None and names is not None:
            places = {name: n for n, name in enumerate(every)}
            cycle = cycle[:, [places[name] for name in names]]
        return Scaler(np.array([m for m, _ in chosen]), np.array([s for _, s in chosen]), cycle)

    @torch.no_grad()
    def predict(self, file: SeriesFile) -> list[Forecast]:
        """The forecasts after the last row of every series of a file.

        Raises ValueError if the file has other channels than the one in training, or too few rows.
        """
        self._check(file)
        return [self._predict(self._chosen(series, file), file) for series in file.series]

    def _predict(self, series: Series, file: SeriesFile) -> Forecast:
        config = self.config
        running = config.normalizer == "running"
        least = config.patch if running else config.lookback
        need_rows(series, least, "since a forecast is made from so many", file.path)
        known = all(name in self.scalers for name in series.names)
        if not known and self.season is not None:
            why = f"since what is usual in its season of {self.season} rows is learned from them"
            need_rows(series, 2 * self.season, why, file.path)
        # Counted from the first date, as the file was: months of 31 days stay so.
        read, first = len(series.dates), series.dates[0]
        place = file.step.number(first)
        scaler = (
            self.scaler(series.names)
            if known
            else _scaler_of(series, series.values, self.season, place, file.path)
        )
        rows = series.values if running else series.values[-config.lookback :]
        begin = place + read - len(rows)
        scaled = torch.from_numpy(_scaled(scaler, rows, begin, series, file.path))[None]
        more: Any = 0.0  # of the usual course than `undo` adds, [H, C, 1]
        if scaler.cycle is not None and not running:
            past = Course.of(scaler, rows, begin)
            swings = swing(scaled, past.rows[None], past.whole[None, :1])
            scaled = scaled - swings * past.rows
            horizon = np.empty((config.horizon, len(series.names)))
            more = (swings * Course.of(scaler, horizon, place + read).rows)[0, ..., None].numpy()
        out = self.model(scaled)[0].sort(-1).values.double().numpy() + more  # [H, C, Q]
        values = scaler.undo(out.swapaxes(1, 2), place + read).swapaxes(1, 2)
        if not np.isfinite(values).all():
            raise ValueError(f"{file.path}: the forecasts of {series.names[0]!r} are not finite")
        dates = [series.step.after(first, read + n) for n in range(config.horizon)]
        return Forecast(series.names, dates, values, config.quantiles, config.point)

    def _check(self, file: SeriesFile) -> None:
        trained = self.about.get("layout")
        if trained is not None and trained != file.layout:
            raise ValueError(
                f"{file.path} is a {file.layout} file; this forecaster was fitted to a {trained} "
                "one"
            )
        lacking = [name for name in self.names if name not in file.series[0].names]
        if file.layout == "wide" and lacking:
            raise ValueError(
                f"{file.path} must have the columns {', '.join(self.names)}; it lacks "
                f"{', '.join(lacking)}"
            )
        step = self.about.get("step")
        if step is not None and step != str(file.step):
            raise ValueError(
                f"the rows of {file.path} are {file.step} apart; this forecaster was fitted to "
                f"rows that are {step} apart"
            )
        zone = self.about.get("zone")
        if zone is not None and zone != file.zone:
            has, had = ("an offset", "none") if file.zone else ("no offset", "one")
            raise ValueError(
                f"the dates of {file.path} have {has} from UTC; those in training had {had}"
            )

    def _chosen(self, series: Series, file: SeriesFile) -> Series:
        """The channels of this forecaster, in its order, of a wide file that may have more."""
        if file.layout == "long" or series.names == self.names:
            return series
        places = [series.names.index(name) for name in self.names]
        return Series(self.names, series.dates, series.values[:, places], series.step)

    def place_of(self, date: Any) -> int:
        """Where in its cycle a row with this date stands, or a number that has this remainder.

        Raises ValueError if it is no date, has an offset from UTC where the dates in training had
        none, or the reverse, or if the forecaster does not know how far its rows are apart.
        """
        every = self.about.get("every")
        if every is None:
            raise ValueError("this forecaster does not know the step of its rows: give place")
        return Step(**every).number(moment(date, self.about["zone"]))

    def save(self, path: str | Path) -> None:
        """Writes the forecaster to a safetensors file, whole or not at all."""
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in
                   self.model.state_dict().items()}  # fmt: skip
        if self.cycle is not None:
            tensors[_CYCLE] = torch.from_numpy(self.cycle)
        content = {
            "config": json.dumps(asdict(self.config)),
            "scalers": json.dumps(self.scalers),
            "about": json.dumps(self.about),
        }
        write_whole(Path(path), pack_tensors(FORMAT, FORMAT_VERSION, tensors, content))

    @classmethod
    def load(cls, path: str | Path) -> Forecaster:
        """Reads what `save` wrote.

        Raises FileNotFoundError, or ValueError if the file is cut, changed or of another kind.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no forecaster at {path}")
        tensors, content = read_tensors(path, FORMAT, FORMAT_VERSION)
        model = ForecastModel(ForecastConfig(**json.loads(content["config"])))
        cycle = tensors.pop(_CYCLE, None)
        model.load_state_dict(tensors)
        scalers = {
            name: (pair[0], pair[1]) for name, pair in json.loads(content["scalers"]).items()
        }
        about = json.loads(content["about"])
        return cls(model, scalers, about, None if cycle is None else cycle.numpy())


def enough_rows(file: SeriesFile, season: int | None, config: ForecastConfig) -> int | None:
    """The season, if the training rows of every series of a file have it at least twice."""
    fewest = min(_train_rows(len(series.values), config) for series in file.series)
    return season if season is not None and fewest >= 2 * season else None


def need_wide(file: SeriesFile, asked: bool) -> None:
    """Raises ValueError if by_channel or mix_channels is asked for, and the file is a long one."""
    if asked and file.layout == "long":
        raise ValueError(
            "by_channel and mix_channels are for wide files, whose channels have common dates; "
            f"{file.path} is a long one"
        )


def _train_rows(rows: int, config: ForecastConfig) -> int:
    """How many rows of a series are trained on; the others are for early stopping."""
    held = max(config.horizon, int(VALIDATION * rows))
    return rows - min(held, rows - config.lookback - config.horizon)


def fit_file(
    file: SeriesFile,
    config: ForecastConfig,
    options: FitOptions,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda steps: None,
    season: int | None = None,
) -> Forecaster:
    """A forecaster for the series of a file; the last fifth of each is for early stopping.

    season: the rows of a cycle, such as 24 for hours of a day, whose usual course is learned from
    the training rows of each series and subtracted before all else; None: no such cycle.

    Raises ValueError, before training, if a series has too few rows.
    """
    length, horizon = config.lookback + config.horizon, config.horizon
    _check_heads(file, config)
    need_wide(file, config.by_channel or config.mix_channels)
    least = length + horizon
    values, usual, train, validation, scalers, cycles = [], [], [], [], {}, []
    begin = 0
    for series in file.series:
        need_rows(
            series, least,
            f"for a lookback of {config.lookback} and a horizon of {horizon} in training, and a "
            "horizon for validation", file.path,
        )  # fmt: skip
        rows = len(series.values)
        trained = _train_rows(rows, config)
        place = file.step.number(series.dates[0])
        scaler = _scaler_of(series, series.values[:trained], season, place, file.path)
        values.append(_scaled(scaler, series.values, place, series, file.path))
        if scaler.cycle is not None:
            usual.append(Course.of(scaler, series.values, place))
            cycles.append(scaler.cycle)
        train.append((begin, begin + trained))
        validation.append((begin + trained - config.lookback, begin + rows))
        for name, mean, scale in zip(series.names, scaler.mean, scaler.scale):
            scalers[name] = (float(mean), float(scale))
        begin += rows
    scaled = torch.from_numpy(np.concatenate(values))
    sizes = config.lookback, horizon
    torch.manual_seed(options.seed)
    model = ForecastModel(config)
    course = Course.joined(usual) if usual else None
    train_windows, held = (Windows(scaled, part, *sizes, course) for part in (train, validation))
    found = fit(model, train_windows, held, options, say, advance)
    cycle = np.concatenate(cycles, axis=1) if cycles else None
    return Forecaster(model, scalers, _about(file, found, options), cycle)


def _scaler_of(
    series: Series, rows: np.ndarray, season: int | None, first: int, path: Path
) -> Scaler:
    """The scaler of these rows, the first of a series.

    Raises ValueError with the file, and the channel or the first channels: where there are fewer
    than two seasons, or where a number is so far from the others that nothing of them would be left
    in scaled values.
    """
    for column, cells in enumerate(rows.T):
        row = _drowns_others(cells)
        if row is not None:
            raise ValueError(_too_far(path, series, column, cells[row], series.dates[row]))
    try:
        return Scaler.of(rows, season, first)
    except ValueError as error:
        raise ValueError(f"{path}: {', '.join(series.names[:3])}: {error}") from error


def _drowns_others(cells: np.ndarray) -> int | None:
    """Where the farthest of a channel's numbers is, if beside a few like it all others look alike.

    A channel that often takes far values, such as a meter that is on for four hours of a day, is
    none of these: they are what it does.
    """
    away = np.abs(cells - np.median(cells))
    order = np.argsort(away)
    farthest = int(order[-1])
    if np.abs(cells).max() > 1e150:
        return farthest
    low, high = np.quantile(cells, [0.25, 0.75])
    if low == high:  # half of them are one number: how far apart are the others?
        others = cells[away > 0]
        if len(others) < SEVERAL:
            return None
        low, high = np.quantile(others, [0.25, 0.75])
    most = order[: len(cells) - max(1, round(FAULTS * len(cells)))]
    least = high - low
    drowned = 0 < least < RESOLVED * cells.std() and least >= RESOLVED * cells[most].std()
    return farthest if drowned else None


def _too_far(path: Path, series: Series, column: int, value: float, date: Any) -> str:
    return (
        f"{path}: {series.names[column]!r} is {value:g} at {date}, far too large beside the other "
        "numbers; mend it, or leave the cell empty and give missing as last or linear"
    )


def _scaled(scaler: Scaler, rows: np.ndarray, first: int, series: Series, path: Path) -> np.ndarray:
    """The last rows of a series, scaled. Raises ValueError at a number that fp32 cannot hold."""
    scaled = scaler.scaled(rows, first)
    bad = np.argwhere(~np.isfinite(scaled))
    if len(bad):
        row, column = bad[0]
        date = series.dates[len(series.dates) - len(rows) + row]
        raise ValueError(_too_far(path, series, column, rows[row, column], date))
    return scaled


def _about(file: SeriesFile, found: Fit, options: FitOptions) -> dict[str, Any]:
    return {
        "file": file.path.name,
        "layout": file.layout,
        "step": str(file.step),
        "every": asdict(file.step),
        "zone": file.zone,
        "rows": [len(series.values) for series in file.series],
        "options": asdict(options),
        "best": found.best._asdict(),
        "steps": found.looks[-1].step,
        "seconds": round(found.seconds, 1),
    }


def as_csv(forecasts: Sequence[Forecast], file: SeriesFile) -> str:
    """Forecasts in the layout of their file; quantiles have columns such as "OT-0.9"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = forecasts[0]
    others = [n for n in range(len(first.levels)) if n != first.point]

    def cells(values: np.ndarray) -> list[str]:
        return [f"{values[n]:.15g}" for n in (first.point, *others)]

    if file.layout == "wide":
        heads = [head for name in first.names for head in _heads(name, first.levels)]
        writer.writerow([file.date_column, *heads])
        for date, row in zip(first.dates, first.values):
            writer.writerow([file.date_text(date), *(c for channel in row for c in cells(channel))])
        return text.getvalue()
    writer.writerow(["unique_id", "ds", *_heads("y", first.levels)])
    for forecast in forecasts:
        for date, row in zip(forecast.dates, forecast.values):
            writer.writerow([forecast.names[0], file.date_text(date), *cells(row[0])])
    return text.getvalue()


def _heads(name: str, levels: Sequence[float]) -> list[str]:
    """The columns of a channel's forecast: its name for the median or point, then the others."""
    return [name, *(f"{name}-{level:g}" for level in levels if level != 0.5)]


def _check_heads(file: SeriesFile, config: ForecastConfig) -> None:
    """Raises ValueError if two columns of the forecasts of a wide file would have one name."""
    if file.layout == "long":
        return
    names = [file.date_column]
    for channel in file.series[0].names:
        for head in _heads(channel, config.quantiles):
            if head in names:
                raise ValueError(
                    f"{file.path}: the forecasts would have the column {head!r} twice, once as a "
                    "quantile; rename the column, choose others, or forecast points"
                )
            names.append(head)


def draw_forecast(forecast: Forecast, series: Series, path: Path) -> None:
    """A picture of the last rows of the first channel and their forecast, with its quantiles."""
    shown = min(len(series.dates), 4 * len(forecast.dates))
    with figure(path, figsize=(9, 4)) as axis:
        column = series.names.index(forecast.names[0])  # a file may have more, in another order
        axis.plot(series.dates[-shown:], series.values[-shown:, column], color="0.3")
        lines, levels = forecast.values[:, 0], forecast.levels
        for low in range(len(levels) // 2):
            high = len(levels) - 1 - low
            axis.fill_between(
                forecast.dates, lines[:, low], lines[:, high], color="C0", alpha=0.25, linewidth=0,
                label=f"{levels[low]:g} to {levels[high]:g}",
            )  # fmt: skip
        axis.plot(forecast.dates, lines[:, forecast.point], color="C0", label="forecast")
        axis.set_title(forecast.names[0])
        axis.legend()
