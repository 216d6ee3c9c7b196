"""CSV files with the troubles that real ones have: handled, or refused by column and row."""

import datetime as dt
import math

import numpy as np
import pytest

from trellis.forecasting import read_series


def write(path, text):
    path.write_text(text)
    return path


def hourly(count=12, start="2024-01-01 00:00", columns=("a", "b"), step=60, cell=None):
    """The lines of a wide file; cell(row, column) may give the text of a cell."""
    first = dt.datetime.fromisoformat(start)
    lines = [",".join(["date", *columns])]
    for n in range(count):
        when = first + dt.timedelta(minutes=step * n)
        cells = [cell(n, c) if cell else None for c in range(len(columns))]
        cells = [f"{n + 10 * c}.5" if text is None else text for c, text in enumerate(cells)]
        lines.append(",".join([str(when), *cells]))
    return lines


@pytest.fixture
def read(tmp_path):
    def call(lines, **options):
        path = write(tmp_path / "file.csv", "\n".join(lines) + "\n")
        before = path.read_bytes()
        try:
            return read_series(path, **options)
        finally:
            assert path.read_bytes() == before

    return call


def at(row, column, text):
    return lambda n, c: text if (n, c) == (row, column) else None


def test_a_wide_file(read):
    file = read(hourly())
    (series,) = file.series
    assert (file.layout, file.date_column, str(file.step)) == ("wide", "date", "1:00:00")
    assert series.names == ["a", "b"]
    assert series.values.shape == (12, 2)
    assert series.values[3].tolist() == [3.5, 13.5]
    assert file.notes == []


def test_a_long_file_with_series_of_unequal_length(read):
    lines = ["unique_id,ds,y,heat"]
    for name, count in (("x", 5), ("y", 9)):
        lines += [f"{name},2024-01-{n + 1:02d},{n}" + ",1" for n in range(count)]
    file = read(lines)
    assert file.layout == "long"
    assert [len(series.values) for series in file.series] == [5, 9]
    assert file.notes == ["columns that are not used: heat"]


def test_one_channel_and_other_separators(read):
    assert read(hourly(columns=("a",))).series[0].values.shape == (12, 1)
    assert read([line.replace(",", ";") for line in hourly()]).series[0].names == ["a", "b"]


def test_a_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes("\n".join(hourly(columns=("W/m²", "b"))).encode("latin-1"))
    assert read_series(path).series[0].names == ["W/m²", "b"]


@pytest.mark.parametrize("text", ["", "NA", "nan", "null", "-"])
def test_missing_cells(read, text):
    lines = hourly(cell=at(4, 1, text))
    with pytest.raises(ValueError, match="column 'b', row 6 is missing"):
        read(lines)
    assert read(lines, missing="last").series[0].values[4, 1] == 13.5
    file = read(lines, missing="linear")
    assert file.series[0].values[4, 1] == 14.5
    assert file.notes == ["1 missing cells of column 'b' were filled"]


def test_missing_at_the_first_row_has_nothing_before_it(read):
    lines = hourly(cell=at(0, 0, ""))
    with pytest.raises(ValueError, match="'a' is missing in row 2, the first"):
        read(lines, missing="last")
    assert read(lines, missing="linear").series[0].values[0, 0] == 1.5
    with pytest.raises(ValueError, match="column 'a' has no number at all"):
        read(hourly(cell=lambda n, c: "" if c == 0 else None), missing="linear")


def test_sentinels(read):
    lines = hourly(40, cell=at(7, 0, "-9999"))
    with pytest.raises(ValueError, match=r"column 'a', row 9 is -9999, .* \(1 cells\)"):
        read(lines)
    assert read(lines, keep_sentinels=True).series[0].values[7, 0] == -9999
    with pytest.raises(ValueError, match="column 'a', row 9 is missing"):
        read(lines, sentinels=[-9999])
    assert read(lines, sentinels=[-9999], missing="linear").series[0].values[7, 0] == 7.5


def test_a_number_like_a_sentinel_among_its_like_is_data(read):
    file = read(hourly(40, cell=lambda n, c: str(-9990 - n)))
    assert file.series[0].values[9, 0] == -9999


