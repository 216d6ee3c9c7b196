"""How tokens are drawn: the right chances, and nothing of it depends on the rows beside."""

import pytest
import torch

from trellis.models import sampling
from trellis.models.sampling import Sampling, choose, seeded

WAYS = [
    Sampling(0),
    Sampling(1.0, 1.0),
    Sampling(0.7, 0.9),
    Sampling(1.3, 1.0, 5),
    Sampling(2.0, 0.999),
    Sampling(1.0, 0.5, 300),
    Sampling(1e-300, 0.5),
]


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits = 3 * torch.randn(len(WAYS), 1000)
    together = [seeded(n) for n in range(len(WAYS))]
    rows = [choose(logits + step, WAYS, together) for step in range(20)]
    for n, way in enumerate(WAYS):
        source = seeded(n)
        alone = [choose((logits + step)[n : n + 1], [way], [source]) for step in range(20)]
        assert [row[n] for row in rows] == [token for (token,) in alone], way


@pytest.mark.parametrize("first", [4, 256])  # more than the first few are needed, or never
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, None), (0.8, None), (0.8, 7), (1.0, 7)])
def test_chances(first, top_p, top_k, monkeypatch):
    monkeypatch.setattr(sampling, "FIRST", first)
    logits = torch.randn(12)
    values, order = (logits / 1.5).sort(descending=True)
    chances = values[:top_k].softmax(-1)
    chances[1:] *= (chances.cumsum(-1) - chances)[1:] < top_p
    expected = torch.zeros(12).index_add(0, order[:top_k], chances / chances.sum())
    count = 5000
    ways, source = [Sampling(1.5, top_p, top_k)] * count, seeded(3)
    drawn = choose(logits.expand(count, 12), ways, [source] * count)
    found = torch.bincount(torch.tensor(drawn), minlength=12) / count
    assert (found - expected).abs().max() < 0.03
    assert not found[expected == 0].any()
