import inspect
import json
import os
import subprocess
import sys

import pytest

import trellis

typer = pytest.importorskip("typer", reason="the command needs typer")


def run(*arguments):
    command = [sys.executable, "-m", "trellis.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_models_prints_a_row_for_every_mixer():
    out = run("models", "125m")
    assert out.returncode == 0, out.stderr
    assert "123,341,808" in out.stdout  # trellis
    assert "123,551,232" in out.stdout  # transformer
    assert "grows" in out.stdout


def test_the_version():
    out = run("--version")
    assert (out.returncode, out.stdout) == (0, f"trellis {trellis.__version__}\n")


def test_an_unknown_preset_is_named():
    out = run("models", "2b", "--quiet")
    assert out.returncode == 1
    assert out.stderr.startswith("trellis: preset must be one of 125m")
    assert "Traceback" not in out.stderr


def commands(app):
    """The functions of all commands of the program, and of its groups."""
    yield from (info.callback for info in app.registered_commands)
    for group in app.registered_groups:
        yield from commands(group.typer_instance)


def test_every_command_has_json_and_quiet():
    from trellis.cli import app

    found = list(commands(app))
    assert len(found) > 20
    for command in found:
        assert {"as_json", "quiet"} <= set(inspect.signature(command).parameters), command.__name__


def test_help_keeps_brackets_and_wraps_paragraphs():
    out = run("compare", "--help")
    assert out.returncode == 0, out.stderr
    assert "section [compare] names the variants" in out.stdout
    assert "with or without [compare]" in out.stdout
    text = " ".join(line.strip(" │") for line in out.stdout.splitlines())
    assert "without it, all mixers are compared" in text


def test_json_is_all_that_is_printed():
    from typer.testing import CliRunner

    from trellis.cli import app

    def found(*options):
        return CliRunner().invoke(app, ["models", "125m", *options])

    out = found("--json")
    assert out.exit_code == 0, out.stderr
    sizes = json.loads(out.stdout)["sizes"]["125m"]
    assert sizes["trellis"]["parameters"] == 123_341_808
    assert sizes["transformer"]["state_bytes"] is None
    assert "123,341,808" in out.stderr
    out = found("--json", "--quiet")
    assert (json.loads(out.stdout)["sizes"]["125m"], out.stderr) == (sizes, "")
    out = found("--quiet")
    assert (out.exit_code, out.stdout, out.stderr) == (0, "", "")


def test_what_was_left_out_is_an_error_after_the_result(capsys):
    from trellis.cli.options import reporting

    command = reporting(lambda: {"found": 3, "left_out": ["gpt2 was not measured"]})
    with pytest.raises(SystemExit, match="trellis: gpt2 was not measured"):
        command(as_json=True, quiet=False)
    assert json.loads(capsys.readouterr().out)["found"] == 3


@pytest.mark.parametrize(
    ("asked", "answer"), [("source_bash", "complete -o"), ("complete_bash", "train")]
)
def test_the_shell_completes(asked, answer):
    code = "import sys; sys.argv = ['trellis']; from trellis.cli import main; main()"
    entered = {"COMP_WORDS": "trellis tra", "COMP_CWORD": "1", "_TRELLIS_COMPLETE": asked}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **entered}
    )
    assert answer in out.stdout
