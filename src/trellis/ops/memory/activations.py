"""The functions phi, f and psi of the memory, and what the chunked form needs of phi.

phi is differentiated twice by hand, because the backward of the memory needs the derivative of

    u(z) = J_phi(z)^T (phi(z) - target),        the gradient of 1/2 |phi(z) - target|^2.

u is itself a gradient, so du/dz is symmetric and one directional derivative serves both the
forward and the reverse direction.

Every epsilon sits inside a square root, beside the quantity that it keeps from zero:
layernorm divides by sqrt(variance + 1e-5), l2norm by sqrt(sum of squares + 1e-6). soft_ln_silu is
ln_silu with sqrt(variance + 0.1): a weak match stays weak, where ln_silu scales it up to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..norms import L2NORM_EPSILON, LAYERNORM_EPSILON
from ..norms import unit_length_reference as l2norm

SOFT_EPSILON = 0.1


def layernorm(z: Tensor, epsilon: float = LAYERNORM_EPSILON) -> Tensor:
    """Centre and scale the last dimension to unit variance; no learnable parameters."""
    return F.layer_norm(z, z.shape[-1:], eps=epsilon)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "layernorm": layernorm,
    "l2norm": l2norm,
    "ln_silu": lambda z: layernorm(F.silu(z)),
    "soft_ln_silu": lambda z: layernorm(F.silu(z), SOFT_EPSILON),
    "l2_silu": lambda z: l2norm(F.silu(z)),
    "softmax": lambda z: z.softmax(-1),
}

PHI_NAMES = ("identity", "silu", "gelu", "tanh", "layernorm", "l2norm", "ln_silu")
F_NAMES = ("ln_silu", "soft_ln_silu", "l2_silu", "softmax", "silu", "identity")
PSI_NAMES = PHI_NAMES
#: phi whose Jacobian is huge at z = 0, so that a memory that starts at zero overshoots.
NORMALISING_PHI = ("layernorm", "l2norm", "ln_silu")


class Phi(Protocol):
    """phi with the derivatives that the chunked form uses. All arguments are [..., m]."""

    linear: bool

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """u = J^T (phi(z) - target)."""

    def tangent(self, z: Tensor, target: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """(du/dz direction, J direction)."""


class _Identity:
    linear = True

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        return z - target

    def tangent(self, z: Tensor, target: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return direction, direction


class Elementwise:
    """phi that acts on each entry alone: its Jacobian and du/dz are diagonal."""

    linear = False
    function: Callable[[Tensor], Tensor]
    #: J^T error, an operator of (error, z), or of (error, phi(z)) with `from_value`.
    backward: Any
    from_value = False

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        value = self.function(z)
        return self.backward.default(value - target, value if self.from_value else z)

    def write(self, z: Tensor, step: Tensor, start: Tensor, out: Tensor) -> None:
        """out = step u, in the fewest calls; start is -step * target."""
        value = self.function(z)
        error = torch.addcmul(start, value, step)
        self.backward.grad_input(error, value if self.from_value else z, grad_input=out)

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(phi(z), phi'(z), phi''(z))"""
        raise NotImplementedError

    def diagonals(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The diagonals of du/dz and of J."""
        value, slope, curvature = self.derivatives(z)
        return torch.addcmul(slope * slope, curvature, value - target), slope

    def tangent(self, z: Tensor, target: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        change, slope = self.diagonals(z, target)
        return change * direction, slope * direction


class _Silu(Elementwise):
    function = staticmethod(F.silu)
    backward = torch.ops.aten.silu_backward

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigmoid = z.sigmoid()
        value = z * sigmoid
        rest = 1 - sigmoid
        curvature = sigmoid * rest * (2 + z * (rest - sigmoid))
        return value, torch.addcmul(sigmoid, value, rest), curvature


class _Gelu(Elementwise):
    """The exact form, z times the normal distribution function."""

    function = staticmethod(F.gelu)
    backward = torch.ops.aten.gelu_backward

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cumulative = torch.special.ndtr(z)
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        slope = torch.addcmul(cumulative, z, density)
        return z * cumulative, slope, density * (2 - z * z)


class _Tanh(Elementwise):
    function = staticmethod(torch.tanh)
    backward = torch.ops.aten.tanh_backward
    from_value = True

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = z.tanh()
        slope = 1 - value * value
        return value, slope, -2 * value * slope


class _Normalise:
    """n(z) = scale * P z: layernorm (P centres, mean of squares) or l2norm (P = 1, sum of squares).

    Its Jacobian is symmetric: J v = scale * (P v - share * n (n . v)).
    """

    linear = False

    def __init__(self, centred: bool):
        self.centred = centred

    def _project(self, v: Tensor) -> Tensor:
        return v - v.mean(-1, keepdim=True) if self.centred else v

    def _share(self, z: Tensor) -> float:
        return 1.0 / z.shape[-1] if self.centred else 1.0

    def _normalise(self, z: Tensor) -> tuple[Tensor, Tensor]:
        projected = self._project(z)
        squares = projected.square().sum(-1, keepdim=True) * self._share(z)
        epsilon = LAYERNORM_EPSILON if self.centred else L2NORM_EPSILON
        scale = (squares + epsilon).rsqrt()
        return projected * scale, scale

    def _jacobian(self, normal: Tensor, scale: Tensor, v: Tensor) -> Tensor:
        along = _dot(normal, v) * self._share(v)
        return scale * (self._project(v) - normal * along)

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        normal, scale = self._normalise(z)
        return self._jacobian(normal, scale, normal - target)

    def tangent(self, z: Tensor, target: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        normal, scale = self._normalise(z)
        share = self._share(z)
        error = normal - target
        moved = self._jacobian(normal, scale, direction)
        # d(scale)/scale = -share * scale * (n . direction)
        relative = -share * scale * _dot(normal, direction)
        turned = moved * _dot(normal, error) + normal * _dot(moved, error)
        change = (
            relative * self._jacobian(normal, scale, error)
            - share * scale * turned
            + self._jacobian(normal, scale, moved)
        )
        return change, moved


class _LnSilu:
    """layernorm(silu(z)): J^T = diag(silu') J_layernorm, which is not J."""

    linear = False

    def __init__(self) -> None:
        self.inner = _Silu()
        self.outer = _Normalise(centred=True)

    def gradient(self, z: Tensor, target: Tensor) -> Tensor:
        value = F.silu(z)
        return torch.ops.aten.silu_backward(self.outer.gradient(value, target), z)

    def tangent(self, z: Tensor, target: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        value, slope, curvature = self.inner.derivatives(z)
        change, moved = self.outer.tangent(value, target, slope * direction)
        return curvature * direction * self.outer.gradient(value, target) + slope * change, moved


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


PHI: dict[str, Phi] = {
    "identity": _Identity(),
    "silu": _Silu(),
    "gelu": _Gelu(),
    "tanh": _Tanh(),
    "layernorm": _Normalise(centred=True),
    "l2norm": _Normalise(centred=False),
    "ln_silu": _LnSilu(),
}
