"""TTT-Linear against gradient steps that autograd takes, and against flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F
from tests.support import projection

from trellis.ops import ttt_linear

B, T, H, D, MINIBATCH = 2, 80, 3, 16, 16
NAMES = ("q", "k", "v", "eta", "theta", "norm_weight", "norm_bias", "weight", "bias")


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    lead = (B, T, H)
    tensors = {
        "q": normal(*lead, D),
        "k": normal(*lead, D),
        "v": normal(*lead, D),
        "eta": torch.sigmoid(normal(*lead)) / D,
        "theta": 1 / torch.arange(1, MINIBATCH + 1, dtype=dtype) + 0.1 * normal(MINIBATCH).abs(),
        "norm_weight": 1 + 0.2 * normal(H, D),
        "norm_bias": 0.2 * normal(H, D),
        "weight": 0.3 * normal(B, H, D, D),
        "bias": 0.3 * normal(B, H, D),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def ours(given, backend):
    weight, bias = given["weight"], given["bias"]
    y, final = ttt_linear(
        *(given[name] for name in NAMES[:-2]), initial_state=(weight, bias),
        output_final_state=True, backend=backend,
    )  # fmt: skip
    return {"y": y, "weight": final.weight, "bias": final.bias}


def compared(mine, theirs, mine_given, theirs_given, names=NAMES):
    """Outputs side by side, and the gradients of a random linear function of them."""
    pairs = {name: (mine[name], theirs[name]) for name in theirs}
    for found in (mine, theirs):
        projection((found[name] for name in theirs), torch.float32).backward()
    return pairs | {f"d{n}": (mine_given[n].grad, theirs_given[n].grad) for n in names}


def primal(given):
    """The inner loss as it is written, differentiated by autograd, a model for every token."""
    q, k, v, eta, theta, norm_weight, norm_bias, weight, bias = (given[n] for n in NAMES)

    def f(x, weight, bias):  # x [B, H, D]
        z = torch.einsum("bhi,bhij->bhj", x, weight) + bias
        return x + F.layer_norm(z, (D,), eps=1e-6) * norm_weight + norm_bias

    outputs = []
    for begin in range(0, T, MINIBATCH):
        step_weight, step_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        start = weight, bias
        for place in range(MINIBATCH):
            t = begin + place
            # As a loss of (W, b) alone: q, k and v stay in the graph for the outer gradients.
            loss = 0.5 * (f(k[:, t], *start) - v[:, t]).square()
            loss = (eta[:, t, :, None] * loss).sum()
            more_weight, more_bias = torch.autograd.grad(loss, start, create_graph=True)
            step_weight, step_bias = step_weight + more_weight, step_bias + more_bias
            weight, bias = (
                start[0] - theta[place] * step_weight,
                start[1] - theta[place] * step_bias,
            )
            outputs.append(f(q[:, t], weight, bias))
    return {"y": torch.stack(outputs, dim=1), "weight": weight, "bias": bias}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
def test_gradient_steps_by_autograd(backend, dtype, limit, agrees):
    mine, theirs = problem(dtype), problem(dtype)
    pairs = compared(ours(mine, backend), primal(theirs), mine, theirs)
    agrees(f"TTT-Linear, {backend}, {dtype}", "steps by torch.autograd", pairs, limit)


@pytest.mark.fla
def test_flash_linear_attention(agrees, fla):
    """fla's factor eta_t belongs to the token that reads: ours with eta = 1 and theta in its place.

    Its output is z + LN(z) for z = q W_t + b_t, ours q + LN(z): what it has beyond our LN(z) must
    be a z of which that is the norm. Gradients are compared through the states.
    """
    naive = fla("ops.ttt.naive")
    mine, theirs = problem(), problem()
    with torch.no_grad():
        mine["eta"].fill_(1.0)
        for given in (mine, theirs):
            given["theta"] /= D
    eta = theirs["theta"].repeat(T // MINIBATCH)[None, :, None, None].expand(B, T, H, 1)
    y, weight, bias = naive.chunk_ttt_linear_ref(
        theirs["q"].detach().clone(),  # it is scaled in place
        *(theirs[n] for n in ("k", "v", "norm_weight", "norm_bias")), eta, scale=1.0,
        mini_batch_size=MINIBATCH, initial_state=theirs["weight"],
        initial_state_bias=theirs["bias"][:, :, None], output_final_state=True,
    )  # fmt: skip
    found = ours(mine, "chunked")
    normed = found["y"] - mine["q"]
    again = F.layer_norm(y - normed, (D,), eps=1e-6) * mine["norm_weight"] + mine["norm_bias"]
    names = ("k", "v", "theta", "norm_weight", "norm_bias", "weight", "bias")
    states = {"weight": weight, "bias": bias[:, :, 0]}
    pairs = {"LN(z)": (normed, again)} | compared(found, states, mine, theirs, names)
    agrees("TTT-Linear", "flash-linear-attention (naive)", pairs)
