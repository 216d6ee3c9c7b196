"""What many tests share: the measure of error, inputs of the memory, small corpora and models."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from trellis.mixers import MIXERS
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
        projection(results.values()).backward()
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
    projection(outputs).backward()
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


# Models and training. Their imports are in the functions: the tests of ops and mixers go without
# transformers.

#: Stacks of mixers that the tests of the model run over.
STACKS: dict[str, dict] = {name: {"mixer": name} for name in MIXERS} | {
    "trellis stale": {
        "mixer": "trellis",
        "mixer_config": {"form": "paper", "mode": "stale", "minibatch": 8},
    },
    "all mixers": {"mixer": list(MIXERS), "num_hidden_layers": len(MIXERS)},
    "hybrid": {
        "mixer": ["trellis", "trellis", "transformer"],
        "mixer_config": {"transformer": {"window": 7}},
    },
}


def small_config(stack="trellis", **fields):
    from trellis import TrellisConfig

    defaults = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "initializer_range": 0.02,
    }
    return TrellisConfig(**{**defaults, **STACKS[stack], **fields})


def small_model(stack="trellis", **fields):
    from trellis import TrellisForCausalLM

    torch.manual_seed(0)
    return TrellisForCausalLM(small_config(stack, **fields)).eval()


def tokens(*shape, seed=0):
    """Random token ids of the small models' vocabulary."""
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


TEXT = Path(__file__).parent / "assets" / "golden.txt"
#: The recipe of a small run, without data.path.
TABLE: dict[str, dict] = {
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "data": {"context": 32},
    "train": {"steps": 20, "rows": 4, "learning_rate": 5e-3, "warmup": 0.2},
    "log": {"every": 1, "validate_every": 10, "validation_tokens": 512},
    "checkpoint": {"every": 10},
}


def make_corpus(folder, documents=12, held_out=0.15, **options):
    """A byte corpus of the fixed text, cut into documents."""
    from trellis.data import prepare_corpus

    lines = TEXT.read_text().splitlines(keepends=True)
    size = len(lines) // documents + 1
    folder.mkdir(exist_ok=True)
    source = folder / "source.jsonl"
    parts = ["".join(lines[i : i + size]) for i in range(0, len(lines), size)]
    source.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return prepare_corpus([source], folder / "corpus", validation=held_out, **options)


def recipe_table(corpus, **sections):
    """TABLE for a corpus, with some values changed: train={"steps": 5}."""
    changed = copy.deepcopy(TABLE)
    changed["data"]["path"] = str(corpus.path)
    for section, values in sections.items():
        changed.setdefault(section, {}).update(values)
    return changed


def recipe(corpus, **sections):
    from trellis.training.recipe import from_dict

    return from_dict(recipe_table(corpus, **sections))


def comparable(run):
    """All metrics of a run without their timing."""
    from trellis.training.metrics import read_metrics

    records = read_metrics(run)
    for record in records:
        record.pop("timing", None)
    return records


def contents(run, step):
    """Everything in a checkpoint: every tensor, and what is noted beside them."""
    from safetensors.torch import load_file

    from trellis.training import checkpoint as checkpoints

    path = checkpoints.path_of(run, step)
    shards = {p.name: load_file(p) for p in sorted((path / "shards").iterdir())}
    shards["extra"] = load_file(path / "extra.safetensors")
    return shards, json.loads((path / "checkpoint.json").read_text())


def assert_identical(run, other):
    """Two runs have the same checkpoints, bit by bit, and the same metrics."""
    from trellis.training import checkpoint as checkpoints

    assert checkpoints.steps_in(run) == checkpoints.steps_in(other)
    for step in checkpoints.steps_in(run):
        (tensors, noted), (expected, known) = contents(run, step), contents(other, step)
        for file, parts in expected.items():
            assert parts.keys() == tensors[file].keys()
            for name, tensor in parts.items():
                assert torch.equal(tensors[file][name], tensor), (step, name)
        # safetensors writes the entries of its headers in any order, so hashes of files may differ.
        assert noted.pop("files").keys() == known.pop("files").keys()
        assert noted == known
    assert comparable(run) == comparable(other)


def losses(run):
    return torch.tensor([r["loss"] for r in comparable(run) if "loss" in r], dtype=torch.float64)


