"""Forecasters by the field's protocol (trellis.forecasting.windows): one test for all of them.

Every forecaster is trained for one horizon on the training part, stopped early by the validation
part, and tested once. Beside it stand two forecasts that need no training, repeat-last and NLinear.
A forecaster is a name:

    trellis, transformer, mamba2, ...  our forecaster with that mixer, at equal parameters
    repeat-last, nlinear               the two of trellis.forecasting.baselines
    nlinear-season                     NLinear on rows without their usual day, as ours reads
                                       them where it normalises windows
    patchtst, nhits                    those of neuralforecast, trained on the same windows
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..figures import figure
from ..files import sha256_of, write_json
from ..forecasting.baselines import nlinear, repeat_last
from ..forecasting.fitting import (
    RECIPE_FIT,
    FitOptions,
    fit,
    point_of,
    recipe_model,
    window_batch,
)
from ..forecasting.model import ForecastConfig, ForecastModel, match_parameters
from ..forecasting.series import read_benchmark
from ..forecasting.windows import (
    GLITCH,
    SHRINK,
    Benchmark,
    Errors,
    ErrorSums,
    Windows,
    errors,
    split_of,
)
from ..mixers import MIXERS
from .runner import Job, Record, Records, Report, Table, slug

BASELINES = ("repeat-last", "nlinear")
SEASONAL = "nlinear-season"
#: name -> class in neuralforecast
PEERS = {"patchtst": "PatchTST", "nhits": "NHITS"}
#: How they are trained: by the recipe, but without decay of weights, which neuralforecast leaves
#: out. docs/lab-notebook.md compares it with what their classes have by default.
PEER_FIT = {**RECIPE_FIT, "weight_decay": 0.0}
#: Fields of a forecaster that follow from the arguments of `run` or from the file.
CHOSEN = {
    "mixer": "models chooses", "lookback": "lookback chooses", "horizon": "horizons chooses",
    "seed": "seeds chooses", "channels": "the file gives", "past": "the protocol has none of",
    "future": "the protocol has none of", "static": "the protocol has none of",
}  # fmt: skip
#: Test windows that are drawn, spread evenly.
DRAWN = 3
#: The fan around forecasts of one number: these quantiles of their errors on validation, but for
#: the middle, which is the forecast itself.
FAN = (0.1, 0.25, 0.5, 0.75, 0.9)


class Named(NamedTuple):
    """A forecaster as the records know it."""

    name: str
    identity: dict[str, Any]
    about: dict[str, Any]


def run(
    path: Path,
    out: Path,
    *,
    lookback: int = 96,
    horizons: Sequence[int] = (96, 192, 336, 720),
    models: Sequence[str] = ("trellis",),
    seeds: Sequence[int] = (0,),
    part: str = "test",
    split: str = "auto",
    season: int | None = None,
    model_fields: dict[str, Any] | None = None,
    fit_fields: dict[str, Any] | None = None,
    label: str = "",
    say: Callable[[str], None] = print,
) -> Report:
    """Trains and tests what is missing, and reports all of it.

    part: "test", or "validation" for choosing a recipe: the test part is then not looked at.
    season: the rows of a cycle, such as a day, whose usual course over the training part our
        forecasters do not see and need not learn; None: they see the rows as they are. The
        baselines and the peers see them so always, but for nlinear-season.
    model_fields, fit_fields: fields of ForecastConfig and FitOptions that differ from the recipe.
    label: goes into the name of the table and its figure.
    """
    checks.choice("part", part, ("validation", "test"))
    for name, value in {**(model_fields or {}), **(fit_fields or {})}.items():
        if name in CHOSEN:
            raise ValueError(f"{name} is no field to set: {CHOSEN[name]} it; got {name}={value!r}")
    for name in models:
        known = (*MIXERS, *BASELINES, *PEERS)
        if name not in known:
            hint = checks.did_you_mean(name, known)
            raise ValueError(f"models must be among {', '.join(known)}; got {name!r}{hint}")
        if name in PEERS and importlib.util.find_spec("neuralforecast") is None:
            raise ModuleNotFoundError(
                f"{name} needs neuralforecast: pip install 'trellis-memory[forecast]'",
                name="neuralforecast",
            )
    channels, values = read_benchmark(path)
    plain = Benchmark(values, split_of(path, split))
    cyclic = plain if season is None else Benchmark(values, plain.split, season)
    data = {"sha256": sha256_of(path), "split": plain.split, "part": part}
    records = Records(out, "forecast")
    base = BASELINES if season is None else (*BASELINES, SEASONAL)
    chosen, seeds = list(dict.fromkeys([*base, *models])), list(dict.fromkeys(seeds))
    tests = [
        _Test(
            plain if name in BASELINES or name in PEERS else cyclic, name, lookback, horizon, seed,
            part, model_fields or {}, fit_fields or {}, channels, say,
        )
        for horizon in horizons for name in chosen
        for seed in ([0] if name in base else seeds)
    ]  # fmt: skip
    found = [(test, records.measured(test.named, test.job(data, path.name))) for test in tests]
    title = f"{path.stem}, lookback {lookback}, {part}{f', {label}' if label else ''}"
    name = slug(f"{path.stem} {lookback} {part} {label}")
    rows = summary(found)
    files = [_write_table(out / "forecast" / "tables" / f"{name}.json", title, rows)]
    drawn = [r for t, r in found if r["result"].get("drawn") and t.seed == seeds[0]]
    if drawn:
        files.append(draw(drawn, title, out / "forecast" / "tables" / f"{name}.png"))
    return Report([record for _, record in found], [table_of(title, rows)], files)


class _Test:
    """One forecaster for one horizon and seed: how it is made, trained and measured."""

    def __init__(
        self,
        benchmark: Benchmark,
        name: str,
        lookback: int,
        horizon: int,
        seed: int,
        part: str,
        model_fields: dict[str, Any],
        fit_fields: dict[str, Any],
        channels: list[str],
        say: Callable[[str], None],
    ):
        self.benchmark, self.name, self.horizon, self.seed = benchmark, name, horizon, seed
        self.part, self.channels, self.say = part, channels, say
        self.sizes = lookback, horizon
        benchmark.windows("train", *self.sizes)  # raises if a part is too short
        benchmark.windows(part, *self.sizes)
        self.config: ForecastConfig | None = None
        self.options: FitOptions | None = None
        if name in (*BASELINES, SEASONAL):
            return
        usual = PEER_FIT if name in PEERS else RECIPE_FIT
        self.options = build(FitOptions, {**usual, **fit_fields, "seed": seed})
        if name in PEERS:
            return
        sizes = {"lookback": lookback, "horizon": horizon, "channels": len(channels)}
        base = build(ForecastConfig, recipe_model(lookback, {**model_fields, **sizes}))
        self.config = base
        if name != base.mixer:
            plain = ForecastConfig(**{**asdict(base), "mixer": name, "mixer_config": {}})
            self.config = match_parameters(plain, count(ForecastModel(base)))

    @property
    def named(self) -> Named:
        identity: dict[str, Any] = {"name": self.name}
        if self.config is not None:
            identity["config"] = self.config.facts()
        return Named(self.name, identity, identity)

    def job(self, data: dict[str, Any], file: str) -> Job:
        setting: dict[str, Any] = {
            "data": data, "lookback": self.sizes[0], "horizon": self.horizon,
        }  # fmt: skip
        if self.benchmark.season is not None:
            setting |= {"season": self.benchmark.season, "shrink": SHRINK, "glitch": GLITCH}
        if self.options is not None:
            setting["fit"] = asdict(self.options)
        label = f"{Path(file).stem} {self.sizes[0]} to {self.horizon} seed {self.seed}"
        steps = None if self.options is None else self.options.steps
        return Job(setting, self.measure, label, steps, {"file": file})

    def measure(self, progress: Callable[[int], None]) -> dict[str, Any]:
        train = self.benchmark.windows("train", *self.sizes)
        target = self.benchmark.windows(self.part, *self.sizes)
        worked = time.process_time()
        result: dict[str, Any] = {"windows": len(target), "train_windows": len(train)}
        if self.options is None:
            made = repeat_last(self.horizon) if self.name == "repeat-last" else nlinear(train)
            result["cpu_seconds"] = round(time.process_time() - worked, 2)
            return result | errors(made, target)._asdict()
        model = self.build()
        validation = self.benchmark.windows("validation", *self.sizes)
        self.say(f"{self.name}, horizon {self.horizon}, seed {self.seed}: {count(model)} weights")
        found = fit(model, train, validation, self.options, self.say, progress)
        result |= {
            "parameters": count(model),
            "seconds": round(found.seconds, 2),
            "cpu_seconds": round(found.cpu_seconds, 2),
            "threads": torch.get_num_threads(),
            "best": found.best._asdict(),
            "looks": [look._asdict() for look in found.looks],
        }
        if self.config is not None and self.config.normalizer == "running":
            assert isinstance(model, ForecastModel)
            result |= stream_errors(model, self.benchmark, target)._asdict()
        else:
            with torch.no_grad():
                result |= errors(point_of(model), target, window_batch(target))._asdict()
            if isinstance(model, ForecastModel):
                result["drawn"] = self.examples(model, validation, target)
        return result

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        if self.config is not None:
            return ForecastModel(self.config)
        return Peer(PEERS[self.name], *self.sizes, self.seed)

    @torch.no_grad()
    def examples(
        self, model: ForecastModel, validation: Windows, target: Windows
    ) -> list[dict[str, Any]]:
        """A few windows of the last channel with a fan of quantiles, in scaled values.

        The fan is what the model says or, around one number, how far validation was from it.
        """
        places = torch.linspace(0, len(target) - 1, DRAWN + 2).round().long()[1:-1]
        lookback, truth = target.take(places)
        out, levels = model(lookback)[:, :, -1].sort(-1).values, model.config.quantiles
        if not levels:
            assert self.options is not None
            size, most = window_batch(validation), self.options.validation_windows
            far = [
                (ahead - model(past)[..., 0])[:, :, -1]
                for past, ahead in validation.batches(size, most)
            ]
            spread = torch.cat(far).quantile(torch.tensor(FAN), dim=0).T  # [horizon, levels]
            spread[:, len(FAN) // 2] = 0.0
            out, levels = out + spread, FAN
        # What the forecaster did not see of a usual day belongs to what a person sees.
        past, ahead = target.subtracted(places).split(self.sizes, dim=1)
        lookback, truth, out = lookback + past, truth + ahead, out + ahead[:, :, -1:]
        return [
            {
                "window": int(place),
                "channel": self.channels[-1],
                "lookback": _short(past[:, -1]),
                "truth": _short(true[:, -1]),
                "forecast": [_short(level) for level in guess.T],
                "levels": list(levels),
            }
            for place, past, true, guess in zip(places, lookback, truth, out)
        ]


class Peer(nn.Module):
    """A univariate model of neuralforecast, with the settings that its class has by default."""

    def __init__(self, kind: str, lookback: int, horizon: int, seed: int):
        """seed: its class draws the weights by it, whatever the state of torch's generator."""
        super().__init__()
        import neuralforecast.models

        self.model = getattr(neuralforecast.models, kind)(
            h=horizon, input_size=lookback, random_seed=seed
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Lookbacks [B, L, C] to forecasts [B, H, C, 1]."""
        batch = len(rows)
        series = rows.transpose(1, 2).flatten(0, 1)[..., None]
        given: dict[str, Any] = dict.fromkeys(("futr_exog", "hist_exog", "stat_exog"))
        out = self.model({**given, "insample_y": series, "insample_mask": torch.ones_like(series)})
        return out.unflatten(0, (batch, -1)).transpose(1, 2)


@torch.no_grad()
def stream_errors(model: ForecastModel, benchmark: Benchmark, target: Windows) -> Errors:
    """The errors of a stream that begins with the file and forecasts after every row of the part.

    The forecasts are made before the same rows as those of all windows of the part.
    """
    ((begin, end),) = target.spans
    first, stop = begin + target.lookback, end - target.horizon
    rows = benchmark.values
    state = model.observe(rows[:first].T, model.init_state(rows.shape[1]))
    sums = ErrorSums()
    for row in range(first, stop + 1):
        sums.add(model.forecast(state)[..., model.config.point], rows[row : row + target.horizon].T)
        state = model.observe(rows[row : row + 1].T, state)
    return sums.errors()


def build(kind: Any, given: dict[str, Any]) -> Any:
    """A configuration from its fields; ValueError at a field that it does not have."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(
                f"{kind.__name__} has no field {name!r}{checks.did_you_mean(name, known)}"
            )
    return kind(**given)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def summary(found: Sequence[tuple[_Test, Record]]) -> list[dict[str, Any]]:
    """A row for each forecaster and horizon, with the mean over the seeds and their spread, and one
    for each forecaster with the mean over all horizons."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for test, record in found:
        groups.setdefault((test.name, test.horizon), []).append(
            {**record["result"], "seed": test.seed}
        )
    rows = [
        {"model": name, "horizon": horizon, **_over_seeds(results)}
        for (name, horizon), results in groups.items()
    ]
    names = list(dict.fromkeys(name for name, _ in groups))
    for name in names:
        own = [results for (other, _), results in groups.items() if other == name]
        if len(own) < 2:
            continue
        seeds = [r["seed"] for r in own[0]]
        over = [
            {
                "mse": fmean(results[n]["mse"] for results in own),
                "mae": fmean(results[n]["mae"] for results in own),
                "cpu_seconds": fmean(results[n]["cpu_seconds"] for results in own),
                "seed": seed,
            }
            for n, seed in enumerate(seeds)
        ]
        rows.append({"model": name, "horizon": "mean", **_over_seeds(over)})
    return rows


def _over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"seeds": len(results)}
    for name in ("mse", "mae"):
        values = [result[name] for result in results]
        row[name] = fmean(values)
        row[f"{name}_sd"] = stdev(values) if len(values) > 1 else None
    row["each"] = [{name: r[name] for name in ("seed", "mse", "mae")} for r in results]
    row["cpu_seconds"] = fmean(result["cpu_seconds"] for result in results)
    for name in ("parameters", "windows"):
        if name in results[0]:
            row[name] = results[0][name]
    return row


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    heads = ["horizon", "model", "MSE", "MAE", "seeds", "parameters", "processor seconds"]
    shown = []
    order = {row["horizon"]: n for n, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda row: order[row["horizon"]]):
        cells = [
            f"{row[name]:.3f}"
            + (f" ± {row[f'{name}_sd']:.3f}" if row[f"{name}_sd"] is not None else "")
            for name in ("mse", "mae")
        ]
        size = f"{row['parameters']:,}" if "parameters" in row else ""
        shown.append(
            [row["horizon"], row["model"], *cells, row["seeds"], size, f"{row['cpu_seconds']:.0f}"]
        )
    return Table(title, heads, shown)


def _write_table(path: Path, title: str, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"title": title, "rows": rows})
    return path


def draw(records: Sequence[Record], title: str, path: Path) -> Path:
    """A few test windows of the first forecaster at its shortest horizon, with its quantiles."""
    record = min(records, key=lambda record: record["setting"]["horizon"])
    drawn = record["result"]["drawn"]
    with figure(path, len(drawn), figsize=(5 * len(drawn), 3.6), sharey=True) as axes:
        for axis, window in zip(axes, drawn):
            past, truth = window["lookback"], window["truth"]
            ahead = range(len(truth))
            axis.plot(range(-len(past), 0), past, color="0.4", label="lookback")
            axis.plot(ahead, truth, color="black", label="truth")
            levels, lines = window["levels"], window["forecast"]
            for low in range(len(levels) // 2):
                high = len(levels) - 1 - low
                axis.fill_between(
                    ahead, lines[low], lines[high], color="C0", alpha=0.2 + 0.2 * low, linewidth=0,
                    label=f"{levels[low]:g} to {levels[high]:g}",
                )  # fmt: skip
            axis.plot(ahead, lines[len(lines) // 2], color="C0", label=record["model"]["name"])
            axis.set_title(f"{window['channel']}, test window {window['window']}")
            axis.set_xlabel("row")
        axes[0].set_ylabel("scaled value")
        axes[0].legend(fontsize="small")
        axes[0].figure.suptitle(title)
    return path


def _short(values: Tensor) -> list[float]:
    """Numbers as a record keeps them for a picture."""
    return [round(float(value), 3) for value in values]
