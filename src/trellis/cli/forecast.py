"""`trellis forecast`: fit a forecaster to a CSV file, forecast with it, or measure forecasters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from .options import Program, Threads, names, numbers

app = Program(no_args_is_help=True, help="Forecast time series from CSV files.")

File = Annotated[
    Path, Argument(help="A CSV file: a date and a column per channel, or unique_id, ds, y.")
]
Settings = Annotated[
    list[str] | None,
    Option("--set", help="A field of the model or of its training: dim=32, steps=500."),
]
Layout = Annotated[
    str, Option(help="auto, wide (a column per channel) or long (unique_id, ds, y).")
]
Columns = Annotated[str | None, Option(help="Of a wide file only these channels.")]
DateColumn = Annotated[str | None, Option(help="Of a wide file; else the first column.")]
DateFormat = Annotated[
    str | None, Option(help="Such as '%d.%m.%Y %H:%M', where dates are not like 2024-12-31 23:50.")
]
Missing = Annotated[
    str, Option(help="Missing cells and rows: refuse, last (repeat), or linear (interpolate).")
]
Sentinels = Annotated[
    list[str] | None, Option("--sentinel", help="A number that stands for a missing one: -9999.")
]
Season = Annotated[
    str,
    Option(
        help="Rows of a cycle, such as 24 for hours of a day, whose usual course is learned first; "
        "auto: a day, for days a week, for months a year; or none."
    ),
]
KeepSentinels = Annotated[bool, Option("--keep-sentinels", help="Numbers such as -9999 are data.")]


@app.command()
def evaluate(
    file: Annotated[Path, Argument(help="A CSV file: a date and a column per channel.")],
    lookback: Annotated[int, Option(help="Rows that a forecast is made from.", min=2)] = 96,
    horizons: Annotated[str, Option(help="Rows that are forecast.")] = "96,192,336,720",
    models: Annotated[
        str, Option(help="Mixers of our forecaster, or patchtst, nhits; all is every mixer.")
    ] = "trellis",
    seeds: Annotated[str, Option(help="Seeds, separated by commas.")] = "0",
    part: Annotated[
        str, Option(help="test; or validation, to choose a recipe without a look at the test.")
    ] = "test",
    split: Annotated[str, Option(help="auto (by the file's name), etth, ettm or ratio.")] = "auto",
    season: Season = "auto",
    settings: Settings = None,
    label: Annotated[str, Option(help="A word for the names of table and figure.")] = "",
    out: Annotated[
        Path, Option(help="The folder of results; a result that is there is not made again.")
    ] = Path("runs/eval"),
    threads: Threads = 0,
) -> Any:
    """Errors on a benchmark, beside repeat-last and NLinear, by the field's protocol.

    Every channel is scaled by its training rows; errors are of scaled values, over all windows of
    the test part. Every cell must hold a number; sentinels such as -9999 are data here.
    """
    from ..evaluation import forecasting as task
    from ..forecasting.series import benchmark_season
    from ..forecasting.windows import bounds_of, split_of
    from ..mixers import MIXERS
    from .evaluation import show

    model_fields, fit_fields = split_settings(settings)

    def trained(rows: int) -> int:
        return bounds_of(rows, split_of(file, split))[0]

    return show(task.run(
        file, out, lookback=lookback, horizons=numbers("horizons", horizons),
        models=list(MIXERS) if models == "all" else names(models),
        seeds=numbers("seeds", seeds, least=0), part=part, split=split,
        season=_season(season, lambda: benchmark_season(file, trained)), model_fields=model_fields,
        fit_fields=fit_fields, label=label, say=typer.echo,
    ))  # fmt: skip


@app.command()
def fit(
    file: File,
    out: Annotated[Path, Option(help="The forecaster, a .safetensors file that is not there yet.")],
    horizon: Annotated[int, Option(help="Rows to forecast.", min=1)] = 96,
    lookback: Annotated[int, Option(help="Rows that a forecast is made from.", min=2)] = 96,
    quantiles: Annotated[str, Option(help="Levels with 0.5 among them, or none for points.")] = (
        "0.1,0.25,0.5,0.75,0.9"
    ),
    streaming: Annotated[
        bool, Option("--streaming", help="Train for streams of rows, with a running normaliser.")
    ] = False,
    season: Season = "auto",
    layout: Layout = "auto",
    columns: Columns = None,
    date_column: DateColumn = None,
    date_format: DateFormat = None,
    missing: Missing = "refuse",
    sentinels: Sentinels = None,
    keep_sentinels: KeepSentinels = False,
    settings: Settings = None,
    seed: Annotated[int, Option(help="Of the weights and the windows.", min=0)] = 0,
    threads: Threads = 0,
) -> Any:
    """Train a forecaster for the series of a file. The last fifth of its rows is for validation."""
    from ..evaluation.forecasting import build
    from ..evaluation.runner import progress
    from ..forecasting import FitOptions, ForecastConfig, fit_file
    from ..forecasting.fitting import RECIPE_FIT, Look, recipe_model
    from ..forecasting.forecaster import enough_rows, need_wide

    _check_new(out=out)
    model_fields, fit_fields = split_settings(settings)
    for name in (
        "horizon", "lookback", "channels", "past", "future", "static", "normalizer", "quantiles",
        "seed",
    ):  # fmt: skip
        if name in {**model_fields, **fit_fields}:
            raise ValueError(
                f"--set cannot set {name}: it follows from the file or has an option of its own"
            )
    read = _read(
        file, layout, columns, date_column, date_format, missing, sentinels, keep_sentinels
    )
    channels = len(read.series[0].names) if read.layout == "wide" else None
    levels = () if quantiles == "none" else _levels(quantiles)
    given: dict[str, Any] = {
        "horizon": horizon, "lookback": lookback, "quantiles": levels, "channels": channels,
    }  # fmt: skip
    if streaming:
        given["normalizer"] = "running"
    given = {"by_channel": channels is not None, **given, **model_fields}
    need_wide(read, bool(given["by_channel"] or given.get("mix_channels")))
    config = build(ForecastConfig, recipe_model(lookback, given))
    options = build(FitOptions, {**RECIPE_FIT, "seed": seed, **fit_fields})
    for note in read.notes:
        typer.echo(note)
    cycle = _season(season, lambda: enough_rows(read, read.step.usual_season(), config))
    if cycle is not None:
        typer.echo(f"season: the usual course of {cycle} rows is learned first (--season)")
    with progress(f"fit to {file.name}", options.steps) as advance:
        forecaster = fit_file(read, config, options, typer.echo, advance, cycle)
    if out.exists():  # another program has written it meanwhile: neither file is to be lost
        meant, out = out, _free(out)
        typer.echo(f"{meant} was written by another program meanwhile")
    forecaster.save(out)
    typer.echo(f"validation, scaled: {Look(**forecaster.about['best']).errors}")
    typer.echo(f"written to {out}")
    return {"out": out, **forecaster.about, "notes": read.notes}


def _check_new(**paths: Path | None) -> None:
    """Raises ValueError if a file that is to be written is there, or its folder is not."""
    for name, path in paths.items():
        if path is None:
            continue
        if path.exists():
            raise ValueError(f"--{name} must not be there yet; {path} is")
        if not path.parent.is_dir():
            raise ValueError(
                f"--{name} must be in a folder that is there; there is no {path.parent}"
            )


def _free(path: Path) -> Path:
    """A path beside this one that is not there yet: m-2.safetensors for m.safetensors."""
    numbers = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(other for other in numbers if not other.exists())


@app.command(prints_result=True)
def predict(
    model: Annotated[Path, Argument(help="A forecaster that `trellis forecast fit` wrote.")],
    file: File,
    out: Annotated[
        Path | None, Option(help="A CSV file that is not there yet; else printed.")
    ] = None,
    figure: Annotated[
        Path | None, Option(help="A PNG of the first channel and its forecast.")
    ] = None,
    layout: Layout = "auto",
    columns: Columns = None,
    date_column: DateColumn = None,
    date_format: DateFormat = None,
    missing: Missing = "refuse",
    sentinels: Sentinels = None,
    keep_sentinels: KeepSentinels = False,
    threads: Threads = 0,
) -> Any:
    """Forecast the rows after the last one of a file, with their dates, as CSV."""
    from .. import figures
    from ..files import write_whole
    from ..forecasting import Forecaster
    from ..forecasting.forecaster import as_csv, draw_forecast

    _check_new(out=out, figure=figure)
    if figure is not None and figure == out:
        raise ValueError(f"--out and --figure must be two files; got {out} for both")
    if figure is not None:
        figures.check()
        if figure.suffix != ".png":
            raise ValueError(f"--figure must be a PNG file, such as forecast.png; got {figure}")
    forecaster = Forecaster.load(model)
    read = _read(
        file, layout, columns, date_column, date_format, missing, sentinels, keep_sentinels,
        forecaster.names if forecaster.about.get("layout") == "wide" else (),
    )  # fmt: skip
    for note in read.notes:
        typer.echo(note, err=True)
    forecasts = forecaster.predict(read)
    text = as_csv(forecasts, read)
    if figure is not None:
        draw_forecast(forecasts[0], read.series[0], figure)
        typer.echo(f"written to {figure}", err=True)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text.encode())
        typer.echo(f"written to {out}", err=True)
    return {
        "out": out,
        "figure": figure,
        "levels": forecaster.config.quantiles,
        "forecasts": [
            {
                "names": forecast.names,
                "dates": [read.date_text(date) for date in forecast.dates],
                "values": forecast.values.tolist(),
            }
            for forecast in forecasts
        ],
        "notes": read.notes,
    }


def _read(
    file: Path,
    layout: str,
    columns: str | None,
    date_column: str | None,
    date_format: str | None,
    missing: str,
    sentinels: list[str] | None,
    keep_sentinels: bool,
    known: Sequence[str] = (),
) -> Any:
    from ..forecasting import read_series

    try:
        signs = [float(text) for text in sentinels or ()]
    except ValueError:
        raise ValueError(f"--sentinel must be a number; got {' '.join(sentinels or ())}") from None
    return read_series(
        file, layout=layout, columns=names(columns) if columns else (), date_column=date_column,
        date_format=date_format, missing=missing, sentinels=signs, keep_sentinels=keep_sentinels,
        known=known,
    )  # fmt: skip


def _season(text: str, usual: Callable[[], int | None]) -> int | None:
    if text in ("auto", "none"):
        return usual() if text == "auto" else None
    if not text.isdigit() or int(text) < 2:
        raise ValueError(f"--season must be a number of rows from 2, auto or none; got {text!r}")
    return int(text)


def _levels(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--quantiles must be numbers separated by commas, or none; got {text!r}"
        ) from None


def split_settings(settings: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the model and those of its training, from texts such as "dim=32".

    Values are TOML, as in a recipe: `mixer_config={shape = "model"}` or `mixer_config.shape=model`.
    "none" is None.
    """
    from dataclasses import fields

    from .. import checks
    from ..forecasting import FitOptions, ForecastConfig
    from ..training.recipe import parsed_setting

    known = {kind: [field.name for field in fields(kind)] for kind in (ForecastConfig, FitOptions)}
    found: dict[Any, dict[str, Any]] = {ForecastConfig: {}, FitOptions: {}}
    for text in settings or ():
        if "=" not in text:
            raise ValueError(f"--set must be FIELD=VALUE, such as dim=32; got {text!r}")
        ((name, value),) = parsed_setting(text).items()
        kind = next((kind for kind, fields_ in known.items() if name in fields_), None)
        if kind is None:
            every = [field for fields_ in known.values() for field in fields_]
            raise ValueError(
                f"--set must name one of {', '.join(every)}; got {name!r}"
                f"{checks.did_you_mean(name, every)}"
            )
        if isinstance(value, dict) and isinstance(found[kind].get(name), dict):
            value = {**found[kind][name], **value}
        found[kind][name] = None if value == "none" else value
    return found[ForecastConfig], found[FitOptions]
