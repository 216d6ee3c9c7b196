"""The kernels as operators of PyTorch: `write` for the writes of one or two passes, `read`, `step`.

They see tensors [B, T, H, ...], contiguous, x, target, query, writes, z and the saved memories in
one dtype. Nothing here waits for the device: buffers and grids follow from shapes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import refuse_double_backward
from . import kernels

#: Most tokens of a chunk, and of a mini-batch in stale mode. In fp32, whose tiles take twice the
#: registers, exact mode has half of it.
CHUNK = 64
#: How a kernel multiplies tiles of a dtype.
PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32x3"}
#: Slots of a program of the sequential kernels, and rows of `coupling` that are loaded ahead.
SLOTS, AHEAD = 16, 6


def configuration(kernel: str, capability: int, dtype: torch.dtype, size: int) -> dict[str, int]:
    """Columns that a kernel works on at once (block), warps and stages.

    kernel: its name. capability: 80, 90, 100. size: the larger side of the memories. Chosen so
    that registers do not spill (docs/gpu.md); `trellis bench gpu --tune` measures others.
    """
    wide = dtype == torch.float32
    if kernel in ("prepare", "write", "write_back"):
        return {"block": 64, "num_warps": 2 if wide or size > 64 else 1, "num_stages": 1}
    block = 32 if wide or capability < 90 else 64
    if wide and kernel == "read" and capability >= 100:
        block = 16
    return {"block": block, "num_warps": 4, "num_stages": 1}


class Layout(NamedTuple):
    """Where the chunks of all sequences lie.

    sequences: N. chunk: tokens of a chunk. extra: places of a sequence beyond tokens // chunk.
    places: of all sequences.
    """

    batch: int
    tokens: int
    heads: int
    sequences: int
    chunk: int
    extra: int
    places: int

    @staticmethod
    def of(x: Tensor, minibatch: int, cu: Tensor | None) -> Layout:
        batch, tokens, heads = x.shape[:3]
        if minibatch == 1:
            chunk, extra = CHUNK // 2 if x.dtype == torch.float32 else CHUNK, 1
        else:
            chunk, extra = CHUNK // minibatch * minibatch, 3
        if cu is None:
            places = batch * (tokens // chunk + extra)
            return Layout(batch, tokens, heads, batch, chunk, extra, places)
        sequences = cu.shape[0] - 1
        places = tokens // chunk + extra * sequences
        return Layout(batch, tokens, heads, sequences, chunk, extra, places)

    def common(self, minibatch: int, packed: bool) -> dict[str, Any]:
        return {"H": self.heads, "S": self.chunk, "MB": minibatch, "PACKED": packed}


def owners(x: Tensor, minibatch: int, cu: Tensor) -> Tensor:
    """The sequence that each place of a pack belongs to."""
    layout = Layout.of(x, minibatch, cu)
    first = cu[:-1] // layout.chunk
    first = first + layout.extra * torch.arange(layout.sequences, device=cu.device)
    places = torch.arange(layout.places, device=cu.device)
    return torch.searchsorted(first, places, right=True) - 1


def padded(size: int) -> int:
    """The power of two, at least 16, that a tile of `size` columns is padded to."""
    return max(16, 1 << (size - 1).bit_length())


def capability(device: torch.device) -> int:
    """Such as 90; that of the smallest GPU in the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Kernels start on the current device: makes it that of the tensors."""
    if device.type != "cuda":
        yield
    else:
        with torch.cuda.device(device):
            yield


def _tuned(kernel: str, x: Tensor, *sizes: int) -> dict[str, Any]:
    return dict(configuration(kernel, capability(x.device), x.dtype, max(sizes)))


class _Pass(NamedTuple):
    """The tensors of one pass. The anchor is given in stale mode only."""

    x: Tensor
    target: Tensor
    log_beta: Tensor
    gamma: Tensor
    memory: Tensor
    anchor: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """D, M"""
        return self.x.shape[3], self.target.shape[3]


def _passes(tensors: list[Tensor], minibatch: int) -> list[_Pass]:
    each = 5 if minibatch == 1 else 6
    return [_Pass(*tensors[i : i + each]) for i in range(0, len(tensors), each)]


def _sizes(passes: list[_Pass], phis: list[str]) -> dict[str, Any]:
    """The constants of `write` and `write_back` that differ between passes; M2 = 0: only one."""
    found: dict[str, Any] = {"D2": 0, "M2": 0, "BD2": 0, "PHI2": ""}
    for i, (one, phi) in enumerate(zip(passes, phis), 1):
        d, m = one.sizes
        found |= {f"D{i}": d, f"M{i}": m, f"BD{i}": padded(d), f"PHI{i}": phi}
    return found


def _prepare(
    one: _Pass, phi: str, after: bool, layout: Layout, cu: Tensor | None, owner: Tensor | None,
    z: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """coupling, started, ended, whole and, with z, which is for the backward, curve."""
    x = one.x
    tiles = layout.places * layout.chunk // 16
    shapes = ((16, 16), (16,), (16,), ())
    made = [x.new_empty(tiles, layout.heads, *s, dtype=torch.float32) for s in shapes]
    curve = x if z is None else torch.empty_like(z)
    d, m = one.sizes
    tuned = _tuned("prepare", x, d, m)
    block = tuned.pop("block")
    kernels.prepare[(layout.places, layout.heads)](
        x, one.log_beta, one.gamma, x if z is None else z, one.target, *made, curve,
        x if cu is None else cu, x if owner is None else owner, layout.tokens,
        H=layout.heads, D=d, M=m, BD=padded(d), BM=min(block, padded(m)), S=layout.chunk,
        AFTER=after, PHI=phi, P=PRECISION[x.dtype], BACK=z is not None, PACKED=cu is not None,
        **tuned,
    )  # fmt: skip
    return [*made, curve]


@torch.library.custom_op("trellis::memory_write", mutates_args=())
def write(
    tensors: list[Tensor], phis: str, minibatch: int, after: bool, keep: bool,
    offset: Tensor | None, cu: Tensor | None, owner: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Per pass: the writes, z, the memories at the chunks' starts, the final memory, in stale mode
    the final anchor.

    tensors: a _Pass each. phis: their names. keep: z is wanted, for the backward; else it is empty.
    """
    passes = _passes(tensors, minibatch)
    made = _write_results(tensors, phis, minibatch, after, keep, offset, cu, owner)
    each = len(made) // len(passes)
    x = passes[0].x
    layout = Layout.of(x, minibatch, cu)
    if not layout.sequences:
        return made
    with on(x.device):
        arguments: list[Tensor] = []
        for i, (one, phi) in enumerate(zip(passes, phis.split())):
            results = made[i * each : (i + 1) * each]
            if minibatch == 1:
                ready = [x] * 4
                if layout.tokens:
                    ready = _prepare(one, phi, after, layout, cu, owner)[:4]
                arguments += [*one[:4], *ready, one.memory, x, *results, x]
            else:
                assert one.anchor is not None
                results[2][layout.places :] = one.anchor
                arguments += [*one[:4], *[x] * 4, one.memory, one.anchor, *results]
        if len(passes) == 1:
            arguments += [x] * 15
        tuned = _tuned("write", x, *(n for one in passes for n in one.sizes))
        del tuned["block"]
        blocks = sum(-(-one.sizes[1] // SLOTS) for one in passes)
        kernels.write[(layout.sequences * layout.heads, blocks)](
            *arguments, x if cu is None else cu, x if offset is None else offset, layout.tokens,
            **_sizes(passes, phis.split()), **layout.common(minibatch, cu is not None),
            BM=SLOTS, AFTER=after, P=PRECISION[x.dtype], AHEAD=AHEAD, KEEP=keep, **tuned,
        )  # fmt: skip
    return made


@write.register_fake
def _write_results(tensors, phis, minibatch, after, keep, offset, cu, owner):
    made = []
    for one in _passes(tensors, minibatch):
        layout = Layout.of(one.x, minibatch, cu)
        held = layout.places + (0 if minibatch == 1 else layout.sequences)
        made.append(torch.empty_like(one.target))
        made.append(torch.empty_like(one.target) if keep else one.target.new_empty(0))
        made.append(one.x.new_empty(held, *one.memory.shape[1:]))
        made += [torch.empty_like(one.memory) for _ in range(1 if minibatch == 1 else 2)]
    return made


@torch.library.custom_op("trellis::memory_write_backward", mutates_args=())
def write_backward(
    tensors: list[Tensor], kept: list[Tensor], gradients: list[Tensor], phis: str, minibatch: int,
    after: bool, offset: Tensor | None, cu: Tensor | None, owner: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `tensors`.

    kept: writes, z and memories of each pass. gradients: of the writes, the memories at the
    chunks' starts and the final state of each pass.
    """
    passes = _passes(tensors, minibatch)
    made = [torch.empty_like(tensor) for tensor in tensors]
    each, states = len(tensors) // len(passes), 1 if minibatch == 1 else 2
    x = passes[0].x
    layout = Layout.of(x, minibatch, cu)
    if not layout.sequences:
        return made
    packed = cu is not None
    cu_, offset_ = x if cu is None else cu, x if offset is None else offset
    with on(x.device):
        arguments: list[Tensor] = []
        totals = []
        for i, (one, phi) in enumerate(zip(passes, phis.split())):
            writes, z, saved = kept[3 * i : 3 * i + 3]
            dwrites, dsaved, *dfinal = gradients[i * (2 + states) : (i + 1) * (2 + states)]
            ready = [x] * 5
            if minibatch == 1 and layout.tokens:
                *ready, curve = _prepare(one, phi, after, layout, cu, owner, z)
                ready.insert(0, curve)
            total, dends = torch.empty_like(writes), torch.empty_like(saved)
            totals.append((total, dends))
            dmemory = made[i * each + 4 : (i + 1) * each]
            blank = [x] * (2 - states)
            arguments += [one.x, z, one.target, one.log_beta, one.gamma, *ready, dwrites, dsaved]
            arguments += [*dfinal, *blank, total, dends, *dmemory, *blank]
        if len(passes) == 1:
            arguments += [x] * 18
        tuned = _tuned("write_back", x, *(n for one in passes for n in one.sizes))
        del tuned["block"]
        blocks = sum(-(-one.sizes[1] // SLOTS) for one in passes)
        kernels.write_back[(layout.sequences * layout.heads, blocks)](
            *arguments, cu_, offset_, layout.tokens,
            **_sizes(passes, phis.split()), **layout.common(minibatch, packed),
            BM=SLOTS, AFTER=after, P=PRECISION[x.dtype], AHEAD=AHEAD, **tuned,
        )  # fmt: skip
        for i, (one, phi) in enumerate(zip(passes, phis.split())):
            if not layout.tokens:
                break
            writes, z, saved = kept[3 * i : 3 * i + 3]
            d, m = one.sizes
            tuned = _tuned("finish_back", x, d, m)
            block = tuned.pop("block")
            dx, dtarget, dlog_beta, dgamma = made[i * each : i * each + 4]
            kernels.finish_back[(layout.places, layout.heads)](
                one.x, one.target, writes, z, totals[i][0], one.log_beta, one.gamma, saved,
                totals[i][1], dx, dtarget, dgamma, dlog_beta, cu_, x if owner is None else owner,
                offset_, layout.tokens, layout.places, D=d, M=m, BD=min(block, padded(d)),
                BM=min(block, padded(m)), R=padded(layout.chunk), EXTRA=layout.extra,
                **layout.common(minibatch, packed), AFTER=after, PHI=phi, P=PRECISION[x.dtype],
                **tuned,
            )  # fmt: skip
    return made


@write_backward.register_fake
def _(tensors, kept, gradients, phis, minibatch, after, offset, cu, owner):
    return [torch.empty_like(tensor) for tensor in tensors]


def _write_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, phis, minibatch, after, keep, offset, cu, owner = inputs
    each = 4 if minibatch == 1 else 5
    kept = [output[i + k] for i in range(0, len(output), each) for k in range(3)]
    ctx.mark_non_differentiable(*(output[i + 1] for i in range(0, len(output), each)))
    ctx.save_for_backward(*tensors, *kept, *(t for t in (offset, cu, owner) if t is not None))
    ctx.setting = phis, minibatch, after
    ctx.counts = len(tensors), len(kept), keep
    ctx.given = [t is not None for t in (offset, cu, owner)]


def _write_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    inputs, kept, keep = ctx.counts
    if not keep:
        raise RuntimeError("trellis::memory_write was called with keep=False: it has no backward")
    saved = ctx.saved_tensors
    phis, minibatch, after = ctx.setting
    others = iter(saved[inputs + kept :])
    offset, cu, owner = (next(others) if given else None for given in ctx.given)
    tensors, held = list(saved[:inputs]), list(saved[inputs : inputs + kept])
    each = len(gradients) // (kept // 3)
    given: list[Tensor] = []
    for place, gradient in enumerate(gradients):
        i, kind = divmod(place, each)
        if kind == 1:  # z
            continue
        like = held[3 * i + kind] if kind < 3 else tensors[i * (each + 1) + 4]
        given.append(torch.zeros_like(like) if gradient is None else gradient.contiguous())
    found = write_backward(tensors, held, given, phis, minibatch, after, offset, cu, owner)
    return found, None, None, None, None, None, None, None


write.register_autograd(_write_gradients, setup_context=_write_setup)
write_backward.register_autograd(refuse_double_backward)


def _read_arguments(
    kernel: str, x: Tensor, writes: Tensor, transposed: bool, minibatch: int, cu: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Layout, dict[str, Any]]:
    """Keys and values, the layout, and the constants of `read` and `read_back`."""
    d, m = x.shape[3], writes.shape[3]
    layout = Layout.of(x, minibatch, cu)
    ends = (writes, x) if transposed else (x, writes)
    inner, outer = (m, d) if transposed else (d, m)
    tuned = _tuned(kernel, x, d, m)
    block = tuned.pop("block")
    strides = {"SI": d, "SO": 1} if transposed else {"SI": 1, "SO": d}
    constants = {
        "I": inner, "O": outer, **strides,
        "BI": min(block, padded(inner)), "BO": min(block, padded(outer)),
        "R": padded(layout.chunk), "EXTRA": layout.extra, "P": PRECISION[x.dtype],
        **layout.common(minibatch, cu is not None), **tuned,
    }  # fmt: skip
    return ends, layout, constants


@torch.library.custom_op("trellis::memory_read", mutates_args=())
def read(
    query: Tensor, x: Tensor, writes: Tensor, log_beta: Tensor, saved: Tensor, transposed: bool,
    minibatch: int, wide: bool, offset: Tensor | None, cu: Tensor | None, owner: Tensor | None,
) -> Tensor:  # fmt: skip
    """y of one pass, in fp32 if `wide`, else in the dtype of x."""
    y = _read_result(
        query, x, writes, log_beta, saved, transposed, minibatch, wide, offset, cu, owner
    )
    ends, layout, constants = _read_arguments("read", x, writes, transposed, minibatch, cu)
    if layout.places and layout.tokens:
        with on(x.device):
            kernels.read[(layout.places, layout.heads)](
                query, *ends, log_beta, saved, y, x if cu is None else cu,
                x if owner is None else owner, x if offset is None else offset, layout.tokens,
                **constants,
            )  # fmt: skip
    return y


@read.register_fake
def _read_result(
    query, x, writes, log_beta, saved, transposed, minibatch, wide, offset, cu, owner
):  # fmt: skip
    return torch.empty_like(x if transposed else writes, dtype=torch.float32 if wide else x.dtype)


@torch.library.custom_op("trellis::memory_read_backward", mutates_args=())
def read_backward(
    dy: Tensor, query: Tensor, x: Tensor, writes: Tensor, log_beta: Tensor, saved: Tensor,
    transposed: bool, minibatch: int, offset: Tensor | None, cu: Tensor | None,
    owner: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, x, writes, log_beta and saved."""
    made = [torch.empty_like(t) for t in (query, x, writes, log_beta, saved)]
    dquery, dx, dwrites, dlog_beta, dsaved = made
    ends, layout, constants = _read_arguments("read_back", x, writes, transposed, minibatch, cu)
    if layout.places and layout.tokens:
        dends = (dwrites, dx) if transposed else (dx, dwrites)
        with on(x.device):
            kernels.read_back[(layout.places, layout.heads)](
                query, *ends, dy.contiguous(), log_beta, saved, dquery, *dends, dlog_beta, dsaved,
                x if cu is None else cu, x if owner is None else owner,
                x if offset is None else offset, layout.tokens, **constants,
            )  # fmt: skip
    return made


@read_backward.register_fake
def _(dy, query, x, writes, log_beta, saved, transposed, minibatch, offset, cu, owner):
    return [torch.empty_like(t) for t in (query, x, writes, log_beta, saved)]


def _read_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transposed, ctx.minibatch, _, offset, cu, owner = inputs
    ctx.save_for_backward(*tensors, offset, cu, owner)


def _read_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    *tensors, offset, cu, owner = ctx.saved_tensors
    found = read_backward(dy, *tensors, ctx.transposed, ctx.minibatch, offset, cu, owner)
    return *found, None, None, None, None, None, None


read.register_autograd(_read_gradients, setup_context=_read_setup)
read_backward.register_autograd(refuse_double_backward)


@torch.library.custom_op("trellis::memory_step", mutates_args=())
def step(
    q: Tensor, tensors: list[Tensor], phis: str, f: str, psi: str, transposed: bool,
    minibatch: int, after: bool, offset: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """One token of both passes, without gradients: y [B, 1, H, V], then the final states."""
    made = _step_results(q, tensors, phis, f, psi, transposed, minibatch, after, offset)
    passes = _passes(tensors, minibatch)
    states = 1 if minibatch == 1 else 2
    arguments: list[Tensor] = []
    constants: dict[str, Any] = {}
    for i, (one, phi) in enumerate(zip(passes, phis.split()), 1):
        d, m = one.sizes
        blank = [q] * (2 - states)
        arguments += [*(t for t in one if t is not None), *blank]
        arguments += [*made[1 + (i - 1) * states : 1 + i * states], *blank]
        constants |= {f"D{i}": d, f"M{i}": m, f"BD{i}": padded(d), f"BM{i}": padded(m)}
        constants |= {f"PHI{i}": phi}
    batch, heads = q.shape[0], q.shape[2]
    tuned = _tuned("step", q, *(n for one in passes for n in one.sizes))
    del tuned["block"]
    if batch:
        with on(q.device):
            kernels.step[(batch * heads,)](
                q, *arguments, q if offset is None else offset, made[0], H=heads, **constants,
                F=f, PSI=psi, MB=minibatch, AFTER=after, TRANSPOSED=transposed, **tuned,
            )  # fmt: skip
    return made


@step.register_fake
def _step_results(q, tensors, phis, f, psi, transposed, minibatch, after, offset):
    passes = _passes(tensors, minibatch)
    made = [torch.empty_like(passes[1].x if transposed else passes[1].target, dtype=q.dtype)]
    for one in passes:
        made += [torch.empty_like(one.memory) for _ in range(1 if minibatch == 1 else 2)]
    return made
