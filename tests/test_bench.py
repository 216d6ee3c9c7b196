"""The benchmark itself: that it runs and says what it promises, not how fast anything is."""

import json

import pytest
from tests.test_cli import run

from trellis.bench import measure, mixers, ops
from trellis.mixers import MIXERS


@pytest.mark.parametrize("name", ops.ALL)
def test_every_op_runs_forward_and_backward(name):
    made = ops.ALL[name](ops.Sizes(batch=1, heads=2, size=16), 70)
    ops.forward(made)
    ops.both_ways(made)
    assert all(leaf.grad is not None for leaf in made[1])


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


def test_wrong_numbers_are_named():
    out = run("bench", "ops", "--lengths", "12,x")
    assert out.returncode != 0
    assert "--lengths must be whole numbers separated by commas; got '12,x'" in out.stderr
