"""A causal language model to be measured: a run, an exported folder, or any of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizer import TextTokenizer
from ..models.cache import TrellisCache, hash_weights
from ..models.modeling import TrellisForCausalLM
from ..training.run import RECIPE, load_run, recipe_of
from .model_files import (
    check_exists,
    check_sizes,
    check_weights,
    kind_of,
    limit_of,
    name_of,
    named,
    tokenizer_of,
)  # fmt: skip

#: Fields of configurations that change when a model is copied; the weights tell their own type.
_NOISE = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype",
          "torch_dtype")  # fmt: skip
#: Tokens that a model of ours reads at a time.
SEGMENT_TOKENS = 4096


class Subject:
    """A model, its tokenizer, and what a result must say of them.

    max_context: the most tokens that it can read, None where there is no limit.
    bos: the token that begins texts, where the tokenizer of a model of transformers names one.
    prefix, suffix: what such a tokenizer itself puts around every text; ours put nothing there.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: TextTokenizer,
        about: dict[str, Any],
        bos: int | None = None,
    ):
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        digest = hashlib.sha256()
        hash_weights(digest, model)
        self.ours = isinstance(model, TrellisForCausalLM)
        self.bos = bos
        self.prefix, self.suffix = ([], []) if self.ours else _around(tokenizer)
        self.max_context = None if self.ours else limit_of(model.config)
        #: What a result must say to be repeated.
        self.about = {
            "name": name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights_sha256": digest.hexdigest(),
            "config_sha256": _hash_config(model.config),
            "tokenizer_sha256": tokenizer.sha256,
            "start": self.start,
            "end": tokenizer.end_of_document,
            **about,
        }

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def start(self) -> list[int]:
        """What stands before a text that nothing precedes, as models were trained.

        Ours: the token that ends documents. Of transformers: what the tokenizer puts before every
        text; if nothing, the token that begins texts; if there is none, the one that ends them.
        """
        if self.prefix:
            return self.prefix
        first = self.tokenizer.end_of_document if self.bos is None else self.bos
        return [] if first is None else [first]

    def check_context(self, tokens: int, what: str) -> None:
        """Raises ValueError if the model cannot read so many tokens."""
        if self.max_context is not None and tokens > self.max_context:
            raise ValueError(
                f"{what} has {tokens:,} tokens, but {self.name} reads at most "
                f"{self.max_context:,}: take a shorter one"
            )

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [T, V] of every row; rows of different lengths share a batch."""
        ids, mask = self._batch(rows)
        out = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=0).logits
        return [logits[: len(row)] for logits, row in zip(out, rows)]

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], TrellisCache]:
        """Logits after the last token of every row, and the states: our models only.

        Rows are read in segments, so that a row of any length takes the memory of one.
        """
        ids, mask = self._batch(rows)
        cache = self.model.init_cache(len(rows))
        last = mask.sum(1) - 1
        found = [torch.empty(0)] * len(rows)
        size = max(1, SEGMENT_TOKENS // len(rows))
        for begin in range(0, ids.shape[1], size):
            part = slice(begin, begin + size)
            # A row that has ended is all padding, which moves no state.
            out = self.model.model(
                ids[:, part], attention_mask=mask[:, part], past_key_values=cache
            )
            for n, place in enumerate((last - begin).tolist()):
                if 0 <= place < size:
                    found[n] = out.last_hidden_state[n, place].clone()
        return list(self.model.lm_head(torch.stack(found))), cache

    @torch.no_grad()
    def go_on(self, rows: Sequence[Sequence[int]], cache: TrellisCache) -> list[Tensor]:
        """Logits [T, V] of rows that go on from states, which are moved on: our models only."""
        ids, mask = self._batch(rows)
        out = self.model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=0).logits
        return [logits[: len(row)] for logits, row in zip(out, rows)]

    def _batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Rows padded on the right, and their mask. A causal model never sees that padding."""
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = pad_sequence(tensors, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return ids.to(self.device), mask.to(self.device)


def load_subject(model: str, device: str = "cpu") -> Subject:
    """A run's folder, a folder that `trellis export` wrote, or a model of transformers.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: what is there cannot be loaded.
    """
    check_exists(model)
    path = Path(model)
    about: dict[str, Any] = {"path": model}
    with named(model):
        run = (path / RECIPE).is_file()
        if run:
            about["recipe"] = recipe_of(path).as_dict()
        elif not path.exists() or kind_of(path) != "trellis":
            return _from_transformers(model, device)
        if not run:
            check_weights(path)
        ours, tokenizer = load_run(path)
    return Subject(name_of(model), ours.to(device), tokenizer, about)


def _from_transformers(name: str, device: str) -> Subject:
    from transformers import AutoModelForCausalLM

    if Path(name).exists():
        check_weights(Path(name))
    tokenizer, bos = tokenizer_of(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(f"there is no model {name}: {error}") from error
    check_sizes(tokenizer, model.get_input_embeddings().weight.shape[0])
    return Subject(name_of(name), model.to(device), tokenizer, {"path": name}, bos)


def _around(tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind every text: what is around a text that is known."""
    text = tokenizer.inner.encode("a", add_special_tokens=False).ids
    whole = tokenizer.inner.encode("a").ids
    for place in range(len(whole) - len(text) + 1):
        if text and whole[place : place + len(text)] == text:
            return whole[:place], whole[place + len(text) :]
    return [], []


def _hash_config(config: Any) -> str:
    """Of what a configuration says of the computation: not of names, versions and files."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    kept = {name: value for name, value in fields.items() if name not in _NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
