"""Conversations as tokens, by the chat template of the model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..data.tokenizer import TextTokenizer
from ..files import parse_json

#: A file of a model's folder that makes it a chat model, as transformers writes it.
TEMPLATE = "chat_template.jinja"
NO_TEMPLATE = (
    "this model has no chat template, so it does not know whose turn a text is. Send plain text to "
    "/v1/completions or as the `input` of /v1/responses, or put a "
    f"{TEMPLATE} into the model's folder"
)
#: Roles whose messages come before the first turn.
SYSTEM = ("system", "developer")
#: A turn that stands in for those that a state has read.
_BEFORE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\ue000"}]


class ChatTemplate:
    """Renders messages [{"role": ..., "content": ...}] to token ids."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer):
        """Raises ValueError if the folder's template cannot be used."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.end = tokenizer.end_of_document
        if (folder / "tokenizer_config.json").is_file():
            self.inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        else:
            inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
            inner.encode_special_tokens = False
            name = None if self.end is None else inner.id_to_token(self.end)
            self.inner = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=name)
        if self.inner.eos_token_id is not None:  # what ends a turn
            self.end = tokenizer.end_of_document = self.inner.eos_token_id
        if (folder / TEMPLATE).is_file():
            self.inner.chat_template = (folder / TEMPLATE).read_text(encoding="utf-8")
        try:
            self.encode([{"role": "user", "content": "q"}])
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error

    @classmethod
    def of(cls, folder: Path, tokenizer: TextTokenizer) -> ChatTemplate | None:
        """The template of a model's folder; None if it has none."""
        config = folder / "tokenizer_config.json"
        told = config.is_file() and parse_json(config.read_text()).get("chat_template")
        return cls(folder, tokenizer) if told or (folder / TEMPLATE).is_file() else None

    def render(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        """The text of a conversation. answer: whether the model's turn begins at its end.

        Raises ValueError where the template does not take the messages.
        """
        try:
            return self.inner.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer
            )
        except Exception as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def encode(self, messages: list[dict[str, str]]) -> tuple[np.ndarray, list[int]]:
        """The ids of a conversation, and the place, in tokens, where what is before the first turn
        ends: the system's message, which many conversations share."""
        ids, places = self._ids(self.render(messages)), []
        first = next((n for n, m in enumerate(messages) if m["role"] not in SYSTEM), 0)
        if first:
            one, two = (self.render([*messages[:first], {"role": "user", "content": c}])
                        for c in ("\ue000", "\ue001"))  # fmt: skip
            same = next((n for n, (a, b) in enumerate(zip(one, two)) if a != b), 0)
            system = self._ids(one[:same])
            if np.array_equal(ids[: len(system)], system):
                places = [len(system)]
        return ids, places

    def encode_next(self, messages: list[dict[str, str]], ended: bool) -> np.ndarray:
        """The ids of further turns, after a state that has read a conversation up to an answer.

        ended: whether the state has read the token with which the answer ended.
        """
        before = self.render(_BEFORE, answer=False)
        after = self.render([*_BEFORE, *messages])
        if "\ue000" not in before or not after.startswith(before):
            raise ValueError("the chat template does not let a conversation go on from a state")
        ids = self._ids(after[before.index("\ue000") + 1 :])
        return ids[1:] if ended and len(ids) and ids[0] == self.end else ids

    def _ids(self, text: str) -> np.ndarray:
        text.encode()  # raises ValueError at half a character, which the library does not take
        return np.array(self.inner.encode(text, add_special_tokens=False), np.int64)
