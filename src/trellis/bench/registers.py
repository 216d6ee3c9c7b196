"""`trellis bench registers`: the memory's GPU kernels, compiled without a GPU.

The op runs on the CPU with kernels that only note how they are started. Each of them is then
compiled for every architecture, with the arguments and the configuration it would have there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .. import checks
from ..ops import trellis_memory, trellis_memory_step
from ..ops.memory import triton as backend

ARCHITECTURES = (80, 90, 100)
KERNELS = ("prepare", "write", "read", "read_back", "write_back", "finish_back", "step")
#: What is compiled: names of the table's rows, and options of the op.
CASES: dict[str, dict[str, Any]] = {
    "exact, encode": {"mode": "exact", "value_pass": "encode"},
    "exact, decode": {"mode": "exact", "value_pass": "decode"},
    "stale, encode": {"mode": "stale", "value_pass": "encode"},
}
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"
}  # fmt: skip


class Note:
    """Stands for a kernel and notes how it is started."""

    def __init__(self, name: str, starts: list[tuple[str, tuple, dict]]):
        self.name, self.starts = name, starts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.starts.append((self.name, arguments, constants))


@contextmanager
def noted(architecture: int) -> Iterator[list[tuple[str, tuple, dict]]]:
    """Inside, the op starts no kernel; what it would start on that architecture is listed."""
    from ..ops.memory.triton import kernels, launch

    starts: list[tuple[str, tuple, dict]] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "interpreted", return_value=True))
        stack.enter_context(mock.patch.object(launch, "capability", return_value=architecture))
        for name in KERNELS:
            stack.enter_context(mock.patch.object(kernels, name, Note(name, starts)))
        yield starts


def starts_of(
    architecture: int, dtype: torch.dtype, size: int, options: dict[str, Any]
) -> list[tuple[str, tuple, dict]]:
    """How a forward, a backward and a step of the op start kernels."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    heads = 12
    vectors = [draw(1, 64, heads, size) for _ in range(4)]
    gates = [torch.zeros(1, 64, heads, requires_grad=True) for _ in range(2)]
    with noted(architecture) as starts:
        y, _ = trellis_memory(*vectors, *gates, backend="triton", **options)
        y.sum().backward()
        with torch.no_grad():
            token = [tensor[:, 0] for tensor in (*vectors, *gates)]
            trellis_memory_step(*token, backend="triton", **options)
    return starts


