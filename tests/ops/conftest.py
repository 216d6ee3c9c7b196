import pytest

from trellis.ops.native import pointwise


@pytest.fixture(scope="module")
def fused_at_every_size():
    """The fused kernels also where plain PyTorch would be faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pointwise, "SMALLEST", 0)
        yield