def test_duplicate_dates(read):
    lines = hourly()
    with pytest.raises(ValueError, match="column 'date': rows 5 and 6 have the same date"):
        read([*lines[:5], lines[4], *lines[5:]])


def test_unordered_dates_are_sorted(read):
    lines = hourly()
    file = read([lines[0], *reversed(lines[1:])])
    assert file.series[0].values[:, 0].tolist() == [n + 0.5 for n in range(12)]
    assert "rows were sorted by date; row 3" in file.notes[0]


def test_irregular_dates(read):
    lines = hourly()
    lines[5] = lines[5].replace("04:00", "04:07")
    with pytest.raises(ValueError, match=r"row 6, .*04:07:00, does not lie a whole number"):
        read(lines)


def test_missing_rows(read):
    lines = hourly()
    del lines[5:7]
    with pytest.raises(ValueError, match=r"2 rows are missing between row 5.* and row 6"):
        read(lines)
    series = read(lines, missing="linear").series[0]
    assert series.values[:, 0].tolist() == [n + 0.5 for n in range(12)]
    assert series.dates[4] == dt.datetime(2024, 1, 1, 4)


def test_months(read):
    lines = ["date,a"] + [f"{2020 + n // 12}-{n % 12 + 1:02d}-01,{n}" for n in range(30)]
    file = read(lines)
    assert str(file.step) == "1 month"
    assert file.step.after(file.series[0].dates[-1], 8) == dt.datetime(2023, 2, 1)


def test_what_looks_like_months_in_its_first_rows(read):
    gap = [f"2024-{n:02d}-01" for n in (1, 3, 4, 5, 6)]
    assert str(read(["date,a"] + [f"{day},1" for day in gap], missing="last").step) == "1 month"
    first = dt.datetime(2023, 2, 1)  # four weeks later is the first of March
    weeks = [(first + n * dt.timedelta(weeks=4)).date() for n in range(5)]
    assert str(read(["date,a"] + [f"{day},1" for day in weeks]).step) == "28 days, 0:00:00"


def test_last_days_of_months(read):
    days = ["2024-01-31", "2024-02-29", "2024-03-31", "2024-04-30", "2024-05-31"]
    file = read(["date,a"] + [f"{day},1" for day in days])
    assert file.step.after(file.series[0].dates[-1], 1) == dt.datetime(2024, 6, 30)
    short = read(["date,a"] + [f"{day},1" for day in days[1:]])
    assert short.step.after(short.series[0].dates[0], 2) == dt.datetime(2024, 4, 30)


@pytest.mark.parametrize("first", ["2024-01-30", "2024-02-29"])
def test_a_day_that_some_months_lack(read, first):
    days = [first, "2024-03-30", "2024-04-30", "2024-05-30", "2024-06-30"]
    if first == "2024-01-30":
        days.insert(1, "2024-02-29")
    file = read(["date,a"] + [f"{day},1" for day in days])
    assert [date.date().isoformat() for date in file.series[0].dates] == days
    assert file.step.after(file.series[0].dates[0], len(days)) == dt.datetime(2024, 7, 30)


def test_series_of_one_file_may_have_their_months_on_other_days(read):
    lines = ["unique_id,ds,y"]
    days = {"a": ["02-29", "03-30", "04-30"], "b": ["02-15", "03-15", "04-15"],
            "c": ["02-29", "03-31", "04-30"]}  # fmt: skip
    lines += [f"{name},2024-{day},1" for name, of in days.items() for day in of]
    after = [one.step.after(one.dates[0], 3) for one in read(lines).series]
    assert [date.day for date in after] == [30, 15, 31]


def test_dates_beyond_the_last_are_refused(read):
    step = read(hourly(start="9999-12-31 12:00", count=12)).step
    with pytest.raises(ValueError, match="12 steps of 1:00:00 after 9999-12-31 23:00:00 there are"):
        step.after(dt.datetime(9999, 12, 31, 23), 12)
    with pytest.raises(ValueError, match="8 steps of 1 month after 9999-12-01"):
        type(step)(months=1).after(dt.datetime(9999, 12, 1), 8)
    lines = ["date,a"] + [f"0001-01-01T0{n}:00:00+05:00,1" for n in range(4)]
    with pytest.raises(ValueError, match=r"row 2: '0001-01-01T00:00:00.05:00' has no date in UTC"):
        read(lines)