def write_toml(path, table):
    """A TOML file of sections; their values are written as JSON, which TOML reads as well."""
    lines = []
    for section, values in table.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments):
    """The command line of `trellis` with these arguments."""
    return [sys.executable, "-m", "trellis.cli", *map(str, arguments)]


def environment(**more):
    """One thread: the same sums in every process, and no fight for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200", **more}


def run_command(*arguments, **options):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), **options
    )


def projection(outputs, draw=torch.float64):
    """A random linear function of some tensors, the same for the same shapes: a number.

    Its gradient tests that of every output at once. The factors are drawn in the type `draw`, so
    that tensors of other types get the same ones.
    """
    generator = torch.Generator().manual_seed(7)
    return sum(
        (out * torch.randn(out.shape, generator=generator, dtype=draw).to(out.dtype)).sum()
        for out in outputs
    )


# Evaluation: small models to measure.


def evaluated_model(mixer="trellis", name=None, **fields):
    """An EvaluatedModel of ours with random weights, wide enough that a wrong state shows."""
    from trellis import TrellisConfig, TrellisForCausalLM
    from trellis.data.tokenizer import load_tokenizer
    from trellis.evaluation.models import EvaluatedModel

    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = TrellisConfig(
        vocab_size=tokenizer.vocab_size, mixer=mixer, initializer_range=0.04, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=2, **fields,
    )  # fmt: skip
    return EvaluatedModel(name or f"small {mixer}", TrellisForCausalLM(config), tokenizer, {})


def save_gpt2(folder, positions=256):
    """Saves a GPT-2 with random weights and the tokenizer of bytes; returns the folder."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from trellis.data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=positions, n_embd=32, n_layer=2, n_head=2,
        initializer_range=0.2,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    source = json.dumps(tokenizer.json)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.inner).from_str(source),
        eos_token=tokenizer.inner.id_to_token(tokenizer.end_of_document),
    )
    fast.save_pretrained(folder)
    return folder


class RuleNetwork(torch.nn.Module):
    """A network whose next token is `rule(ids)`, with `odds` nats between it and every other.

    It is called as a model of transformers is, without a cache.
    """

    def __init__(self, rule, vocab_size, odds=50.0):
        super().__init__()
        self.rule, self.vocab_size, self.odds = rule, vocab_size, odds
        self.config, self.device = SimpleNamespace(), torch.device("cpu")

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, **_):
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            length = len(ids) if attention_mask is None else int(attention_mask[row].sum())
            for place in range(length - logits_to_keep if logits_to_keep else 0, length):
                logits[row, place, self.rule(ids[: place + 1])] = self.odds
        return SimpleNamespace(logits=logits)


def rule_model(rule, name="ruled"):
    """An EvaluatedModel that follows `rule(ids) -> id`, with the tokenizer of bytes."""
    from trellis.data.tokenizer import load_tokenizer
    from trellis.evaluation.models import EvaluatedModel

    tokenizer = load_tokenizer("bytes")
    return EvaluatedModel(name, RuleNetwork(rule, tokenizer.vocab_size), tokenizer, {})


# The recurrences: shapes and random inputs of tests/ops/recurrences.


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that are all different, so that a transposed product shows. `lengths` makes a pack."""

    batch: int = 2
    tokens: int = 20
    heads: int = 2
    key: int = 12
    value: int = 10
    slots: int = 7
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def lead(self) -> tuple[int, int, int]:
        """B, T, H"""
        if self.lengths is not None:
            return 1, sum(self.lengths), self.heads
        return self.batch, self.tokens, self.heads

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def draw(self) -> Draw:
        return Draw(self.seed)


class Draw:
    """Random tensors in fp64, always the same for a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def unit(self, *shape: int) -> Tensor:
        x = self.normal(*shape)
        return x / x.norm(dim=-1, keepdim=True)


@dataclasses.dataclass
class Case:
    """A problem: its tensors, and the op on them.

    over_tokens: inputs [B, T, ...]. states: initial states [N, ...]. call(inputs, states,
    cu_seqlens, backend) returns y and the final states, named as the initial ones. What no token
    changes, such as a parameter, is among the initial states only.
    """

    over_tokens: dict[str, Tensor]
    states: dict[str, Tensor]
    call: Callable[
        [dict[str, Tensor], dict[str, Tensor], Tensor | None, str],
        tuple[Tensor, dict[str, Tensor]],
    ]
