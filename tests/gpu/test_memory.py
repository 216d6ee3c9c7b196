"""The memory on a GPU. Nobody has run these yet: they were written without one (docs/gpu.md).

`make test-gpu` runs them; without a GPU they skip.
"""

import os
import subprocess
import sys

import pytest
import torch
from tests.support import problem, projection, relative_rms

if not torch.cuda.is_available():
    pytest.skip("no GPU was found", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("the GPU's compute capability is below 8.0", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from trellis.ops import MemoryState, trellis_memory, trellis_memory_step

NAMES = ("q", "k", "v", "alpha", "log_beta", "gamma")
CASES = [
    {"mode": mode, "value_pass": value_pass, "error_at": error_at, "minibatch": 16}
    for mode in ("exact", "stale")
    for value_pass in ("encode", "decode")
    for error_at in ("before", "after")
]
SIZES = {"key": 64, "value": 48, "slots": 64, "heads": 3}


def results(case, backend, dtype, device="cuda", graded=True):
    """y, the final state and all gradients, on inputs that were rounded to bf16 before."""
    given = [case.tensors[n].bfloat16().to(dtype).to(device) for n in NAMES]
    if dtype == torch.bfloat16:  # gates are always fp32
        given[4:] = [t.float() for t in given[4:]]
    leaves = [t.clone().requires_grad_(graded) for t in given]
    cu = None if case.cu_seqlens is None else case.cu_seqlens.to(device)
    y, state = trellis_memory(
        *leaves, output_final_state=True, cu_seqlens=cu, backend=backend, **case.options
    )
    if not graded:
        return [y, state.keys, state.values]
    projection((y.cpu().to(torch.float64),)).backward()
    return [y, state.keys, state.values, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("options", CASES)
def test_fp32(options):
    case = problem(tokens=300, **SIZES, **options)
    expected = results(case, "reference", torch.float64, "cpu")
    for one, other in zip(results(case, "triton", torch.float32), expected):
        assert relative_rms(one.cpu(), other) < 2e-5


@pytest.mark.parametrize("options", CASES)
def test_bf16(options):
    case = problem(tokens=300, **SIZES, **options)
    expected = results(case, "reference", torch.float64, "cpu")
    chunked = results(case, "chunked", torch.bfloat16)
    for place, (one, other, exact) in enumerate(
        zip(results(case, "triton", torch.bfloat16), chunked, expected)
    ):
        error = relative_rms(one.cpu(), exact)
        assert error < (5e-3 if place == 0 else 1e-2), place
        assert error < 2 * max(relative_rms(other.cpu(), exact), 1e-3), place


def test_packs_and_more_programs_than_one_wave():
    lengths = [0, 700, 1, 64, 65, 0, 500] * 30
    case = problem(lengths=lengths, key=16, value=16, slots=16, heads=4)
    chunked = results(case, "chunked", torch.float32)
    for one, other in zip(results(case, "triton", torch.float32), chunked):
        assert relative_rms(one, other) < 2e-5


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_two_runs_are_equal_to_the_bit(mode):
    case = problem(tokens=1000, mode=mode, minibatch=16, **SIZES)
    for one, other in zip(*(results(case, "triton", torch.bfloat16) for _ in range(2))):
        assert torch.equal(one, other)


def test_32k_tokens():
    case = problem(tokens=32768, batch=1, **SIZES)
    chunked = results(case, "chunked", torch.float32, graded=False)
    for one, other in zip(results(case, "triton", torch.float32, graded=False), chunked):
        assert relative_rms(one, other) < 5e-5


def inputs(tokens=256, dtype=torch.bfloat16):
    case = problem(tokens=tokens, **SIZES)
    return [case.tensors[n].to(dtype).cuda() for n in NAMES]


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_the_device(packed):
    leaves = [t.requires_grad_() for t in inputs()]
    options = {"backend": "triton"}
    if packed:
        leaves = [t.detach()[:1].requires_grad_() for t in leaves]
        options["cu_seqlens"] = torch.tensor([0, 100, 256], device="cuda")
    trellis_memory(*leaves, **options)[0].sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        trellis_memory(*leaves, **options)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph():
    tensors = inputs()
    with torch.no_grad():
        expected, _ = trellis_memory(*tensors, backend="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = trellis_memory(*tensors, backend="triton")
        y.zero_()
        graph.replay()
    assert torch.equal(y, expected)


def test_compiled_in_one_graph():
    def loss(*tensors):
        return trellis_memory(*tensors)[0].float().square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in inputs()]
        function(*leaves).backward()
        results.append([leaf.grad for leaf in leaves])
    for one, other in zip(*results):
        assert relative_rms(one, other) < 1e-2


def test_auto_takes_the_kernels():
    tensors = inputs()
    y, _ = trellis_memory(*tensors)
    assert torch.equal(y, trellis_memory(*tensors, backend="triton")[0])


@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_token_by_token(mode):
    case = problem(tokens=20, mode=mode, minibatch=6, **SIZES)
    tensors = [case.tensors[n].float().cuda() for n in NAMES]
    expected, final = trellis_memory(
        *tensors, output_final_state=True, backend="chunked", **case.options
    )
    state, outputs = None, []
    for t in range(20):
        y, state = trellis_memory_step(
            *(tensor[:, t] for tensor in tensors), initial_state=state, **case.options
        )
        outputs.append(y)
    assert isinstance(state, MemoryState)
    assert relative_rms(torch.stack(outputs, 1), expected) < 2e-5
    assert relative_rms(state.keys, final.keys) < 2e-5


DISTRIBUTED = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from tests.support import small_config
from trellis import TrellisForCausalLM
rank = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(rank); dist.init_process_group("nccl")
torch.manual_seed(0)
model = TrellisForCausalLM(small_config()).cuda()
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, device_ids=[rank])
else:
    fully_shard(model)
ids = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(rank)).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(ids, labels=ids).loss
loss.backward()
assert torch.isfinite(loss)
assert all(p.grad is not None for p in model.parameters())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_all_gpus(strategy, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    count = str(torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    out = subprocess.run(
        [*command, "--standalone", str(script), strategy], capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
