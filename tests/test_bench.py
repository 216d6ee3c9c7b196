"""The benchmark itself: that it runs and says what it promises, not how fast anything is."""

import json
import os

import pytest
import torch
from tests.support import TABLE, make_corpus, recipe
from tests.test_cli import run

from trellis.bench import (
    decoding,
    forecasting,
    gpu,
    measure,
    mixers,
    model,
    ops,
    registers,
    rounding,
)
from trellis.cli.bench import Record, app
from trellis.mixers import MIXERS
from trellis.ops.memory import triton as backend
from trellis.threads import WAITING, sleep_while_waiting
from trellis.training.recipe import from_dict
from trellis.training.run import train


@pytest.mark.parametrize("name", ops.ALL)
def test_every_op_runs_forward_and_backward(name):
    made = ops.ALL[name](ops.Sizes(batch=1, heads=2, size=16), 70)
    ops.forward(made)
    ops.both_ways(made)
    assert all(leaf.grad is not None for leaf in made[1])


@pytest.mark.slow
def test_bench_ops_prints_tables_and_writes_files(tmp_path, monkeypatch):
    few = ["SDPA causal", "trellis exact, native"]
    monkeypatch.setattr(ops, "ALL", {name: ops.ALL[name] for name in few})
    monkeypatch.setattr(mixers, "WIDTH", 64)
    monkeypatch.setattr(mixers, "HEADS", 2)
    lines = []
    result = ops.run([32, 64], [16], 64, 1, lines.append)
    ops.draw(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    json.dumps(result)
    assert {(r["T"], r["pass"], r["op"]) for r in result["times"]} == {
        (t, p, n) for t in (32, 64) for p in ("forward", "forward+backward") for n in few
    }
    assert {row["op"] for row in result["memory"]} == set(few)
    peer_names = {f"{name} (transformers)" for name in mixers.PEERS}
    assert {row["mixer"] for row in result["mixers"]} == set(MIXERS) | peer_names
    text = "\n".join(lines)
    assert "of the GEMM rate" in text
    assert "threads" in text


def test_a_peer_that_fails_is_named_and_left_out(monkeypatch):
    def broken(sizes, tokens):
        raise RuntimeError("no GPU")

    ours = "trellis exact, native"
    monkeypatch.setattr(ops, "ALL", {"broken": broken, ours: ops.ALL[ours]})
    lines = []
    made = ops._runnable(ops.Sizes(batch=1, heads=1, size=16), 32, lines.append)
    assert list(made) == [ours]
    assert lines == ["| 32 | | broken | does not run here: no GPU | |"]


def test_timing_alternates():
    order = []
    timings = measure.alternate({n: lambda n=n: order.append(n) for n in "ab"}, 3)
    assert order == list("abababab")
    assert len(timings["a"].times) == 3


def test_the_portable_op_beside_attention(monkeypatch):
    few = {name: ops.PORTABLE[name] for name in ("SDPA causal", "chunked, exact")}
    monkeypatch.setattr(ops, "PORTABLE", few)
    lines = []
    ops.run_portable([32], 1, lines.append)
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 32 ")] == [*few, *few]


def test_a_training_step_is_timed_and_profiled(tmp_path):
    table = {**TABLE, "data": {"path": "nowhere", "context": 32}}
    lines = []
    model.run_training(from_dict(table), ["trellis", "transformer"], 97, 1, lines.append)
    assert lines[0].startswith("4 x 32 tokens, fp32, ")
    shares = [[float(cell[:-1]) for cell in line.split(" | ")[-3:-1]] for line in lines[3:]]
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| trellis", "| transformer"]
    assert all(0 < share < 100 for shares_of_one in shares for share in shares_of_one)


def test_the_cache_stays_flat_over_a_stream(tmp_path):
    lines = []
    model.run_stream(300, 3, tmp_path / "stream.png", lines.append)
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| 100", "| 200", "| 300"]
    assert "cache sizes seen: [105984]" in lines[5]
    assert (tmp_path / "stream.png").stat().st_size > 10_000


def test_a_stream_of_forecasts_keeps_its_size(tmp_path):
    said = []
    result = forecasting.run(700, 2, 2, 32, said.append)
    first, last = result["marks"]
    assert (first["rows"], last["rows"]) == (1, 700)
    assert first["state_bytes"] == last["state_bytes"]
    assert [again["patch"] for again in result["read_again"]] == [8, 16]
    assert all(again["times"] > 0 for again in result["read_again"])
    forecasting.draw(result, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 10_000
    assert any("rows/s as a stream" in line for line in said)


def test_the_time_of_a_token_in_every_decoder(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "copy_rate", lambda: 1e9)
    lines = []
    result = decoding.run("demo", [20], [1, 2], 2, lines.append)
    found = {(row["mixer"], row["decoder"], row["batch"]) for row in result["steps"]}
    assert found == {(m, d, b) for m in decoding.MIXERS for d in decoding.DECODERS for b in (1, 2)}
    decoding.draw(result, tmp_path / "decoding.png")
    assert (tmp_path / "decoding.png").stat().st_size > 10_000


def test_the_loss_with_weights_in_bf16(tmp_path):
    lines = []
    text = tmp_path / "text.txt"
    text.write_text("it was the best of times, it was the worst of times. " * 20)
    trained = tmp_path / "run"
    train(recipe(make_corpus(tmp_path / "corpus")), trained)
    result = decoding.run_weights(trained, text, 6, lines.append)
    exact, rounded, plain = result["losses"].values()
    assert exact == pytest.approx(plain, rel=1e-5)
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert lines[-2].startswith("| native, bf16 weights | ")
    with pytest.raises(ValueError, match="must have 16 x 5000 tokens at least; it has"):
        decoding.run_weights(trained, text, 5000, lines.append)


def test_work_beside_a_busy_process(monkeypatch):
    given, rates = [], iter([10.0, 4.0, 9.0, 8.0, 30.0, 2.0, 7.0, 6.0, 20.0, 3.0, 8.0, 7.0])

    def fresh(module, *arguments, env):
        given.append((env.get("OMP_WAIT_POLICY"), env.get("GOMP_SPINCOUNT")))
        return {"training": next(rates)}

    monkeypatch.setattr(measure, "in_fresh_process", fresh)
    others = {name: value for name, value in os.environ.items() if name not in WAITING}
    monkeypatch.setattr(os, "environ", others)
    sleep_while_waiting()
    lines = []
    result = decoding.run_busy(0.01, 3, lines.append)
    assert given == ([(None, None)] * 2 + [("passive", "3000")] * 2) * 3
    assert [row["busy"] for row in result["rates"]] == [3.0, 7.0]
    assert result["rates"][1]["idle_each"] == [9.0, 7.0, 8.0]
    assert "| training | as torch has it | 20 | 3 | 15% | 100% |" in lines
    assert "| training | as trellis sets it | 8 | 7 | 88% | 40% |" in lines


def test_a_choice_of_how_threads_wait_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    sleep_while_waiting()
    assert os.environ == {"OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize(
    "name",
    [
        "ops",
        "chunked",
        "model",
        "training",
        "stream",
        "decoding",
        "weights",
        "busy",
        "serve",
        "forecast",
    ],
)
def test_every_benchmark_is_a_command(name):
    assert name in {command.name for command in app.registered_commands}


def test_wrong_numbers_are_named():
    out = run("bench", "ops", "--lengths", "12,x")
    assert out.returncode != 0
    assert "--lengths must be whole numbers separated by commas; got '12,x'" in out.stderr


def test_a_record_keeps_what_was_printed_and_the_result(tmp_path):
    record = Record("bench-small")
    record.say("| T | ms |\n|---|---|")
    record.say("| 8 | 1.5 |")
    record.keep(tmp_path / "records", {"seconds": 0.0015})
    kept = json.loads((tmp_path / "records" / "bench-small.json").read_text())
    assert kept["printed"] == ["| T | ms |", "|---|---|", "| 8 | 1.5 |"]
    assert kept["result"] == {"seconds": 0.0015}
    assert kept["machine"]["cores"] >= 1


def test_roundings_of_bf16_stay_small():
    """The emulated kernels: y about as good as bf16 allows, states far better."""
    for row in rounding.run([70], lambda line: None):
        assert row["y"] < 5e-3, row
        if row["op"].startswith("Trellis, encode"):
            assert row["states"] < 2e-5, row
            assert row["y"] < 2 * row["chunked"], row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "registers"])
def test_without_a_gpu_or_triton_the_benchmark_says_so(name, monkeypatch):
    monkeypatch.setattr(backend, "missing", lambda: "Triton is not installed")
    action = gpu.device if name == "gpu" else lambda: registers.run([80], 64, [], print)
    with pytest.raises(ModuleNotFoundError, match="here: Triton is not installed"):
        action()


def test_estimates_count_both_passes():
    lines = []
    rows = registers.estimates(8, 12, 2048, 64, lines.append)
    forward = [row["ms"]["A100"] for row in rows[:3]]
    assert rows[-2]["ms"]["A100"] == pytest.approx(sum(forward))
    twice = registers.estimates(16, 12, 2048, 64, lines.append)
    assert twice[1]["ms"]["A100"] == pytest.approx(2 * rows[1]["ms"]["A100"])  # a second wave
