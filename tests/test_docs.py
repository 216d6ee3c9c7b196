"""The documents are true: their Python examples run, their links lead to files, and every number
of a table of measurements stands in the record that the table names.

A table names its records in a comment on the line before it:

    <!-- records: records/bench-ops.json -->
    | T | op | median |

Paths are relative to the document. Every number in the table's body must then be found in one of
the records, rounded as the table prints it.
"""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trellis.cli import app
from trellis.models.presets import PRESETS, describe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
#: Tables of measurements stand in these; every table with numbers must name its records there.
MEASURED = (
    "README.md",
    "docs/results.md",
    "docs/benchmarks.md",
    "docs/lab-notebook.md",
    "docs/parity.md",
    "docs/gpu.md",
    "docs/forecasting.md",
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_python_examples_run(path, tmp_path, monkeypatch):
    """The examples of a page run one after the other, in an empty folder."""
    examples = re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S)
    if not examples:
        pytest.skip("the page has no Python example")
    monkeypatch.chdir(tmp_path)
    for number, example in enumerate(examples):
        exec(compile(example, f"{path.name}, example {number + 1}", "exec"), {})
    # A reader runs the commands too: no example writes over what one of them has written.
    by_commands = {
        Path(name).parts[0]
        for document in DOCUMENTS
        for name in re.findall(r"--(?:state-)?out[ =]([\w./-]+)", document.read_text())
    }
    assert not by_commands & {written.name for written in tmp_path.iterdir()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def tables(path):
    """(line number, records or None, rows of cells) of every table of a page, header excluded."""
    lines = path.read_text().splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("|"):
            at += 1
            continue
        first = at
        while at < len(lines) and lines[at].startswith("|"):
            at += 1
        named = re.match(r"<!-- records: (.*) -->$", lines[first - 1]) if first else None
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:at]]
        yield first + 1, named[1].split() if named else None, rows[2:]


def numbers_in(record):
    """Every number of a JSON value, at any depth, those inside of texts included."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from numbers_in(key)
            yield from numbers_in(value)
    elif isinstance(record, list):
        for value in record:
            yield from numbers_in(value)
    elif isinstance(record, str):
        yield from (float(found.replace(",", "")) for found in NUMBER.findall(record))
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield float(record)


def rounded_like(value, shown):
    """`value` with as many decimals, or as many digits and an exponent, as `shown` has."""
    mantissa, _, exponent = shown.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent:
        return float(f"{value:.{decimals}e}")
    return float(f"{value:.{decimals}f}")


def stands_in(shown, recorded):
    """Whether `shown` is a recorded number, rounded; a record may hold 0.12 for 12 per cent."""
    wanted = float(shown.replace(",", ""))
    plain = shown.replace(",", "")
    return any(
        rounded_like(value * scale, plain) == wanted for value in recorded for scale in (1, 100)
    )


MEASURED_TABLES = [
    pytest.param(ROOT / name, line, records, rows, id=f"{name}:{line}")
    for name in MEASURED
    for line, records, rows in tables(ROOT / name)
]


@pytest.mark.parametrize(("path", "line", "records", "rows"), MEASURED_TABLES)
def test_numbers_of_tables_stand_in_their_records(path, line, records, rows):
    shown = [number for row in rows for cell in row for number in NUMBER.findall(cell)]
    assert records or not shown, f"{path.name}:{line}: the table names no records"
    recorded = {
        value
        for record in records or ()
        for value in numbers_in(json.loads((path.parent / record).read_text()))
    }
    missing = [number for number in shown if not stands_in(number, recorded)]
    assert not missing, f"{path.name}:{line}: not in {records}: {missing}"


def test_a_number_that_is_not_recorded_is_found_out():
    recorded = set(numbers_in({"rows": [{"ms": 12.345, "share": 0.4567, "note": "T = 2,048"}]}))
    assert stands_in("12.3", recorded)
    assert stands_in("45.7", recorded)
    assert stands_in("2,048", recorded)
    assert not stands_in("12.4", recorded)
    assert not stands_in("2,049", recorded)


def test_the_sizes_of_architecture_are_those_that_the_program_prints():
    """`trellis models` prints the new rows where this fails; they belong under "Sizes"."""
    page = ROOT / "docs" / "architecture.md"
    all_mixers, presets = [rows for _, _, rows in tables(page)][-2:]
    printed = CliRunner().invoke(app, ["models", "125m"])
    lines = [line for line in printed.output.splitlines() if line.startswith("│")]
    found = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    again = "docs/architecture.md, Sizes: run `trellis models` and copy"
    assert all_mixers == found, f"{again} the table of 125m"
    rows = []
    for name in PRESETS:
        size = describe(name, "trellis")
        numbers = (size.blocks, size.width, size.heads)
        rows.append([name, *map(str, numbers), f"{size.parameters:,}"])
    assert presets == rows, f"{again} the parameters of trellis in every size"
