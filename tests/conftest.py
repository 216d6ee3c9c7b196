import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples every time: a failure on one machine is a failure on all.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("TRELLIS_EXAMPLES", "6")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")

# Nothing is fetched in the tests.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With TRELLIS_NO_SKIPS, as some make targets have it, a test that skips has failed."""
    report = yield
    if report.skipped and os.environ.get("TRELLIS_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {call.excinfo.value}"
    return report
