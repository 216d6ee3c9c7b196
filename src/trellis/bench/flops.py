"""What mixers compute, counted by torch.utils.flop_counter, beside what their formulas say.

The formulas count the recurrence as it is defined, whichever algorithm computes it. So the counter
watches the definition: the backend "reference", fed one token at a time. It sees matrix products
and, by rules added here, products and sums of whole memories, one operation per entry of each.
Models are on the meta device: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..mixers import Mixer, build_mixer
from ..mixers.abc import ABCMixer
from ..mixers.base import named_tensors
from ..mixers.layers import ShortConvolution
from ..mixers.mamba2 import Mamba2Mixer
from ..models.flops import linear_entries


class Counted(NamedTuple):
    """Operations per token: of matrix products (linear maps left out), and on whole memories."""

    products: float
    pointwise: float

    @property
    def total(self) -> float:
        return self.products + self.pointwise


def definition(
    name: str, dim: int, heads: int, /, tokens: int, **fields: Any
) -> tuple[Mixer, Counted]:
    """A mixer, and what its definition computes per token, on average over `tokens`."""
    fields = fields if name == "transformer" else {**fields, "backend": "reference"}
    with torch.device("meta"), torch.no_grad():
        mixer = build_mixer(name, dim, heads, **fields).requires_grad_(False)
        state = mixer.init_state(1)
        token = torch.zeros(1, 1, dim)
        with FlopCounterMode(display=False, custom_mapping=_on_memories(mixer)) as counter:
            for _ in range(tokens):
                _, state = mixer(token, state)
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    pointwise = sum(found.pop(str(op), 0) for op in _POINTWISE)
    return mixer, Counted(
        sum(found.values()) / tokens - 2 * linear_entries(mixer), pointwise / tokens
    )


def elsewhere(mixer: Mixer) -> dict[str, float]:
    """What `definition` and the formula do not share, per token: formula minus counter.

    Convolutions are counted as conv1d; the definition makes them of shifted products.
    """
    found: dict[str, float] = {}
    convolutions = [m for m in mixer.modules() if isinstance(m, ShortConvolution)]
    if convolutions:
        found["convolutions"] = sum(map(_convolution, convolutions))
    if isinstance(mixer, Mamba2Mixer):  # a product and a sum per channel, not per memory
        found["D x"] = 2 * mixer.inner_dim
    if isinstance(mixer, ABCMixer) and mixer.config.write == "time":
        # The sums of exponentials, one per slot, are products with a triangle of ones.
        found["running sums"] = -2 * mixer.heads * mixer.config.slots
    return found


def products(call: Callable[[], object]) -> int:
    """Operations of all matrix products during a call, those of attention among them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


#: Operations per entry of the result.
_POINTWISE = {
    torch.ops.aten.mul: 1,
    torch.ops.aten.add: 1,
    torch.ops.aten.sub: 1,
    torch.ops.aten.addcmul: 2,
}


def _on_memories(mixer: Mixer) -> dict[Any, Callable[..., int]]:
    """Rules for the counter: pointwise operations whose result is as large as a memory."""
    state = mixer.init_state(1)
    least = min(  # the keys' memory may be smaller than the values'
        (tensor.numel() for _, tensor in named_tensors(state) if tensor.dim() > 3), default=0
    )
    if not least:  # a cache, to which nothing is added in place
        return {op: lambda *_, **__: 0 for op in _POINTWISE}

    def rule(each: int) -> Callable[..., int]:
        def count(*_: Any, out_shape: Any = None, **__: Any) -> int:
            size = torch.Size(out_shape).numel()
            return each * size if size >= least else 0

        return count

    return {op: rule(each) for op, each in _POINTWISE.items()}


def _convolution(convolution: ShortConvolution) -> int:
    channels, width = convolution.weight.shape
    x = torch.zeros(1, channels, width, device="meta")  # one token and all that it sees
    weight = torch.zeros(channels, 1, width, device="meta")
    return products(lambda: F.conv1d(x, weight, groups=channels))
