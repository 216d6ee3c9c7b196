"""Text to token ids and back: bytes, a `tokenizer.json`, or a tokenizer of the Hugging Face hub.

`train_tokenizer` makes a byte-level BPE tokenizer from the sources that `prepare_corpus` reads.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_whole
from .documents import Piece, Skip
from .pieces import AFTER_NEWLINE_OR_BEFORE_SPACE, cut, safe_place
from .sources import LeftOut, Meter, list_sources, read_unit

try:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "trellis.data needs tokenizers: pip install 'trellis-memory[models]'", name=error.name
    ) from error

END_OF_DOCUMENT = "<|endoftext|>"
_END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
FILE_NAME = "tokenizer.json"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")

#: The smallest vocabulary that is trained has every byte and the end of a document. The largest is
#: far above any in use; the library reserves memory for it at once.
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 1 << 24

#: Long texts are encoded in pieces of about this size.
_PIECE_CHARACTERS = 1 << 15
#: How much text one call of the library encodes; it needs some 50 times as much memory.
_CALL_CHARACTERS = (1 << 19) * min(os.cpu_count() or 1, 32)


class TextTokenizer:
    """A `tokenizers.Tokenizer` that knows the end of a document and encodes long texts fast.

    Special tokens are neither added nor recognised: the characters `<|endoftext|>` in a text are
    encoded like any others.
    """

    def __init__(self, source: str, name: str) -> None:
        """source: the content of a tokenizer.json. Raises ValueError if it is not valid."""
        try:
            self.json: dict[str, Any] = json.loads(source)
            inner = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"tokenizer {name!r} is not a valid tokenizer.json: {error}"
            ) from error
        # Texts are neither cut nor padded, even if the file says so.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.name = name
        self.inner = inner
        self.sha256 = hashlib.sha256(canonical(self.json)).hexdigest()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"tokenizer {name!r} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        ids = [inner.token_to_id(token) for token in _END_OF_DOCUMENT_NAMES]
        self.end_of_document: int | None = next((i for i in ids if i is not None), None)
        self._bytes = self.json == _bytes_json()

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTokenizer, (json.dumps(self.json), self.name)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, as `dtype` [T]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `dtype` [T]. Long texts are encoded by all cores."""
        if self._bytes:
            return [np.frombuffer(t.encode(), np.uint8).astype(self.dtype) for t in texts]
        place = self._place
        if place is None:
            return self._encode_whole(texts)
        pieces = [list(cut(text, place, _PIECE_CHARACTERS)) for text in texts]
        encoded = iter(self._encode_whole([piece for some in pieces for piece in some]))
        return [np.concatenate([next(encoded) for _ in some]) for some in pieces]

    def encode_parts(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of a text that comes in parts, piece by piece: the same as those of the whole.

        Where the text can be cut, only a piece of it is in memory at a time.
        """
        held = ""
        for part in parts:
            held += part
            if self._bytes:
                yield self.encode(held)
                held = ""
            elif len(held) > 2 * _PIECE_CHARACTERS and self._place is not None:
                *pieces, held = cut(held, self._place, _PIECE_CHARACTERS)
                for piece in pieces:
                    yield self.encode(piece)
        if held:
            yield self.encode(held)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """A new decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def save(self, folder: str | Path) -> Path:
        """Writes `tokenizer.json` to a folder, which is made if it does not exist."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.json, ensure_ascii=False).encode())
        return path

    @functools.cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each id (special tokens have none); None if it is not a byte-level BPE."""
        if (self.json.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        value = {character: byte for byte, character in enumerate(_byte_alphabet())}
        table = [b""] * self.vocab_size
        for token, i in self.inner.get_vocab(with_added_tokens=False).items():
            # The library's decoder keeps characters that stand for no byte, too.
            table[i] = b"".join(bytes([value[c]]) if c in value else c.encode() for c in token)
        for i, added in self.inner.get_added_tokens_decoder().items():
            table[i] = b"" if added.special else added.content.encode()
        return table

    @functools.cached_property
    def _place(self) -> Any:
        vocabulary = self.token_bytes
        if vocabulary is None:
            tokens = self.inner.get_vocab(with_added_tokens=False)
            vocabulary = [t.replace("\u2581", " ").encode(errors="replace") for t in tokens]
        return safe_place(self._encode_whole, vocabulary)

    def _encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        group: list[str] = []
        size = 0
        for i, text in enumerate(texts):
            text.encode()  # raises ValueError at half a character, which the library does not take
            group.append(text)
            size += len(text)
            if size >= _CALL_CHARACTERS or i == len(texts) - 1:
                encoded = self.inner.encode_batch_fast(group, add_special_tokens=False)
                out += [np.array(e.ids, dtype=self.dtype) for e in encoded]
                group, size = [], 0
        return out


class StreamDecoder:
    """Turns ids into text as they arrive; a character may need several ids to be complete."""

    #: How many ids are held back until they form a character; after these they never will.
    _HELD = 8

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # ids before the pending ones, whose text may depend on them
        self._pending: list[int] = []

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text that these ids complete, which may be empty."""
        new = [ids] if isinstance(ids, (int, np.integer)) else ids
        if self._table is not None:
            table = self._table
            return self._utf8.decode(b"".join([table[i] for i in new]))
        return "".join(self._step(int(i)) for i in new)

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for an incomplete character."""
        if self._table is not None:
            return self._utf8.decode(b"", final=True)
        text = self._pending_text()
        self._context, self._pending = [], []
        return text

    def _step(self, i: int) -> str:
        self._pending.append(i)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._HELD:
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """Loads `bytes`, a tokenizer.json, the one in a folder, or a tokenizer by its name on the hub.

    Raises FileNotFoundError if a path has no tokenizer, and ValueError if a file is not a tokenizer
    or the hub does not have one.
    """
    name = str(name)
    if name == "bytes":
        return TextTokenizer(json.dumps(_bytes_json()), name)
    path = Path(name)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {name!r}: the folder has no {FILE_NAME}")
    if path.is_file():
        try:
            return TextTokenizer(path.read_text(encoding="utf-8"), name)
        except UnicodeDecodeError as error:
            raise ValueError(f"tokenizer {name!r} is not a tokenizer.json: {error}") from error
    if path.is_absolute() or name.startswith(".") or name.endswith(".json") or name.count("/") > 1:
        raise FileNotFoundError(
            f"tokenizer {name!r} does not exist: give bytes, a tokenizer.json, a folder with one, "
            "or a name on the Hugging Face hub"
        )
    try:
        inner = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"tokenizer {name!r} is neither bytes nor a file here, and the Hugging Face hub did "
            f"not give it: {error}"
        ) from error
    return TextTokenizer(inner.to_str(), name)


def read_llama2c_tokenizer(path: Path, vocab_size: int) -> TextTokenizer:
    """The tokenizer.bin of the project llama2.c as a tokenizer.json.

    The file has an int32, the longest token, then for each token a float32 score, an int32 length
    and its bytes. A text is encoded by merging the pair of neighbours whose token has the highest
    score, after a space was put before it; characters without a token become tokens of bytes. The
    token 1, which begins every text, is also what stands between two texts: it ends documents here.

    Raises ValueError if the file is not one, or has another vocabulary.
    """
    data = path.read_bytes()
    tokens: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(data):
        if at + 8 > len(data):
            raise ValueError(f"{path} is not a whole tokenizer of llama2.c: it ends in a token")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if length < 0 or at + length > len(data):
            raise ValueError(f"{path} is not a tokenizer of llama2.c: a token has {length} bytes")
        tokens.append(data[at : at + length].decode(errors="replace").replace(" ", "\u2581"))
        scores.append(score)
        at += length
    if len(tokens) != vocab_size:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, but the model {vocab_size}: it is not the tokenizer "
            "that the model was trained with"
        )
    tokens[1:3] = [END_OF_DOCUMENT, "</s>"]
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    merges = [
        (-scores[i], ids[token[:place]], ids[token[place:]], token[:place], token[place:])
        for token, i in ids.items()
        if i > 2 and not _BYTE_TOKEN.fullmatch(token)
        for place in range(1, len(token))
        if token[:place] in ids and token[place:] in ids
    ]
    model = models.BPE(
        vocab=ids,
        merges=[(first, second) for *_, first, second in sorted(merges)],
        unk_token=tokens[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    inner.add_special_tokens([tokens[0], END_OF_DOCUMENT])
    return TextTokenizer(inner.to_str(), str(path))


def train_tokenizer(
    sources: Sequence[str | Path],
    vocab_size: int,
    out: str | Path,
    *,
    text_field: str = "text",
    progress: Callable[[int, int], None] | None = None,
    skipped: Callable[[Skip], None] | None = None,
    ignored: Callable[[Counter[str]], None] | None = None,
) -> TextTokenizer:
    """Trains with GPT-2's pre-tokenizer and writes `out`, a folder or a path that ends in .json.

    progress: called with the documents and the bytes of text read so far.
    skipped: called with each input that cannot be read.
    ignored: called at the end with how many files of each kind were ignored.

    Raises FileExistsError if the file exists, another OSError if it cannot be written, ValueError
    if `vocab_size` is out of range or the sources have no text, and what `list_sources` raises.
    """
    path = Path(out)
    if path.suffix != ".json":
        path = path / FILE_NAME
    _check_output(path)
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and {END_OF_DOCUMENT}) "
            f"and at most {LARGEST_VOCABULARY}; got {vocab_size}"
        )
    listing = list_sources(sources)
    left_out = LeftOut(listing, skipped)
    documents = size = 0

    def texts() -> Iterator[str]:
        nonlocal documents, size
        for unit in listing.units:
            for event in read_unit(unit, text_field, Meter()):
                if not isinstance(event, Piece):
                    left_out.add(event)
                    continue
                documents += event.last
                size += event.size
                # In pieces, since the library collects hundreds of texts at a time.
                yield from cut(event.text, AFTER_NEWLINE_OR_BEFORE_SPACE, 1 << 15)
                if progress is not None:
                    progress(documents, size)

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts(), trainer)
    if documents == 0:
        raise left_out.no_documents()
    if ignored is not None:
        ignored(left_out.all_ignored())
    tokenizer = TextTokenizer(inner.to_str(), str(out))
    _check_output(path)  # again: reading took its time
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, inner.to_str(pretty=False).encode())
    return tokenizer


def _check_output(path: Path) -> None:
    """Raises FileExistsError if the file exists, OSError if it cannot be written."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists: remove it or choose another --out")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write to {folder}")


def canonical(content: Any) -> bytes:
    """JSON whose bytes depend on the content alone, for hashes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _bytes_json() -> dict[str, Any]:
    """The tokenizer.json of `bytes`, whose ids are byte values: BPE without merges.

    It is spelled out here so that its hash does not depend on the version of the library.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
             "use_regex": False}  # fmt: skip
    end = {"id": 256, "content": END_OF_DOCUMENT, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False, "special": True}  # fmt: skip
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": model}  # fmt: skip


@functools.cache
def _byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: its own if that is printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
