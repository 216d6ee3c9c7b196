"""Learning from a teacher, and training few weights of a pretrained model (LoRA).

The teacher and the student read the same tokens. `[distill]` of a recipe says what is learnt:

    loss = "mixers"   every layer whose mixer differs from the teacher's sees the teacher's input of
                      that layer and learns what the teacher's mixer returns; all else stays
    loss = "logits"   the student learns the teacher's distribution of the next token
    loss = "text"     the student learns the text, and the teacher is only compared with
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..data.batches import Batch, Stream, assemble, validation_windows
from ..data.shards import Corpus
from ..data.tokenizer import FILE_NAME, TextTokenizer, load_tokenizer
from ..mixers import Mixer, TransformerMixer
from ..models.modeling import TrellisForCausalLM
from ..ops.cross_entropy import IGNORED


def load_pretrained(folder: str | Path, corpus: Corpus | None = None) -> TrellisForCausalLM:
    """A model of ours from a folder that `trellis export` or `trellis convert` wrote.

    Raises ValueError if it is none, or the corpus was prepared with another vocabulary.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"there is no exported model at {path}: it has no config.json")
    if corpus is not None:
        check_vocabulary(load_tokenizer(path / FILE_NAME), corpus, str(path))
    return TrellisForCausalLM.from_pretrained(path)


def check_vocabulary(tokenizer: TextTokenizer, corpus: Corpus, model: str) -> None:
    """Raises ValueError if a corpus was prepared with another vocabulary than a model's."""
    ours, theirs = (
        t.inner.get_vocab(with_added_tokens=True) for t in (tokenizer, corpus.tokenizer())
    )
    if ours != theirs:
        same = sum(theirs.get(token) == i for token, i in ours.items())
        raise ValueError(
            f"{corpus.path} was prepared with another vocabulary than that of {model}: they share "
            f"{same:,} of {len(theirs):,} and {len(ours):,} tokens. Prepare the text with "
            f"--tokenizer {model}"
        )