def test_a_gap_that_is_nearly_all_of_a_file_is_not_filled(read):
    lines = hourly(40)
    lines[-1] = lines[-1].replace("2024-01-02", "2034-01-02")
    with pytest.raises(ValueError, match=r"\d+ rows are missing between row 40.*row 41.*made up"):
        read(lines, missing="linear")


def test_a_number_far_from_all_others_gets_a_note(read):
    file = read(hourly(40, cell=at(7, 0, "12345")))
    assert file.series[0].values[7, 0] == 12345
    (note,) = file.notes
    assert "column 'a', row 9 is 12345, far from most others (1 such cells)" in note
    assert read(hourly(40, cell=at(7, 0, "12345")), keep_sentinels=True).notes == [note]


def test_a_column_that_is_nearly_all_gaps_is_not_filled(read):
    lines = hourly(60, cell=lambda n, c: "" if c == 1 and n % 12 else None)
    with pytest.raises(ValueError, match=r"column 'b' has 5 numbers in 60 rows.*made up"):
        read(lines, missing="linear")


def test_rows_count_by_their_first_line(read):
    lines = hourly(cell=at(3, 0, '"x\ny"'))
    with pytest.raises(ValueError, match="column 'a', row 5 must be a number"):
        read(lines)
    with pytest.raises(ValueError, match="column 'b', row 8 must be a number; got '1_0'"):
        read(hourly(cell=at(6, 1, "1_0")))


def test_of_known_columns_those_are_read_that_a_file_has(read):
    lines = hourly(columns=("a", "wind"), cell=lambda n, c: "north" if c == 1 else None)
    assert read(lines, known=["b", "a"]).series[0].names == ["a"]
    with pytest.raises(ValueError, match="must have the columns b; it has none of them"):
        read(lines, known=["b"])


@pytest.mark.parametrize(
    ("lines", "form", "expected"),
    [
        (["2024-01-01", "2024-01-02", "2024-01-03"], None, "2024-01-04"),
        (["2024-01-01 00:00", "2024-01-02 00:00", "2024-01-03 00:00"], None, "2024-01-04 00:00:00"),
        (["01.01.2024", "02.01.2024", "03.01.2024"], "%d.%m.%Y", "04.01.2024"),
        (
            ["01.01.24 10 +0200", "02.01.24 10 +0200", "03.01.24 10 +0200"],
            "%d.%m.%y %H %z",
            "04.01.24 08 +0000",
        ),
    ],
)
def test_forecasts_are_dated_as_the_file_is(read, lines, form, expected):
    file = read(["date,a", *(f"{line},1" for line in lines)], date_format=form)
    assert file.date_text(file.step.after(file.series[0].dates[0], 3)) == expected


def test_names_of_zones_are_not_read(read):
    with pytest.raises(ValueError, match="cannot read names of time zones, %Z"):
        read(hourly(), date_format="%Y-%m-%d %Z")


def test_time_zones(read):
    lines = ["date,a"] + [f"2024-03-31T{n:02d}:00:00+02:00,{n}" for n in range(6)]
    file = read(lines)
    assert file.zone
    assert file.series[0].dates[0] == dt.datetime(2024, 3, 30, 22)
    assert file.date_text(dt.datetime(2024, 4, 1)) == "2024-04-01 00:00:00+00:00"
    lines[3] = "2024-03-31T02:00:00,2"
    with pytest.raises(ValueError, match="row 2 has an offset from UTC and row 4 has none"):
        read(lines)


def test_text_columns(read):
    lines = hourly(columns=("a", "wind"), cell=lambda n, c: "north" if c == 1 else None)
    with pytest.raises(ValueError, match="column 'wind', row 2 must be a number; got 'north'"):
        read(lines)
    assert read(lines, columns=["a"]).series[0].names == ["a"]
    with pytest.raises(ValueError, match="no column 'wnd'; did you mean 'wind'"):
        read(lines, columns=["wnd"])
    with pytest.raises(ValueError, match=r"row 5 must be a number; got '1,5'; write decimals"):
        read([line.replace(",", ";") for line in hourly(cell=at(3, 0, "1,5"))[:4]]
             + [hourly()[4].replace(",", ";").replace("3.5", "1,5", 1)])  # fmt: skip


