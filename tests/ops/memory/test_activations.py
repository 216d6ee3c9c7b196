"""The hand-written derivatives of phi against autograd."""

import pytest
import torch
from tests.support import relative_rms

from trellis.ops.memory.activations import FUNCTIONS, NORMALISING_PHI, PHI, PHI_NAMES


def points():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 11, generator=generator, dtype=torch.float64) * 2 for _ in range(3)]


@pytest.mark.parametrize("phi", PHI_NAMES)
def test_gradient_is_the_transposed_jacobian_applied_to_the_error(phi):
    z, target, _ = points()
    value, pull_back = torch.func.vjp(FUNCTIONS[phi], z)
    assert relative_rms(PHI[phi].gradient(z, target), pull_back(value - target)[0]) < 1e-13


@pytest.mark.parametrize("phi", PHI_NAMES)
def test_tangent_is_the_directional_derivative(phi):
    z, target, direction = points()

    def gradient(z):
        value, pull_back = torch.func.vjp(FUNCTIONS[phi], z)
        return pull_back(value - target)[0]

    _, change = torch.func.jvp(gradient, (z,), (direction,))
    _, moved = torch.func.jvp(FUNCTIONS[phi], (z,), (direction,))
    actual_change, actual_moved = PHI[phi].tangent(z, target, direction)
    assert relative_rms(actual_change, change) < 1e-12
    assert relative_rms(actual_moved, moved) < 1e-12


def test_ln_silu_has_a_jacobian_that_is_not_symmetric():
    z, target, _ = points()
    jacobian = torch.func.jacrev(FUNCTIONS["ln_silu"])(z[0])
    error = FUNCTIONS["ln_silu"](z[0]) - target[0]
    assert relative_rms(PHI["ln_silu"].gradient(z[0], target[0]), jacobian.T @ error) < 1e-13
    assert relative_rms(jacobian @ error, jacobian.T @ error) > 0.1


@pytest.mark.parametrize(
    ("phi", "size"), [("layernorm", 316.2), ("l2norm", 1000), ("ln_silu", 158.1)]
)
def test_normalising_phi_is_degenerate_at_zero(phi, size):
    assert phi in NORMALISING_PHI
    target = torch.randn(64, dtype=torch.float64)
    target -= target.mean()
    u = PHI[phi].gradient(torch.zeros_like(target), target)
    assert float(u.norm() / target.norm()) == pytest.approx(size, rel=1e-3)
