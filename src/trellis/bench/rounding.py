"""`trellis bench rounding`: what the roundings of the bf16 kernels cost, emulated on a CPU.

Every product, and every tensor that a kernel stores, is rounded where the GPU rounds it; all else
is fp32. The errors are those against fp64 on the same bf16 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import delta_rule, trellis_memory
from ..ops.memory.activations import FUNCTIONS, PHI, l2norm

HEADS, SIZE, TILE, CHUNK = 2, 64, 16, 64


def half(x: Tensor) -> Tensor:
    """x rounded to bf16, in fp32."""
    return x.bfloat16().float()


def halves(x: Tensor) -> Tensor:
    """x as the sum of two bf16 numbers, the first of which is cut off, not rounded."""
    top = (x.view(torch.int32) & -65536).view(torch.float32)
    return top + half(x - top)


class Written:
    """A pass's writes as `write` leaves them. All tensors are [H, T, n]."""

    def __init__(self, x: Tensor, target: Tensor, log_beta: Tensor, gamma: Tensor, phi: str):
        self.x, tokens = x, x.shape[1]
        memory = x.new_zeros(x.shape[0], target.shape[2], x.shape[2])
        writes, saved = [], []
        for first in range(0, tokens, TILE):
            if first % CHUNK == 0:
                saved.append(half(memory))
            xs, decays = x[:, first : first + TILE], log_beta[:, first : first + TILE].cumsum(1)
            before = decays - log_beta[:, first : first + TILE]
            gram = xs @ xs.mT
            base = (xs @ halves(memory).mT) * before.exp()[..., None]
            rows: list[Tensor] = []
            for t in range(xs.shape[1]):
                z = base[:, t]
                if t:
                    weights = (before[:, t, None] - decays[:, :t]).exp() * gram[:, t, :t]
                    z = z - (weights[..., None] * torch.stack(rows, 1)).sum(1)
                u = PHI[phi].gradient(z, target[:, first + t])
                rows.append(u * gamma[:, first + t, None])
            new = torch.stack(rows, 1)
            end = (decays[:, -1:] - decays).exp()[..., None]
            memory = decays[:, -1, None, None].exp() * memory - halves(new * end).mT @ xs
            writes.append(new)
        self.writes, self.memory, self.saved = half(torch.cat(writes, 1)), memory, saved
        self.log_beta = log_beta

    def read(self, query: Tensor, transposed: bool) -> Tensor:
        keys, values = (self.writes, self.x) if transposed else (self.x, self.writes)
        out = []
        for i, first in enumerate(range(0, query.shape[1], CHUNK)):
            part = slice(first, first + CHUNK)
            q, decays = half(query[:, part]), self.log_beta[:, part].cumsum(1)
            within = (decays[:, :, None] - decays[:, None]).exp().tril()
            matrix = self.saved[i] if transposed else self.saved[i].mT
            scores = halves((q @ keys[:, part].mT * within).contiguous())
            out.append(decays.exp()[..., None] * (q @ matrix) - scores @ values[:, part])
        return torch.cat(out, 1)


def memory(inputs: list[Tensor], value_pass: str, f: str) -> tuple[Tensor, Tensor, Tensor]:
    """y and both final memories, by the emulated kernels."""
    q, k, v, alpha, log_beta, gamma = inputs
    encode = value_pass == "encode"
    keys = Written(k, alpha, log_beta, gamma, "silu")
    x, target = (v, alpha) if encode else (half(l2norm(alpha)), v)
    values = Written(x, target, log_beta, gamma, "silu" if encode else "identity")
    r = FUNCTIONS[f](keys.read(q, False))
    return half(values.read(r, encode)), keys.memory, values.memory


def gated_delta_net(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """y and the final state of the chunked kernels of flash-linear-attention, emulated.

    What they store (the transformed keys and values, the states at chunks' starts, the corrected
    values) and what they multiply is bf16; the state is fp32.
    """
    q, k, v, _, log_beta, beta = inputs
    state, out = q.new_zeros(q.shape[0], k.shape[2], v.shape[2]), []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        qs, ks, vs, bs = q[:, part], k[:, part], v[:, part], beta[:, part, None]
        decays = log_beta[:, part].cumsum(1)
        within = (decays[:, :, None] - decays[:, None]).exp().tril()
        eye = torch.eye(qs.shape[1])
        solved = half(torch.linalg.inv(eye + (bs * (ks @ ks.mT) * within).tril(-1)))
        w = half(solved @ half(ks * bs * decays.exp()[..., None]))
        new = half(half(solved @ half(vs * bs)) - w @ half(state))
        scores = half(qs @ ks.mT * within)
        out.append(decays.exp()[..., None] * (qs @ half(state)) + scores @ new)
        end = (decays[:, -1:] - decays).exp()[..., None]
        state = decays[:, -1, None, None].exp() * state + ks.mT @ half(new * end)
    return half(torch.cat(out, 1)), state


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in root mean square."""
    return float((actual.double() - expected).norm() / expected.norm())


def run(lengths: list[int], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """`report` receives the lines of a Markdown table."""
    rows = []
    report("| T | op | y | final states | chunked backend, y |\n|---|---|---|---|---|")
    for tokens in lengths:
        generator = torch.Generator().manual_seed(0)

        def normal(*last: int, t: int = tokens, g: torch.Generator = generator) -> Tensor:
            return torch.randn(HEADS, t, *last, generator=g)

        given = [half(F.normalize(normal(SIZE), dim=-1)) for _ in range(3)] + [half(normal(SIZE))]
        given += [-0.05 * normal().sigmoid(), normal().sigmoid()]
        wide = [t.double().transpose(0, 1)[None] for t in given]
        named = [t.bfloat16() for t in wide[:4]] + [t.float() for t in wide[4:]]
        for value_pass, f in (("encode", "ln_silu"), ("encode", "silu"), ("decode", "silu")):
            options = {"value_pass": value_pass, "f": f}
            y, state = trellis_memory(*wide, output_final_state=True, backend="chunked", **options)  # type: ignore[arg-type]
            portable, _ = trellis_memory(*named, backend="chunked", **options)  # type: ignore[arg-type]
            assert state is not None
            found = memory(given, value_pass, f)
            expected = (y[0].transpose(0, 1), state.keys[0], state.values[0])
            errors = [error(one, other) for one, other in zip(found, expected)]
            rows.append({"T": tokens, "op": f"Trellis, {value_pass}, f = {f}", "y": errors[0],
                         "states": max(errors[1:]), "chunked": error(portable, y)})  # fmt: skip
        q, k, v, _, decay, beta = wide
        y, final = delta_rule(
            q, k, v, beta, decay, scale=1.0, output_final_state=True, backend="chunked"
        )
        assert final is not None
        found_y, found_state = gated_delta_net(given)
        rows.append({"T": tokens, "op": "Gated DeltaNet", "y": error(found_y, y[0].transpose(0, 1)),
                     "states": error(found_state, final[0]), "chunked": None})  # fmt: skip
        for row in rows[-4:]:
            portable_error = "" if row["chunked"] is None else f"{row['chunked']:.1e}"
            report(f"| {tokens} | {row['op']} | {row['y']:.1e} | {row['states']:.1e} | "
                   f"{portable_error} |")  # fmt: skip
    return rows