def compiled(name: str, arguments: tuple, constants: dict, architecture: int) -> dict[str, int]:
    """Registers and shared memory of a kernel, its spills in bytes, and its fp64 instructions."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import triton

    from ..ops.memory.triton import kernels

    function = getattr(kernels, name)
    constants = dict(constants)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    if "maxnreg" in constants:
        options["maxnreg"] = constants.pop("maxnreg")
    names = function.arg_names
    signature, aligned = {}, {}
    for place, argument in enumerate(names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif isinstance(arguments[place], torch.Tensor):
            signature[argument] = TYPES[arguments[place].dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
    places = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        binary.write_bytes(made.asm["cubin"])
        text.write_text(made.asm["ptx"])
        used = _said(tools / "cuobjdump", "-res-usage", binary)
        code = _said(tools / "cuobjdump", "-sass", binary)
        target = re.search(r"\.target (sm_\w+)", made.asm["ptx"])
        assert target is not None
        # The older of Triton's two assemblers does not read the newer versions of the language.
        assembler = "ptxas" if ".version 8" in made.asm["ptx"] else "ptxas-blackwell"
        assembled = [tools / assembler, "-v", "--gpu-name", target[1], "-o", "/dev/null", text]
        if "maxnreg" in options:
            assembled[1:1] = ["--maxrregcount", str(options["maxnreg"])]
        said = _said(*assembled)
    return {
        "warps": options["num_warps"],
        "registers": _number(r"REG:(\d+)", used),
        "spills": _number(r"(\d+) bytes spill stores", said),
        "shared": made.metadata.shared,
        "fp64": len(re.findall(r"\bD(?:ADD|MUL|FMA|MMA)\b", code)),
    }


def _said(*command: object) -> str:
    out = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return out.stdout + out.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{pattern} is not in what the assembler said: {text[-300:]}")
    return int(found[1])


def run(
    architectures: list[int], size: int, cases: list[str], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Compiles every kernel of some cases; `report` receives the lines of a Markdown table."""
    for case in cases:
        checks.choice("cases", case, tuple(CASES))
    if backend.missing():
        raise ModuleNotFoundError(f"nothing can be compiled here: {backend.missing()}")
    rows = []
    report("| kernel | case | type | architecture | warps | registers | spills, B | shared, B |")
    report("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for architecture in architectures:
            seen: set[str] = set()
            for case in cases:
                for name, arguments, constants in starts_of(architecture, dtype, size, CASES[case]):
                    key = f"{name} {constants}"
                    if key in seen:
                        continue
                    seen.add(key)
                    found = compiled(name, arguments, constants, architecture)
                    kind = str(dtype).removeprefix("torch.")
                    row = {"kernel": name, "case": case, "type": kind, "size": size,
                           "architecture": architecture, **found}  # fmt: skip
                    rows.append(row)
                    report(
                        f"| {name} | {case} | {kind} | sm_{architecture} | {found['warps']} | "
                        f"{found['registers']} | {found['spills']} | {found['shared']} |"
                    )
    return rows


#: Name: bytes/s of memory, bf16 operations/s, clock, multiprocessors.
GPUS = {"A100": (1.56e12, 312e12, 1.41e9, 108), "H100": (3.35e12, 989e12, 1.76e9, 132)}
#: Cycles of a tile of 16 tokens in exact mode with silu, from a model of one warp's instructions on
#: sm_80; taken for both GPUs.
TILE_CYCLES = {"write": 2817, "write_back": 2960}
#: Programs of one warp with up to 255 registers that a multiprocessor holds.
RESIDENT = 8


def estimates(
    batch: int, heads: int, tokens: int, size: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A roofline of each kernel, both passes, exact mode, bf16: estimates, not measurements.

    A parallel kernel takes as long as its bytes or its products, whichever is longer; a sequential
    one its tiles one after the other, in as many waves as its programs fill.
    """
    row, saved, tile, gates = 2 * size, 2 * size * size / 64, 72, 8
    each = {  # bytes and multiply-adds for each token, head and pass
        "prepare": (row + tile + gates, 16 * size),
        "write": (4 * row + tile + saved, 0),
        "read": (4.5 * row + saved, 3 * 64 * size + size**2),
        "read_back": (7.5 * row + 2 * saved + gates, 5 * 64 * size + 2 * size**2),
        "prepare, backward": (4 * row + tile + gates, 16 * size),
        "write_back": (4 * row + tile + 2 * saved, 0),
        "finish_back": (7 * row + 2 * saved + 3 * gates, 3 * 64 * size + 2 * size**2),
    }
    report(f"\nB={batch} H={heads} T={tokens} K=V=M={size}, bf16, exact: estimates\n")
    report("| kernel | MB | GFLOP | " + " | ".join(f"{name}, ms" for name in GPUS) + " |")
    report("|---|---|---|" + "---|" * len(GPUS))
    rows: list[dict[str, Any]] = []
    for kernel, (moved, products) in each.items():
        count = 2 * batch * heads * tokens
        times = {}
        for name, (bandwidth, rate, clock, processors) in GPUS.items():
            seconds = max(moved * count / bandwidth, 2 * products * count / rate)
            if kernel in TILE_CYCLES:
                waves = -(-2 * batch * heads * size // 16 // (RESIDENT * processors))
                seconds = max(seconds, waves * tokens / 16 * TILE_CYCLES[kernel] / clock)
            times[name] = seconds * 1e3
        shown = " | ".join(f"{ms:.2f}" for ms in times.values())
        megabytes, giga = moved * count / 1e6, 2 * products * count / 1e9
        report(f"| {kernel} | {megabytes:.0f} | {giga:.1f} | {shown} |")
        rows.append({"kernel": kernel, "MB": megabytes, "GFLOP": giga, "ms": times})
    ends = {"forward": slice(0, 3), "backward": slice(3, None)}
    for what, part in ends.items():
        total = {name: sum(r["ms"][name] for r in rows[part]) for name in GPUS}
        report(
            f"| all of the {what} | | | " + " | ".join(f"{v:.2f}" for v in total.values()) + " |"
        )
        rows.append({"kernel": f"all of the {what}", "ms": total})
    return rows
