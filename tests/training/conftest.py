import pytest
import torch
from tests.support import make_corpus

from trellis.training import loop


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch):
    """A second per run is little for a person and much for all these tests."""
    monkeypatch.setitem(loop.PEAK_SIZES, "cpu", 256)


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that tests start: sums are the same with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
