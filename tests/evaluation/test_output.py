import io

import pytest
from rich.console import Console

from trellis.evaluation import output
from trellis.evaluation.output import print_table, progress

HEADS = ["model", *(f"variant-{n}\n{n}K" for n in range(16))]
ROWS = [[name, *(f"{n}.{n:05d}" for n in range(16))] for name in ("a[bold]", "m[/]x")]


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(output, "_on_terminal", lambda: True)


def test_a_wide_table_is_several_whole_ones(terminal, capsys):
    print_table(HEADS, ROWS, "a title")
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    for row in ROWS:
        for cell in row[1:]:
            assert printed.count(f" {cell} ") == 2  # once for each model
    assert "…" not in printed
    assert printed.count("a[bold]") == printed.count("m[/]x") == printed.count("a title") > 1


def test_a_cell_that_is_wider_than_the_terminal_is_whole(terminal, capsys):
    print_table(["model", "x"], [["m" * 100, "1"]])
    assert "m" * 100 in capsys.readouterr().out


def test_without_a_terminal_a_table_is_one(capsys):
    print_table(HEADS, ROWS)
    assert capsys.readouterr().out.count("a[bold]") == 1


def test_progress_takes_any_name(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(
        output, "Console", lambda **_: Console(file=stream, force_terminal=True, width=80)
    )
    with progress("a[bold] {0} {x", 3) as advance:
        advance(3)
    assert "a[bold] {0} {x" in stream.getvalue()
    assert "3/3" in stream.getvalue()
