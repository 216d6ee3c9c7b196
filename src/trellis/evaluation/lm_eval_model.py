"""Makes any model that can be opened here known to lm-eval, by the name `trellis`.

Texts are split into tokens as lm-eval's own `hf` model splits them. Our models read a context that
several continuations follow only once, and long texts with the memory of one segment.

`python -m trellis.evaluation.lm_eval_model` is the command `lm_eval` that knows this model:

    python -m trellis.evaluation.lm_eval_model --model trellis --model_args path=RUN --tasks piqa
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

try:
    import lm_eval.tasks  # noqa: F401, for reasoning.py
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "reasoning tasks need lm-eval: pip install 'trellis-memory[eval]'", name=error.name
    ) from error

from .models import EvaluatedModel, open_model
from .runner import progress
from .scoring import BATCH_TOKENS, batches, complete, score, token_losses

#: Tokens of an answer where the task does not say, as in lm-eval's own models.
MAX_ANSWER = 256


@register_model("trellis")
class TrellisLM(TemplateLM):
    """A model that lm-eval can ask.

    path: a run, an exported folder or a model of transformers; or give an open `model`.
    share: read a context that several continuations follow once (our models).
    batch_size, max_batch_size: given by lm-eval and not used: a batch has about `batch_tokens`
        tokens.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        model: EvaluatedModel | None = None,
        batch_tokens: int = BATCH_TOKENS,
        share: bool = True,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ):
        super().__init__()
        if (path is None) == (model is None):
            raise ValueError("give either the path of a model or an open model")
        # lm-eval's command asks for cuda also where there is none.
        cuda = torch.cuda.is_available() or not str(device).startswith("cuda")
        self.evaluated = model or open_model(str(path), device if device and cuda else "cpu")
        self.batch_tokens, self.share = batch_tokens, share
        self._device = self.evaluated.device
        #: The number of contexts that lost their beginning since they were too long for the model.
        self.cut = 0
        self._encoded: dict[str, list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        end = self.evaluated.tokenizer.end_of_document
        if end is None:
            raise ValueError(
                f"the tokenizer of {self.evaluated.name} has no token that ends documents, "
                "which stands before a text that nothing precedes"
            )
        return end

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.evaluated.bos is None else self.evaluated.bos

    @property
    def tokenizer_name(self) -> str:
        return self.evaluated.tokenizer.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text, with the tokens that the tokenizer puts around every text."""
        ids = self._encoded.get(string)
        if ids is None:
            ids = self.evaluated.tokenizer.encode(string).tolist()
        if add_special_tokens is False:
            return ids
        return [*self.evaluated.prefix, *ids, *self.evaluated.suffix]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Splits texts as lm-eval does, but encodes all of them in one call."""
        pairs = [request.args for request in requests]
        texts = {text for context, rest in pairs for text in (context.rstrip(), context + rest)}
        encoded = self.evaluated.tokenizer.encode_batch(list(texts))
        self._encoded = {text: ids.tolist() for text, ids in zip(texts, encoded)}
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._encoded = {}

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        with progress(self.evaluated.name, len(pairs)) as advance:
            scores = score(
                self.evaluated, pairs,
                batch_tokens=self.batch_tokens, share=self.share, progress=advance,
            )  # fmt: skip
        found = [(one.likelihood, one.greedy) for one in scores]
        for (texts, *_ids), one in zip(requests, found):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, one)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Likelihoods of whole texts. A model with a longest input reads them in windows of that
        length; any other model sees everything before each token."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        whole = self.evaluated.max_context is None
        found = self._in_one(texts) if whole else self._in_windows(texts)
        for request, likelihood in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, likelihood)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text after each prompt, up to the first of its stops."""
        groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1], MAX_ANSWER)
            if options.get("do_sample"):
                raise ValueError("the model `trellis` of lm-eval writes greedily; got do_sample")
            groups[tuple(options["until"]), options["max_gen_toks"]].append(number)
        found = [""] * len(requests)
        with progress(self.evaluated.name, len(requests)) as advance:
            for (stops, most), numbers in groups.items():
                prompts = [self._prompt(requests[n].args[0], most) for n in numbers]
                texts = complete(
                    self.evaluated, prompts, max_tokens=most, stop=[s for s in stops if s],
                    batch_tokens=self.batch_tokens, progress=advance,
                )  # fmt: skip
                for n, text in zip(numbers, texts):
                    found[n] = text
                    self.cache_hook.add_partial("generate_until", requests[n].args, text)
        return found

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cuts a context that is too long on its left. The last token is predicted, not read."""
        limit = self.evaluated.max_context
        if limit is None or len(context) + len(continuation) <= limit + 1:
            return context, continuation
        self.evaluated.check_context(len(continuation), "a continuation")
        self.cut += 1
        return context[len(context) + len(continuation) - limit - 1 :], continuation

    def _prompt(self, text: str, answer: int) -> list[int]:
        ids = self.tok_encode(text) or [self.prefix_token_id]
        if self.evaluated.max_context is None:
            return ids
        self.evaluated.check_context(answer + 1, "an answer")
        room = self.evaluated.max_context - answer
        self.cut += len(ids) > room
        return ids[-room:]

    def _in_one(self, texts: Sequence[list[int]]) -> list[float]:
        rows = [[self.prefix_token_id, *ids] for ids in texts]
        found = [0.0] * len(rows)
        some = [n for n, row in enumerate(rows) if len(row) > 1]
        with progress(self.evaluated.name, len(some)) as advance:
            for batch in batches([len(rows[n]) for n in some], self.batch_tokens):
                chosen = [some[i] for i in batch]
                losses = token_losses(self.evaluated, [rows[n] for n in chosen])
                for n, one in zip(chosen, losses):
                    found[n] = -float(one.double().sum())
                advance(len(chosen))
        return found

    def _in_windows(self, texts: Sequence[list[int]]) -> list[float]:
        owners, windows = [], []
        for number, ids in enumerate(texts):
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, self.evaluated.max_context, 1
            ):
                owners.append(number)
                windows.append((None, *make_disjoint_window(window)))
        found = [0.0] * len(texts)
        for number, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows)):
            found[number] += likelihood
        return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
