"""Batches are pure functions of (seed, step), and slices of one another."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellis.data.batches import Batches, validation_windows
from trellis.data.shuffle import mix, shuffled
from trellis.ops.cross_entropy import IGNORED


class Numbers:
    """A stream whose tokens are their own places."""

    def __init__(self, lengths):
        self.ends = np.cumsum(lengths).astype(np.uint64)
        self.tokens = int(self.ends[-1])

    def read(self, start, stop):
        assert 0 <= start < stop <= self.tokens
        return np.arange(start, stop, dtype=np.int64)


lengths = st.lists(st.integers(1, 60), min_size=3, max_size=30)
kinds = pytest.mark.parametrize("kind", ["packed", "contiguous"])


def make(lengths, kind="packed", context=8, rows=4, seed=0):
    stream = Numbers([*lengths, context * rows + 1])
    return stream, Batches(stream, kind=kind, context=context, rows=rows, seed=seed)


def sequences(batch):
    """(row, tokens, targets) of every sequence."""
    tokens, length = batch.input_ids.flatten().tolist(), batch.input_ids.shape[1]
    bounds = range(0, len(tokens) + 1, length) if batch.cu_seqlens is None else batch.cu_seqlens
    bounds = [int(b) for b in bounds]
    targets = batch.targets.flatten().tolist()
    return [(a // length, tokens[a:b], targets[a:b]) for a, b in zip(bounds, bounds[1:])]


@kinds
@given(lengths=lengths, step=st.integers(0, 40))
def test_sequences_stay_inside_documents_and_targets_follow(kind, lengths, step):
    stream, batches = make(lengths, kind)
    batch = batches.batch(step)
    ends = set(stream.ends.tolist())
    for _, tokens, targets in sequences(batch):
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert not ends & set(tokens[1:])  # a document's first token is not inside a sequence
        for token, target in zip(tokens, targets):
            assert target == (IGNORED if token + 1 in ends else token + 1)
    assert batch.predicted == (batch.targets != IGNORED).sum()
    rows = [row for row, _, _ in sequences(batch)]
    assert batch.first.tolist() == [rows.index(r) for r in range(4)]
    assert batch.last.tolist() == [len(rows) - 1 - rows[::-1].index(r) for r in range(4)]


@kinds
@given(lengths=lengths, step=st.integers(0, 40))
def test_slices_and_parts_make_up_the_batch(kind, lengths, step):
    _, batches = make(lengths, kind)
    whole = batches.batch(step)
    halves = [batches.batch(step, rows) for rows in (range(0, 1), range(1, 4))]
    assert torch.equal(torch.cat([h.input_ids for h in halves]), whole.input_ids)
    assert torch.equal(torch.cat([h.goes_on for h in halves]), whole.goes_on)
    assert {h.predicted for h in halves} == {whole.predicted}
    parts = [batches.batch(step, part=(i, 2)) for i in range(2)]
    assert torch.equal(torch.cat([p.targets for p in parts], dim=1), whole.targets)
    # A part goes on from the part before unless a document begins there.
    starts = {seq[0] for _, seq, _ in sequences(whole)}
    assert parts[1].goes_on.tolist() == [int(x) not in starts for x in parts[1].input_ids[:, 0]]


@kinds
def test_a_batch_is_a_function_of_seed_and_step(kind):
    _, batches = make([17, 5, 40, 31], kind)
    forwards = [batches.batch(step).input_ids for step in range(12)]
    _, again = make([17, 5, 40, 31], kind)
    backwards = [again.batch(step).input_ids for step in reversed(range(12))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards))
    _, other = make([17, 5, 40, 31], kind, seed=1)
    assert any(not torch.equal(a, other.batch(s).input_ids) for s, a in enumerate(forwards))


def test_an_epoch_reads_every_window_once_and_epochs_differ():
    stream, batches = make([50] * 40, rows=4)
    steps = batches.windows // 4
    epochs = []
    for first in (0, batches.windows):
        numbers = range(first, first + batches.windows)
        starts = [int(batches.batch(n // 4).input_ids[n % 4, 0]) for n in numbers]
        assert len(set(starts)) == batches.windows
        assert len({start % 8 for start in starts}) == 1
        assert max(starts) + 8 < stream.tokens
        epochs.append(starts)
    assert epochs[0] != epochs[1]
    assert steps * 4 * 8 <= stream.tokens


def test_contiguous_rows_go_on_where_they_stopped():
    _, batches = make([100, 3, 70, 90, 24], "contiguous")
    steps = batches.windows // 4
    before = batches.batch(0)
    assert not before.goes_on.any()
    carried = 0
    for step in range(1, steps):
        batch = batches.batch(step)
        for row in range(4):
            last, first = int(before.input_ids[row, -1]), int(batch.input_ids[row, 0])
            assert bool(batch.goes_on[row]) == (before.targets[row, -1] != IGNORED)
            if batch.goes_on[row]:
                assert first == last + 1
                carried += 1
        before = batch
    assert carried > steps
    assert not batches.batch(steps).goes_on.any()  # another order begins


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_cuts_start_new_sequences_and_lose_no_target(part):
    _, batches = make([200, 37], context=16)
    plain, cut = batches.batch(3, part=part), batches.batch(3, part=part, cut=4)
    assert torch.equal(plain.targets, cut.targets)
    assert not cut.goes_on.any()
    length = 16 // part[1]
    expected = set(range(0, 4 * length + 1, 4))
    assert expected <= set(cut.cu_seqlens.tolist())


def test_too_little_text_is_named():
    with pytest.raises(ValueError, match="has 20 tokens, but packed batches of 4 x 32 need at"):
        Batches(Numbers([20]), kind="packed", context=32, rows=4, seed=0)
    with pytest.raises(ValueError, match="need at least 129"):
        Batches(Numbers([100]), kind="contiguous", context=32, rows=4, seed=0)
    with pytest.raises(ValueError, match="kind must be one of packed, contiguous; got 'shuffled'"):
        Batches(Numbers([100]), kind="shuffled", context=32, rows=4, seed=0)


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 300])
def test_a_shuffle_is_a_permutation(count):
    for seed in range(3):
        assert sorted(shuffled(i, count, seed) for i in range(count)) == list(range(count))
    assert count < 15 or [shuffled(i, count, 1) for i in range(count)] != list(range(count))


def test_the_mixing_never_changes():
    """Stored batches of old runs depend on these bits."""
    assert mix(0) == 16294208416658607535  # splitmix64's first number
    assert mix(1, 2, 3) == 15020427595393229491


@given(tokens=st.integers(2, 500), asked=st.integers(1, 600))
def test_validation_windows_are_inside_and_apart(tokens, asked):
    starts = validation_windows(Numbers([tokens]), 8, asked)
    assert all(b - a >= 8 for a, b in zip(starts, starts[1:]))
    assert tokens < 9 or starts[-1] + 8 < tokens
    assert len(starts) <= max(1, asked // 8)
