"""What many tests share: the measure of error, inputs of the memory, checks of fused ops."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tarfile

import torch
from torch import Tensor

from trellis.ops import MemoryState, trellis_memory


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in root mean square; 0 where both are empty or zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if expected.numel() == 0:
        return 0.0
    error = (actual - expected).square().mean().sqrt()
    scale = expected.square().mean().sqrt()
    if scale == 0:
        return float(error)
    return float(error / scale)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@dataclasses.dataclass
class Problem:
    """Inputs of the memory in fp64, and how to call it."""

    tensors: dict[str, Tensor]
    cu_seqlens: Tensor | None
    offset: Tensor
    options: dict

    def run(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """y, the final state and all gradients of a random linear function of them."""
        given = {
            name: tensor.to(dtype).clone().requires_grad_() for name, tensor in self.tensors.items()
        }
        stale = self.options["mode"] == "stale"
        state = MemoryState(given["keys"], given["values"])
        if stale:
            state = state._replace(
                key_anchor=given["key_anchor"],
                value_anchor=given["value_anchor"],
                offset=self.offset,
            )
        y, final = trellis_memory(
            given["q"], given["k"], given["v"], given["alpha"],
            (given["log_beta"], given["log_beta2"]), (given["gamma"], given["gamma2"]),
            initial_state=state, output_final_state=True, cu_seqlens=self.cu_seqlens,
            backend=backend, **self.options,
        )  # fmt: skip
        assert final is not None
        results = {"y": y, "final keys": final.keys, "final values": final.values}
        if stale:
            results |= {"final key anchor": final.key_anchor}
            results |= {"final value anchor": final.value_anchor}
        generator = torch.Generator().manual_seed(7)
        loss = sum(
            (out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)).sum()
            for out in results.values()
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        for name, tensor in given.items():
            # Without tokens the reference does not touch its inputs.
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            results[f"gradient of {name}"] = grad
        if stale:
            results["final offset"] = final.offset.double()
        return results


def problem(
    *,
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    key: int = 12,
    value: int = 10,
    slots: int = 16,
    lengths: list[int] | None = None,
    seed: int = 0,
    **options,
) -> Problem:
    """|k| = |v| = 1, alpha normal, gamma in (0, 1), random initial memories.

    `lengths` packs sequences of these lengths into one row.
    """
    options = {"mode": "exact", "minibatch": 4, "value_pass": "encode", **options}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    cu_seqlens = None
    sequences = batch
    if lengths is not None:
        batch, tokens, sequences = 1, sum(lengths), len(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    lead = (batch, tokens, heads)
    keys = normal(sequences, heads, slots, key)
    encode = options["value_pass"] == "encode"
    values = normal(sequences, heads, *((slots, value) if encode else (value, slots)))
    tensors = {
        "q": unit(normal(*lead, key)),
        "k": unit(normal(*lead, key)),
        "v": unit(normal(*lead, value)),
        "alpha": normal(*lead, slots),
        "log_beta": -0.3 * uniform(*lead),
        "log_beta2": -0.3 * uniform(*lead),
        "gamma": uniform(*lead),
        "gamma2": uniform(*lead),
        "keys": keys,
        "values": values,
        "key_anchor": normal(*keys.shape),
        "value_anchor": normal(*values.shape),
    }
    offset = torch.randint(0, options["minibatch"], (sequences,), generator=generator)
    return Problem(tensors, cu_seqlens, offset, options)


# The fused pointwise ops: norms, gates, convolution, cross-entropy.

#: Largest relative RMS error of fp32 against fp64.
FP32 = 2e-5
FP64 = 1e-12


def run(function, leaves, dtype=torch.float64):
    """Outputs of a function, and the gradients of a random linear function of all of them."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    seen = [(o, w.to(dtype)) for o, w in zip(outputs, weights) if o.requires_grad]
    torch.autograd.backward([o for o, _ in seen], [w for _, w in seen])
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [*(o.detach() for o in outputs), *gradients]


def check_against(reference, function, leaves):
    """`function` in fp32 and in fp64 is the reference in fp64."""
    expected = run(reference, leaves)
    for dtype, bound in ((torch.float32, FP32), (torch.float64, FP64)):
        for place, (one, other) in enumerate(zip(run(function, leaves, dtype), expected)):
            assert one.dtype == dtype
            assert relative_rms(one, other) < bound, f"result {place} in {dtype}"


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# tests/data: small sources and corpora.

TEXTS = {
    "a.txt": "The first document.\nIt has two lines.\n",
    "b.md": "# Überschrift\n\nnaïve café, 日本語, 😀\n",
    "sub/c.py": "def f(x):\n    return x + 1\n",
    "sub/d.txt": "one line without an end",
}


def write_folder(folder, texts=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (TEXTS if texts is None else texts).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def write_jsonl(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_tar(path, folder, mode="w"):
    with tarfile.open(path, mode) as archive:
        for file in sorted(folder.rglob("*")):
            archive.add(file, str(file.relative_to(folder)), recursive=False)
    return path


def documents(corpus):
    """The texts of a corpus, training split first."""
    tokenizer = corpus.tokenizer()
    found = []
    for stream in (corpus.train, corpus.validation):
        start = 0
        for end in stream.ends.tolist():
            found.append(tokenizer.decode(stream.read(start, end)))
            start = end
    return found


def texts_of(sources, out, **options):
    """The documents that some sources give, in order."""
    from trellis.data import prepare_corpus  # needs tokenizers, which few tests need

    return documents(prepare_corpus(sources, out, **{"validation": 0, **options}))


def content(folder):
    """The bytes of every file of a folder, as hashes."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def skips(corpus):
    """What was skipped, as name -> reason."""
    lines = (corpus.path / "skipped.jsonl").read_text().splitlines()
    return {entry["name"]: entry["reason"] for entry in map(json.loads, lines)}
