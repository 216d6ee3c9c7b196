"""Causal depthwise convolution with a carried tail, also over packed sequences.

    z_t[d] = bias[d] + sum over j = 0 .. W-1 of weight[d, W-1-j] x_{t-j}[d]
    y_t    = z_t, or SiLU(z_t)

Each channel d is convolved on its own, over the token itself and the W-1 tokens before it. The bias
is optional. The inputs before the first token of a sequence are its *tail*: the last W-1 inputs of
the call before, or zeros.

`causal_convolution_reference` defines it token by token. Without the kernel it is computed by W
shifted products; in a pack every sequence is laid out behind its own tail, so that none sees the
tokens of another.

Large fp32 tensors on the CPU go through a fused kernel (native/pointwise.cpp), 64 tokens at a time.
The backward of such a part computes z again, also for the W-1 tokens after it, because their
gradients reach into it:

    dx_t          = sum over j of weight[:, W-1-j] dz_{t+j}, plus the gradient of the returned tail
    dweight[:, j] = sum over t of dz_t x_{t-W+1+j}
    dbias         = sum over t of dz_t
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .native import pointwise

ACTIVATIONS = ("identity", "silu")
#: The largest width W that the kernel takes.
WIDEST = 16


def causal_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """z and the new tail, for x [N, T, D], weight [D, W], bias [D] and tail [N, W-1, D]."""
    window = tail
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([window, x[:, t : t + 1]], dim=1)  # [N, W, D]
        outputs.append((window * weight.T).sum(1))
        window = window[:, 1:]
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y if bias is None else y + bias, window


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "identity",
) -> tuple[Tensor, Tensor]:
    """y_t = activation(bias + sum over j of weight[:, W-1-j] * x_{t-j}), by channel.

    Args:
        x: [B, T, D], or [1, T, D] with cu_seqlens.
        weight: [D, W] with W >= 1, the newest token's weight last.
        bias: [D]; none by default.
        tail: [N, W-1, D], the W-1 inputs before each sequence, oldest first; zeros by default.
        cu_seqlens: [N+1] bounds of N packed sequences. Without it N = B.
        activation: "identity" or "silu".

    Returns:
        y of the shape of x, and the new tail [N, W-1, D].
    """
    checks.choice("activation", activation, ACTIVATIONS)
    biased = checks.present(bias=bias)
    checks.floats(x=x, weight=weight, **biased)
    checks.dimensions("x", x, "[B,T,D]")
    checks.dimensions("weight", weight, "[D,W]")
    batch, tokens, channels = x.shape
    checks.shape("weight", weight, (channels, weight.shape[1]), "[D,W]")
    if bias is not None:
        checks.shape("bias", bias, (channels,), "[D]")
    if weight.shape[1] < 1:
        raise ValueError(f"weight must be at least 1 wide; got shape {list(weight.shape)}")
    count = checks.sequences(batch, cu_seqlens, x.device)
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        checks.bounds(cu_seqlens, tokens)
    reach = weight.shape[1] - 1
    tail = checks.state("tail", tail, (count, reach, channels), "[N,W-1,D]", x, x.dtype)
    if weight.shape[1] <= WIDEST and pointwise.takes(x, weight, tail, *biased.values()):
        return fused_convolution(x, weight, bias, tail, cu_seqlens, activation == "silu")
    if cu_seqlens is None:
        padded = torch.cat([tail, x], dim=1)
        y = _convolve(padded, weight, bias, tokens)
        # A copy: the tail outlives the call and must not hold on to the whole input.
        tail = padded[:, tokens:].clone()
    else:
        y, tail = _packed(x, weight, bias, tail, cu_seqlens)
    return F.silu(y) if activation == "silu" else y, tail


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    """Shifted products: on a CPU faster than conv1d with groups, forward and backward."""
    weight = weight.to(padded.dtype)
    y = padded[:, :tokens] * weight[:, 0]
    if bias is not None:
        y = y + bias.to(padded.dtype)
    for j in range(1, weight.shape[1]):
        y = torch.addcmul(y, padded[:, j : j + tokens], weight[:, j])
    return y


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Lay each sequence out behind its own tail, convolve the row, take the tokens' outputs."""
    count, reach, channels = tail.shape
    tokens = x.shape[1]
    bounds = cu_seqlens.long()
    which = torch.arange(count, device=x.device)
    owner = torch.repeat_interleave(which, bounds.diff(), output_size=tokens)
    place = torch.arange(tokens, device=x.device) + (owner + 1) * reach
    back = torch.arange(reach, device=x.device)
    tail_place = (bounds[:-1] + which * reach)[:, None] + back

    padded = x.new_empty(tokens + count * reach, channels)
    padded = padded.index_copy(0, place, x[0])
    padded = padded.index_copy(0, tail_place.flatten(), tail.flatten(0, 1))
    y = _convolve(padded[None], weight, bias, tokens + (count - 1) * reach)
    end = (bounds[1:] + (which + 1) * reach)[:, None] - reach + back
    return y.index_select(1, place - reach), padded[end]


@torch.library.custom_op("trellis::convolution", mutates_args=(), device_types="cpu")
def fused_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """y and the new tail, by the kernel; the arguments are those of causal_convolution."""
    y, final = outputs = pointwise.fresh_like(x, tail)
    inputs = (x, weight.T, bias, tail, _bounds(x, cu_seqlens))
    pointwise.run("convolution", inputs, outputs, *_sizes(weight, tail), int(silu))
    return y, final


@torch.library.custom_op("trellis::convolution_backward", mutates_args=(), device_types="cpu")
def fused_convolution_backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias (an empty tensor if there is none) and tail."""
    dx, dweight, dbias, dtail = outputs = pointwise.fresh_like(x, weight, bias, tail)
    inputs = (dy, dfinal, x, weight.T, bias, tail, _bounds(x, cu_seqlens))
    pointwise.run("convolution_backward", inputs, outputs, *_sizes(weight, tail), int(silu))
    return dx, dweight, dbias, dtail


def _bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The first row of every sequence; a batch is a pack of equally long sequences."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is None:
        return torch.arange(batch + 1) * tokens
    return torch.tensor(checks.bounds(cu_seqlens, tokens))


def _sizes(weight: Tensor, tail: Tensor) -> tuple[int, int, int]:
    """The numbers of sequences and channels, and the width."""
    return tail.shape[0], weight.shape[0], weight.shape[1]


pointwise.differentiable(fused_convolution, fused_convolution_backward, like=(0, 3), graded=4)
