"""What many tests share: the measure of error, inputs of the memory, and small models."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

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


# --- evaluation: small models to measure ---------------------------------------------------------


def small_model(mixer="trellis", name=None, **fields):
    """An EvaluatedModel of ours with random weights, wide enough that a wrong state shows."""
    from trellis import TrellisConfig, TrellisForCausalLM
    from trellis.data.tokenizer import load_tokenizer
    from trellis.evaluation.models import EvaluatedModel

    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = TrellisConfig(
        vocab_size=tokenizer.vocab_size, mixer=mixer, initializer_range=0.2, hidden_size=32,
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