def test_dates_in_another_form(read):
    lines = ["date,a"] + [f"{n + 1:02d}.01.2024,{n}" for n in range(5)]
    with pytest.raises(ValueError, match=r"column 'date', row 2: the date must be like 2024-12-31"):
        read(lines)
    file = read(lines, date_format="%d.%m.%Y")
    assert file.series[0].dates[1] == dt.datetime(2024, 1, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["date"], "row 1 must name a date and at least one channel"),
        (["date,a"], "has no rows"),
        (["date,a,a", "2024-01-01,1,2"], "row 1 names the column 'a' twice"),
        (["date,a", "2024-01-01,1,2"], "row 2 has 3 cells; row 1 names 2 columns"),
        (["date,a", "2024-01-01,1", "2024-01-02,1"], "'a' has 2 rows; at least 3 are needed"),
        (["date,a", "2024-01-01,inf"], "column 'a', row 2 is not finite: inf"),
        (["unique_id,ds,y", ",2024-01-01,1"], "unique_id is empty in row 2"),
    ],
)
def test_malformed_files(read, lines, message):
    with pytest.raises(ValueError, match=message):
        read(lines)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_series(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="is empty"):
        read_series(write(tmp_path / "a.csv", ""))
    (tmp_path / "b.csv").write_bytes(b"PK\0\0")
    with pytest.raises(ValueError, match="not a CSV file"):
        read_series(tmp_path / "b.csv")


def test_constant_channels_are_scaled_to_zero():
    from trellis.forecasting.windows import Scaler

    values = np.full((10, 1), 0.1)
    scaler = Scaler.of(values)
    assert scaler.scale.tolist() == [1.0]
    assert not math.isnan(scaler.apply(values).sum())


def test_troubles_of_a_long_file_name_column_series_and_row(read):
    def lines(*changes):
        """Two series of 20 hours; changes: (line, text) replaced."""
        found = ["unique_id,ds,y"]
        for name in ("x", "2"):
            found += [f"{name},2024-01-01 {n:02d}:00,{n}.5" for n in range(20)]
        for line, text in changes:
            found[line] = text
        return found

    for change, message in (
        ((26, "2,2024-01-01 05:00,"), r"column 'y' of '2', row 27 is missing \(1 missing cells"),
        ((26, "2,2024-01-01 05:00,-9999"), "column 'y' of '2', row 27 is -9999"),
        ((26, "2,2024-01-01 04:00,1"), "column 'ds' of '2': rows 26 and 27 have the same date"),
        ((26, "2,2024-01-01 05:07,1"), "column 'ds' of '2': row 27, .*05:07:00, does not lie"),
        ((26, "2,2024-01-01 05:00,x"), "column 'y', row 27 must be a number; got 'x'"),
        ((26, ""), "column 'ds' of '2': 1 rows are missing between row 26.* and row 28"),
    ):
        with pytest.raises(ValueError, match=message):
            read(lines(change))
    moved = lines((25, lines()[26]), (26, lines()[25]))
    assert read(moved).notes == ["rows of '2' were sorted by date; row 27 is the first early one"]
    with pytest.raises(ValueError, match="date_column is for wide files"):
        read(lines(), date_column="ds")


def test_a_sentinel_in_most_cells_is_one_too(read):
    lines = hourly(40, cell=lambda n, c: "-9999" if n % 4 and c == 0 else None)
    with pytest.raises(ValueError, match=r"column 'a', row 3 is -9999, .* \(30 cells\)"):
        read(lines)


def test_the_separator_is_found_below_blank_lines_and_outside_quotes(read):
    lines = [line.replace(",", ";") for line in hourly()]
    lines[0] = '"date";"power, active, left";"b"'
    file = read(["", *lines])
    assert file.series[0].names == ["power, active, left", "b"]


def test_an_offset_that_changes_is_said_to_be_the_cause(read):
    days = [f"2024-03-{day}T00:00:00+0{1 if day < 32 else 2}:00,1" for day in range(20, 32)]
    with pytest.raises(ValueError, match="dates with an offset are counted in UTC"):
        read(["date,a", *days, *(f"2024-04-{day:02d}T00:00:00+02:00,1" for day in range(1, 9))])