class Teacher:
    """A model whose mixers' outputs or logits a student learns."""

    def __init__(self, folder: str, corpus: Corpus, device: torch.device):
        self.model = load_pretrained(folder, corpus).to(device).eval().requires_grad_(False)

    def check(self, student: TrellisForCausalLM) -> None:
        """Raises ValueError if a student has other sizes than the teacher."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            ours, theirs = getattr(student.config, name), getattr(self.model.config, name)
            if ours != theirs:
                raise ValueError(
                    f"distill.teacher must have the student's {name}, {ours}; got {theirs}"
                )

    def different(self, student: TrellisForCausalLM) -> list[int]:
        """The layers in which the student has another mixer than the teacher."""
        pairs = zip(student.config.layer_mixers(), self.model.config.layer_mixers())
        return [i for i, ((ours, _), (theirs, _)) in enumerate(pairs) if ours != theirs]

    def mixer_errors(self, student: TrellisForCausalLM, batch: Batch) -> dict[int, Tensor]:
        """|student's - teacher's|^2 / |teacher's|^2 of the outputs of each layer's mixer.

        Both mixers get the teacher's input of the layer, so that no layer depends on another.
        """
        layers = self.different(student)
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def note(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
            seen[layer] = inputs[0], output[0]

        blocks: Any = self.model.model.layers
        handles = [blocks[i].mixer.register_forward_hook(partial(note, i)) for i in layers]
        try:
            self._read(self.model.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        found = {}
        for i in layers:
            x, wanted = seen[i]
            block: Any = student.model.layers[i]
            mixed, _ = block.mixer(x, None, batch.model_inputs()["cu_seqlens"])
            wanted = wanted.float()  # as squares and their sums are to be, also under autocast
            found[i] = (mixed.float() - wanted).square().sum() / wanted.square().sum()
        return found

    def divergence(self, called: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over the predicted tokens of a batch: KL(teacher || student), and the losses of
        the teacher and of the student, the latter without a gradient."""
        log_p, targets = self._log_probabilities(batch)
        inputs = batch.model_inputs()
        real = inputs.pop("targets").flatten() != IGNORED
        ours = called(**inputs, use_cache=False, logits_to_keep=0).logits.flatten(0, 1)[real]
        log_q = ours.float().log_softmax(-1)
        return (
            _divergence(log_p, log_q),
            F.nll_loss(log_p, targets, reduction="sum"),
            F.nll_loss(log_q.detach(), targets, reduction="sum"),
        )

    def _log_probabilities(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The teacher's log probabilities [N, vocabulary] of the N predicted tokens [N]."""
        targets = batch.model_inputs()["targets"].flatten()
        real = targets != IGNORED
        logits = self._read(self.model, batch, logits_to_keep=0).logits.flatten(0, 1)[real]
        return logits.float().log_softmax(-1), targets[real]

    def _batches(self, stream: Stream, context: int, tokens: int, rows: int) -> Iterator[Batch]:
        """Windows that lie evenly over a stream, about `tokens` tokens, `rows` at a time."""
        context = min(context, stream.tokens - 1)
        starts = validation_windows(stream, context, tokens)
        device = next(self.model.parameters()).device
        for begin in range(0, len(starts), rows):
            places = [(stream, start) for start in starts[begin : begin + rows]]
            yield assemble(places, context).to(device)

    def _read(self, model: nn.Module, batch: Batch, **options: Any) -> Any:
        inputs = batch.model_inputs()
        del inputs["targets"]
        # Without gradients the model would read a long row in segments. None is kept: the
        # teacher's weights need none.
        with torch.enable_grad():
            return model(**inputs, use_cache=False, **options)

    @torch.no_grad()
    def costs(
        self, student: TrellisForCausalLM, layers: list[int], stream: Stream, context: int,
        tokens: int, rows: int,
    ) -> dict[int, float]:  # fmt: skip
        """For each of the layers, KL(teacher || teacher with only this layer's mixer replaced by
        the student's), in nats per token, on about `tokens` tokens of a stream."""
        sums = dict.fromkeys(layers, 0.0)
        count = 0
        blocks: Any = self.model.model.layers
        others: Any = student.model.layers
        for batch in self._batches(stream, context, tokens, rows):
            log_p, targets = self._log_probabilities(batch)
            for layer in layers:
                own = blocks[layer].mixer
                blocks[layer].mixer = others[layer].mixer
                log_q, _ = self._log_probabilities(batch)
                blocks[layer].mixer = own
                sums[layer] += float(_divergence(log_p, log_q))
            count += len(targets)
        return {layer: total / count for layer, total in sums.items()}

    @torch.no_grad()
    def compare(
        self, student: TrellisForCausalLM, stream: Stream, context: int, tokens: int, rows: int,
        mixers: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """How far the student is from the teacher on about `tokens` tokens of a stream.

        validation_kl, validation_loss (the student's) and teacher_validation_loss are in nats per
        token. mixers: also the errors of the student's mixers, alone, by layer.
        """
        sums = torch.zeros(3, dtype=torch.float64)
        count, batches = 0, 0
        errors: dict[int, float] = {}
        for batch in self._batches(stream, context, tokens, rows):
            sums += torch.stack(self.divergence(student, batch)).cpu().double()
            count += batch.predicted
            batches += 1
            for layer, error in self.mixer_errors(student, batch).items() if mixers else ():
                errors[layer] = errors.get(layer, 0.0) + float(error)
        names = ("validation_kl", "teacher_validation_loss", "validation_loss")
        result: dict[str, Any] = dict(zip(names, (sums / count).tolist()))
        if mixers:
            result["mixer_errors"] = {str(i): error / batches for i, error in errors.items()}
        return result


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The sum over rows of KL(p || q)."""
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def said(found: dict[str, Any]) -> str:
    """What `Teacher.compare` found, as the end of a line about a validation."""
    text = (
        f"; the teacher's loss is {found['teacher_validation_loss']:.4f}, KL to it "
        f"{found['validation_kl']:.4f}"
    )
    if errors := found.get("mixer_errors"):
        listed = ", ".join(f"{error:.3f}" for error in errors.values())
        text += f"; error of the mixers by layer: {listed}"
    return text


def freeze_all_but_mixers(student: TrellisForCausalLM, layers: list[int]) -> None:
    """Leaves only the mixers of some layers to be trained."""
    student.requires_grad_(False)
    for layer in layers:
        block: Any = student.model.layers[layer]
        block.mixer.requires_grad_(True)


class LowRank(nn.Module):
    """weight + up @ down, where down [rank, inputs] is drawn and up [outputs, rank] starts at 0."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_low_rank(model: TrellisForCausalLM, rank: int) -> None:
    """Leaves to be trained: mixers other than attention, and a product of rank `rank` that is added
    to the weight of every linear map of attention and MLPs.

    Raises ValueError at a rank above the model's width.
    """
    if rank > model.config.hidden_size:
        raise ValueError(
            f"train.lora must be at most the model's width, {model.config.hidden_size}; got {rank}"
        )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Mixer) and not isinstance(module, TransformerMixer):
            module.requires_grad_(True)
    for linear in list(_outside(model.model.layers)):
        change = LowRank(linear.weight, rank)
        parametrize.register_parametrization(linear, "weight", change)


def merge_low_rank(model: TrellisForCausalLM) -> None:
    """Adds the products to the weights for good."""
    for linear in list(_outside(model.model.layers)):
        if parametrize.is_parametrized(linear, "weight"):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def _outside(module: nn.Module) -> Iterator[nn.Linear]:
    """Linear maps that are not inside of a mixer other than attention."""
    if isinstance(module, Mixer) and not isinstance(module, TransformerMixer):
        return
    if isinstance(module, nn.Linear):
        yield module
        return
    for child in module.children():
        yield from _outside(child)
