"""Series from CSV files: wide (a date and a column for each channel) or long (unique_id, ds, y).

The file is read, never written. What real files suffer from is handled, or refused by a message
that names the column and the row; rows are counted as in an editor, the line of names is row 1.

    trouble                      what happens
    missing cells, missing rows  refused; filled where `missing` is "last" or "linear", unless more
                                 than nine in ten of a column would be made up
    cells far from most others   a note, since they may be faults; see far_cells
    sentinels such as -9999      refused, unless `sentinels` lists them (they are missing cells
                                 then) or `keep_sentinels` says that they are data
    duplicate dates              refused
    unordered dates              sorted, with a note
    irregular dates              refused; a gap of whole steps is missing rows
    time zones                   all dates with an offset become UTC; some with and some without
                                 are refused
    constant channels            allowed; their forecast starts as the constant
    text in a column             refused; `columns` chooses others
    too few rows                 refused where they are used, see `need_rows`
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import checks
from .windows import far_cells

LAYOUTS = ("auto", "wide", "long")
FILLS = ("refuse", "last", "linear")
LONG = ("unique_id", "ds", "y")
#: Texts that stand for a missing cell, in small letters.
EMPTY = ("", "na", "n/a", "#n/a", "nan", "null", "none", "-", "?")
#: Numbers that loggers write where they have none.
SUSPECTS = (-9999.0, -999.0, -99999.0, 9999.0, 99999.0, -99.0, 999999.0, -9999.9, -999.9)
#: Rows of a file with its gaps filled, for every row, or every cell of a column, that is there.
MOST_FILLED = 10
#: A suspect is taken for a sentinel if it is so many interquartile ranges away from the median.
FAR = 8.0


@dataclass(frozen=True)
class Step:
    """The time from a row to the next: so many months, or so many seconds.

    last_day: every date is the last day of its month.
    day: the day of the month, where a series begins in a month that is too short for it; else 0.
    Steps are equal where rows are equally far apart, whatever their days.
    """

    months: int = 0
    seconds: float = 0.0
    last_day: bool = field(default=False, compare=False)
    day: int = field(default=0, compare=False)

    def after(self, date: dt.datetime, count: int) -> dt.datetime:
        """The date `count` steps later; a month that is too short has its last day.

        Raises ValueError if that is beyond the year 9999, the last that dates have.
        """
        try:
            if not self.months:
                return date + dt.timedelta(seconds=self.seconds * count)
            years, month = divmod(date.month - 1 + self.months * count, 12)
            first = date.replace(year=date.year + years, month=month + 1, day=1)
        except (OverflowError, ValueError):
            raise ValueError(f"{count} steps of {self} after {date} there are no dates") from None
        day = max(self.day, date.day)
        return first.replace(day=_days(first) if self.last_day else min(day, _days(first)))

    def number(self, date: dt.datetime) -> int:
        """How many steps lie between a fixed date and this one, rounded down.

        Its remainder by the rows of a day, a week or a year is a row's place in that cycle.
        """
        if self.months:
            return (date.year * 12 + date.month - 1) // self.months
        seconds = (date - dt.datetime(2001, 1, 1)).total_seconds()  # a Monday
        return math.floor(seconds / self.seconds + 1e-6)

    def usual_season(self) -> int | None:
        """The rows of a day, if a day has several; else of a week or a year; None: none of these.

        24 for hours, 7 for days, 12 for months.
        """
        if self.months:
            return 12 // self.months if self.months < 12 and 12 % self.months == 0 else None
        if self.seconds <= 0:  # dates that repeat
            return None
        for seconds in (86400.0, 7 * 86400.0):
            rows = seconds / self.seconds
            if rows > 1.5:
                return round(rows) if abs(rows - round(rows)) < 1e-6 else None
        return None

    def __str__(self) -> str:
        if self.months:
            return f"{self.months} month{'s' if self.months > 1 else ''}"
        return str(dt.timedelta(seconds=self.seconds))


@dataclass
class Series:
    """Equally long columns of one file, or one series of a long file.

    names: of the channels. dates: of the rows, `step` apart. values: [N, C] in fp64.
    """

    names: list[str]
    dates: list[dt.datetime]
    values: np.ndarray
    step: Step


@dataclass
class SeriesFile:
    """What a file holds.

    layout: "wide", with one Series of all channels, or "long", with a Series for each unique_id.
    step: how far the rows of every series are apart.
    date_form: how its dates are written, as in datetime.strftime; None: as 2024-12-31 23:50:00.
    notes: what was handled on the way, in sentences for the user.
    """

    path: Path
    layout: str
    date_column: str
    step: Step
    zone: bool
    series: list[Series]
    notes: list[str]
    date_form: str | None = None

    def date_text(self, date: dt.datetime) -> str:
        """A date as it is written to a file of forecasts."""
        if self.date_form is not None:
            return date.replace(tzinfo=dt.timezone.utc if self.zone else None).strftime(
                self.date_form
            )
        text = date.isoformat(sep=" ")
        return f"{text}+00:00" if self.zone else text


def read_series(
    path: str | Path,
    *,
    layout: str = "auto",
    columns: Sequence[str] = (),
    date_column: str | None = None,
    date_format: str | None = None,
    missing: str = "refuse",
    sentinels: Sequence[float] = (),
    keep_sentinels: bool = False,
    known: Sequence[str] = (),
) -> SeriesFile:
    """Reads a CSV file; see the head of this module for what is handled and what is refused.

    columns: of a wide file only these channels. known: where `columns` is empty, of a wide file
    only those of these that it has, at least one, such as the channels of a forecaster.
    date_column: by default the first column of a wide file. date_format: as in datetime.strptime,
    for dates that are not like 2024-12-31 23:50:00.

    Raises FileNotFoundError, or ValueError with the column and the row.
    """
    checks.choice("layout", layout, LAYOUTS)
    checks.choice("missing", missing, FILLS)
    if date_format is not None:
        _check_date_format(date_format)
    twice = [name for name in columns if list(columns).count(name) > 1]
    if twice:
        raise ValueError(f"columns must be named once each; got {twice[0]!r} twice")
    path = Path(path)
    names, rows = _table(path)
    if layout == "auto":
        layout = "long" if set(LONG) <= set(names) else "wide"
    reader = _Reader(path, date_format, missing, tuple(sentinels), keep_sentinels)
    if layout == "long":
        for name, given in (("columns", columns), ("date_column", date_column)):
            if given:
                raise ValueError(f"{name} is for wide files; a long file has unique_id, ds and y")
        return reader.long(names, rows)
    chosen = list(columns) or [name for name in names if name in known]
    if known and not chosen:
        raise ValueError(f"{path} must have the columns {', '.join(known)}; it has none of them")
    return reader.wide(names, rows, chosen, date_column)


def read_benchmark(path: str | Path) -> tuple[list[str], np.ndarray]:
    """The names of the channels and the rows [N, C] of a benchmark's file, as they stand in it.

    The first column, the date, is not looked at, as in the published loaders: rows count, though
    some of these files lack a few. Sentinels are data.

    Raises ValueError, with column and row, at a cell that is not a number.
    """
    path = Path(path)
    names, rows = _table(path)
    reader = _Reader(path, None, "refuse", (), True)
    values = np.array(
        [
            [reader.cell(text, name, number) for text, name in zip(cells[1:], names[1:])]
            for number, cells in rows
        ]
    )
    missing = np.argwhere(np.isnan(values))
    if len(missing):
        row, column = missing[0]
        raise ValueError(
            f"{path}: column {names[1:][column]!r}, row {rows[row][0]} is missing; a benchmark "
            "needs a number in every cell"
        )
    return names[1:], values


def benchmark_season(path: str | Path, training_rows: Callable[[int], int]) -> int | None:
    """The rows of a day, or of the usual cycle otherwise, by the first dates of a benchmark's file.

    None where the first column has no dates that can be read, their step fits no cycle, or the rows
    to train on do not have two of them. training_rows: their number, of a file with so many rows.
    """
    path = Path(path)
    names, rows = _table(path)
    reader = _Reader(path, None, "refuse", (), True)
    try:
        dates = [reader.date(cells[0], names[0], number) for number, cells in rows[:1000]]
    except ValueError:
        return None
    season = _step_of(dates).usual_season() if len(dates) > 1 else None
    return season if season is not None and training_rows(len(rows)) >= 2 * season else None


def moment(date: Any, zone: bool) -> dt.datetime:
    """A date that a user gives beside a file: without an offset, or in UTC where `zone` is True.

    date: a text like 2024-12-31 23:50, or a date or time of datetime, numpy or pandas.

    Raises ValueError at a text that is no date, or a date that has an offset while the file's dates
    have none, and the reverse.
    """
    if not isinstance(date, dt.datetime):
        try:
            if not isinstance(date, (str, dt.date, np.datetime64)):
                raise ValueError
            date = _iso_date(str(date)[:26] if isinstance(date, np.datetime64) else str(date))
        except ValueError:
            raise ValueError(f"a date must be like 2024-12-31 23:50:00; got {date!r}") from None
    if date != date:  # NaT of pandas
        raise ValueError(f"a date must be like 2024-12-31 23:50:00; got {date!r}")
    if (date.tzinfo is not None) != zone:
        has, had = ("an offset", "none") if date.tzinfo is not None else ("no offset", "one")
        raise ValueError(f"{date} has {has} from UTC; the dates in training had {had}")
    return date.astimezone(dt.timezone.utc).replace(tzinfo=None) if zone else date


def need_rows(series: Series, least: int, why: str, path: Path) -> None:
    """Raises ValueError if a series has fewer rows than `least`."""
    if len(series.values) < least:
        raise ValueError(
            f"{path}: {', '.join(series.names[:3])}{' ...' if len(series.names) > 3 else ''} has "
            f"{len(series.values)} rows; at least {least} are needed, {why}"
        )


def _table(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns and (row number, cells) of every row that is not blank."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # maps every byte; only names of columns may look odd
    if "\0" in text:
        raise ValueError(f"{path} is not a CSV file: it has zero bytes")
    first = next((line for line in text.splitlines() if line.strip()), "")
    outside = "".join(first.split('"')[::2])  # of quoted names
    comma = max(",;\t", key=outside.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=comma)
    rows: list[tuple[int, list[str]]] = []
    before = 0  # a row with a quoted line break has several lines, of which the first counts
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((before + 1, [cell.strip() for cell in cells]))
            before = reader.line_num
    except csv.Error as error:
        raise ValueError(f"{path}: row {reader.line_num} is not CSV: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty")
    (_, names), body = rows[0], rows[1:]
    if len(names) < 2:
        raise ValueError(
            f"{path}: row 1 must name a date and at least one channel, separated by commas; got "
            f"{names[0]!r}"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path}: row 1 names the column {twice!r} twice")
    for number, cells in body:
        if len(cells) != len(names):
            raise ValueError(
                f"{path}: row {number} has {len(cells)} cells; row 1 names {len(names)} columns"
            )
    if not body:
        raise ValueError(f"{path} has no rows below the names of its columns")
    return names, body


class _Reader:
    def __init__(
        self,
        path: Path,
        date_format: str | None,
        missing: str,
        sentinels: tuple[float, ...],
        keep_sentinels: bool,
    ):
        self.path, self.date_format, self.missing = path, date_format, missing
        self.sentinels, self.keep_sentinels = sentinels, keep_sentinels
        self.zones: dict[bool, int] = {}  # with and without an offset -> the first such row
        self.days_only = True  # whether every date so far was written without a time
        self.notes: list[str] = []

    def wide(
        self,
        names: list[str],
        rows: list[tuple[int, list[str]]],
        columns: list[str],
        date_column: str | None,
    ) -> SeriesFile:
        date_column = date_column or names[0]
        for name in (date_column, *columns):
            if name not in names:
                hint = checks.did_you_mean(name, names)
                raise ValueError(f"{self.path} has no column {name!r}{hint}")
        chosen = columns or [name for name in names if name != date_column]
        at = names.index(date_column)
        dates = [self.date(cells[at], date_column, number) for number, cells in rows]
        places = [names.index(name) for name in chosen]
        values = np.array(
            [
                [self.cell(cells[place], names[place], number) for place in places]
                for number, cells in rows
            ]
        )
        numbers = [number for number, _ in rows]
        series = self.regular(chosen, dates, values, numbers, date_column)
        return self.file("wide", date_column, [series])

    def long(self, names: list[str], rows: list[tuple[int, list[str]]]) -> SeriesFile:
        for name in LONG:
            if name not in names:
                raise ValueError(f"{self.path}: a long file has unique_id, ds and y; no {name!r}")
        more = [name for name in names if name not in LONG]
        if more:
            self.notes.append(f"columns that are not used: {', '.join(more)}")
        who, when, what = (names.index(name) for name in LONG)
        groups: dict[str, list[tuple[int, list[str]]]] = {}
        for row in rows:
            groups.setdefault(row[1][who], []).append(row)
        if "" in groups:
            raise ValueError(f"{self.path}: unique_id is empty in row {groups[''][0][0]}")
        found: list[Series] = []
        steps: dict[Step, str] = {}
        for name, group in groups.items():
            dates = [self.date(cells[when], "ds", number) for number, cells in group]
            values = np.array([[self.cell(cells[what], "y", number)] for number, cells in group])
            numbers = [number for number, _ in group]
            series = self.regular([name], dates, values, numbers, "ds", f" of {name!r}")
            steps.setdefault(series.step, name)
            found.append(series)
        if len(steps) > 1:
            (one, first), (other, second) = list(steps.items())[:2]
            raise ValueError(
                f"{self.path}: the rows of {first!r} are {one} apart and those of {second!r} "
                f"{other}; all series of a file must have the same step"
            )
        return self.file("long", "ds", found)

    def file(self, layout: str, date_column: str, series: list[Series]) -> SeriesFile:
        zone = True in self.zones
        if zone:
            self.notes.append("dates have an offset from UTC; forecasts are dated in UTC")
        form = self.date_format or ("%Y-%m-%d" if self.days_only else None)
        step = series[0].step
        return SeriesFile(self.path, layout, date_column, step, zone, series, self.notes, form)

    def date(self, text: str, column: str, number: int) -> dt.datetime:
        where = f"{self.path}: column {column!r}, row {number}"
        try:
            if self.date_format is not None:
                date = dt.datetime.strptime(text, self.date_format)
            else:
                date = _iso_date(text)
        except ValueError:
            expected = (
                f"like {dt.datetime(2024, 12, 31, 23, 50).strftime(self.date_format)!r}"
                if self.date_format
                else "like 2024-12-31 or 2024-12-31 23:50:00; for another form give the date format"
            )
            raise ValueError(f"{where}: the date must be {expected}; got {text!r}") from None
        self.days_only = self.days_only and len(text) <= 10
        aware = date.tzinfo is not None
        self.zones.setdefault(aware, number)
        if len(self.zones) > 1:
            raise ValueError(
                f"{self.path}: column {column!r}: row {self.zones[True]} has an offset from UTC "
                f"and row {self.zones[False]} has none; write all dates alike"
            )
        try:
            return date.astimezone(dt.timezone.utc).replace(tzinfo=None) if aware else date
        except OverflowError:
            raise ValueError(f"{where}: {text!r} has no date in UTC") from None

    def cell(self, text: str, column: str, number: int) -> float:
        """The number in a cell; NaN where it is missing or a sentinel."""
        if text.lower() in EMPTY:
            return math.nan
        try:
            if "_" in text:  # 1_000 is a number in Python alone
                raise ValueError
            value = float(text)
        except ValueError:
            hint = ""
            if "," in text and text.replace(",", "").replace(".", "").lstrip("+-").isdigit():
                hint = "; write decimals with a point, and no signs between thousands"
            raise ValueError(
                f"{self.path}: column {column!r}, row {number} must be a number; got {text!r}"
                f"{hint or '; leave out such columns or rows'}"
            ) from None
        if math.isinf(value):
            raise ValueError(f"{self.path}: column {column!r}, row {number} is not finite: {text}")
        return math.nan if value in self.sentinels else value

    def regular(
        self,
        names: list[str],
        dates: list[dt.datetime],
        values: np.ndarray,
        numbers: list[int],
        date_column: str,
        of: str = "",
    ) -> Series:
        """The rows in the order of their dates, at equal steps, without missing cells.

        of: whose rows these are, in a long file, to end the name of a column with.
        """
        columns = [f"column 'y'{of}" if of else f"column {name!r}" for name in names]
        order = sorted(range(len(dates)), key=lambda n: dates[n])
        if order != list(range(len(dates))):
            late = next(n for n in range(1, len(dates)) if dates[n] < dates[n - 1])
            self.notes.append(
                f"rows{of} were sorted by date; row {numbers[late]} is the first early one"
            )
        dates, numbers = [dates[n] for n in order], [numbers[n] for n in order]
        values = values[order]
        where = f"{self.path}: column {date_column!r}{of}"
        for n in range(1, len(dates)):
            if dates[n] == dates[n - 1]:
                raise ValueError(
                    f"{where}: rows {numbers[n - 1]} and {numbers[n]} have the same date, "
                    f"{dates[n]}; local times repeat an hour in autumn, UTC does not"
                )
        if len(dates) < 3:
            raise ValueError(
                f"{self.path}: {names[0]!r} has {len(dates)} rows; at least 3 are needed to see "
                "how far apart they are"
            )
        step = _step_of(dates)
        places = self._places(dates, numbers, step, where)
        self._note_far_cells(columns, values, numbers)
        self._check_sentinels(columns, values, numbers)
        full = np.full((places[-1] + 1, values.shape[1]), math.nan)
        full[places] = values
        rows: list[int | None] = [None] * len(full)
        for place, number in zip(places, numbers):
            rows[place] = number
        self._fill(columns, full, rows, numbers)
        every = [step.after(dates[0], n) for n in range(len(full))]
        return Series(names, every, full, step)

    def _places(
        self, dates: list[dt.datetime], numbers: list[int], step: Step, where: str
    ) -> list[int]:
        """How many steps after the first date every date lies."""
        places = [0]
        for n in range(1, len(dates)):
            count = _steps_between(dates[0], dates[n], step)
            if count is None:
                raise ValueError(
                    f"{where}: row {numbers[n]}, {dates[n]}, does not lie a whole number of steps "
                    f"of {step} after the first date, {dates[0]}; forecasts need equal steps"
                    + (" (dates with an offset are counted in UTC)" if True in self.zones else "")
                )
            if count > places[-1] + 1 and self.missing == "refuse":
                raise ValueError(
                    f"{where}: {count - places[-1] - 1} rows are missing between row "
                    f"{numbers[n - 1]}, {dates[n - 1]}, and row {numbers[n]}, {dates[n]} (the step "
                    f"is {step}); fill them, or give missing as last or linear"
                )
            places.append(count)
        if places[-1] + 1 > MOST_FILLED * len(dates):
            gap, n = max((places[n] - places[n - 1], n) for n in range(1, len(places)))
            raise ValueError(
                f"{where}: {gap - 1} rows are missing between row {numbers[n - 1]}, {dates[n - 1]}"
                f", and row {numbers[n]}, {dates[n]}; more than {MOST_FILLED - 1} in "
                f"{MOST_FILLED} rows would be made up"
            )
        return places

    def _check_sentinels(self, columns: list[str], values: np.ndarray, numbers: list[int]) -> None:
        if self.keep_sentinels:
            return
        for place, column in enumerate(columns):
            cells = values[:, place]
            for suspect in SUSPECTS:
                hits = np.flatnonzero(cells == suspect)
                others = cells[~np.isnan(cells) & (cells != suspect)]
                if not len(hits) or len(others) < 8:
                    continue
                low, middle, high = np.quantile(others, [0.25, 0.5, 0.75])
                if abs(suspect - middle) <= FAR * max(high - low, 1e-12):
                    continue
                raise ValueError(
                    f"{self.path}: {column}, row {numbers[hits[0]]} is {suspect:g}, which "
                    f"looks like the sign for a missing number ({len(hits)} cells); give "
                    f"sentinel {suspect:g} to treat it as missing, or keep sentinels as data"
                )

    def _note_far_cells(self, columns: list[str], values: np.ndarray, numbers: list[int]) -> None:
        """Says where cells are so far from the others that they may be faults of a sensor."""
        for place, column in enumerate(columns):
            cells = values[:, place]
            if np.count_nonzero(~np.isnan(cells)) < 8:
                continue
            far = np.flatnonzero(far_cells(cells[:, None]))
            if len(far):
                self.notes.append(
                    f"{column}, row {numbers[far[0]]} is {cells[far[0]]:g}, far from most others "
                    f"({len(far)} such cells); if that is a fault, mend it or leave the cell empty"
                )

    def _fill(
        self, columns: list[str], full: np.ndarray, rows: list[int | None], numbers: list[int]
    ) -> None:
        for place, column in enumerate(columns):
            gaps = np.isnan(full[:, place])
            if not gaps.any():
                continue
            if self.missing == "refuse":
                first = int(np.flatnonzero(gaps)[0])
                raise ValueError(
                    f"{self.path}: {column}, row {rows[first]} is missing ({int(gaps.sum())} "
                    "missing cells in all); fill them, or give missing as last or linear"
                )
            known = np.flatnonzero(~gaps)
            if not len(known):
                raise ValueError(f"{self.path}: {column} has no number at all")
            if len(gaps) > MOST_FILLED * len(known):
                raise ValueError(
                    f"{self.path}: {column} has {len(known)} numbers in {len(gaps)} rows; more "
                    f"than {MOST_FILLED - 1} in {MOST_FILLED} would be made up"
                )
            if known[0] > 0 and self.missing == "last":
                raise ValueError(
                    f"{self.path}: {column} is missing in row {numbers[0]}, the first; "
                    "there is no number before it to take"
                )
            if self.missing == "last":
                before = np.maximum.accumulate(np.where(gaps, 0, np.arange(len(gaps))))
                full[:, place] = full[before, place]
            else:
                every = np.arange(len(gaps))
                full[:, place] = np.interp(every, known, full[known, place])
            self.notes.append(f"{int(gaps.sum())} missing cells of {column} were filled")


def _iso_date(text: str) -> dt.datetime:
    """A date such as 2024-12-31 23:50, with or without an offset; Z is one. Raises ValueError."""
    return dt.datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] == "Z" else text)


def _check_date_format(form: str) -> None:
    """Raises ValueError at a format that no date can be read by."""
    if "%Z" in form:
        raise ValueError(
            f"date_format cannot read names of time zones, %Z; an offset such as +0100 is %z; got "
            f"{form!r}"
        )
    date = dt.datetime(2024, 12, 31, 23, 50, tzinfo=dt.timezone.utc)
    try:
        dt.datetime.strptime(date.strftime(form), form)
    except (ValueError, re.error):
        raise ValueError(f"date_format must be like '%d.%m.%Y %H:%M'; got {form!r}") from None


def _step_of(dates: list[dt.datetime]) -> Step:
    """The most frequent step between dates; months where it is whole months of 28 to 31 days."""
    between = [(after - before).total_seconds() for before, after in zip(dates, dates[1:])]
    counts: dict[float, int] = {}
    for seconds in between:
        counts[seconds] = counts.get(seconds, 0) + 1
    usual = max(counts, key=lambda seconds: (counts[seconds], -seconds))
    day = 86400.0
    if usual >= 28 * day:
        last_day = all(date.day == _days(date) for date in dates)
        largest = max(date.day for date in dates)
        anchor = largest if largest > dates[0].day else 0
        monthly = Step(months=round(usual / (30.4 * day)), last_day=last_day, day=anchor)
        if all(_steps_between(dates[0], date, monthly) is not None for date in dates):
            return monthly
    return Step(seconds=usual)


def _steps_between(first: dt.datetime, date: dt.datetime, step: Step) -> int | None:
    """How many steps lie between two dates; None where they are not whole."""
    if step.months:
        months = (date.year - first.year) * 12 + date.month - first.month
        count = months // step.months
        return count if step.after(first, count) == date else None
    count = round((date - first).total_seconds() / step.seconds)
    off = abs((date - first).total_seconds() - count * step.seconds)
    return count if off < 1e-6 * max(1.0, step.seconds) else None


def _days(date: dt.datetime) -> int:
    """The days of a date's month."""
    following = (date.replace(day=28) + dt.timedelta(days=4)).replace(day=1)
    return (following - dt.timedelta(days=1)).day
