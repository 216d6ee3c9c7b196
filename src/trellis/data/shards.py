"""A corpus on disk: memory-mapped token shards, document ends, a manifest.

A corpus is a folder:

    manifest.json               what it is made of; counts and hashes of everything below
    tokenizer.json
    train-00000.bin, ...        token ids, little-endian uint16 (vocabulary <= 65536) or uint32
    train-documents.bin         where each document ends in the split's token stream, uint64
    validation-00000.bin, ...   the same for the validation split
    validation-documents.bin
    skipped.jsonl               every input that was left out, with the reason

A split is one stream of tokens; documents and reads cross the borders of shards.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import hash_file

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

FORMAT = "trellis-corpus"
FORMAT_VERSION = 1
SPLITS = ("train", "validation")
MANIFEST_FILE = "manifest.json"
#: In the folder of an unfinished run: how far it is.
PROGRESS_FILE = "progress.json"
END_DTYPE = np.dtype("<u8")
_AGAIN = "prepare the corpus again (`trellis data prepare`)"

#: What `check_layout` compares with.
SPLIT_LAYOUT = {
    "tokens": int,
    "documents": int,
    "bytes": int,
    "shards": [{"file": str, "tokens": int, "sha256": str}],
}
_MANIFEST_LAYOUT = {
    "library_version": str,
    "tokenizer": {"name": str, "sha256": str, "vocab_size": int},
    "dtype": str,
    "options": {},
    "sources": [{"source": str, "files": int, "bytes": int}],
    "splits": {split: {**SPLIT_LAYOUT, "documents_sha256": str} for split in SPLITS},
    "held_out": ({"why": str},),
    "skipped": {"count": int, "reasons": {}, "file": str, "size": int, "sha256": str},
    "ignored": {},
}


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.bin"


def ends_name(split: str) -> str:
    return f"{split}-documents.bin"


def is_corpus(folder: str | Path) -> bool:
    """Whether a folder is a corpus, or becomes one."""
    for name in (MANIFEST_FILE, PROGRESS_FILE):
        try:
            content = json.loads(Path(folder, name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return True
    return False


def check_layout(found: Any, layout: Any, name: str = "the file") -> None:
    """Raises ValueError naming what of a JSON value is missing, or not of its type.

    layout: a type; {key: layout}, where other keys may be there too; [layout of every item]; or
    (layout,) if it may be null. Whole numbers are counts and must not be negative.
    """
    if isinstance(layout, tuple):
        if found is None:
            return
        layout = layout[0]
    kind: Any = layout if isinstance(layout, type) else type(layout)
    if type(found) is not kind or (kind is int and found < 0):
        raise ValueError(f"{name} must be {_NAMES[kind]}; got {found!r}")
    if kind is dict:
        for key, inner in layout.items():
            if key not in found:
                raise ValueError(f"{name} has no {key!r}")
            check_layout(found[key], inner, repr(key))
    elif kind is list:
        for item in found:
            check_layout(item, layout[0], f"an item of {name}")


_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "a count", bool: "true or false"
}  # fmt: skip


class TokenStream:
    """One split of a corpus. Cheap to pickle and safe to fork: files are mapped on first use."""

    def __init__(self, folder: Path, split: str, entry: dict[str, Any], dtype: np.dtype) -> None:
        self.split = split
        self.tokens: int = entry["tokens"]
        self.documents: int = entry["documents"]
        self.bytes: int = entry["bytes"]  # of text, in UTF-8
        self._dtype = dtype
        self._shards = [(folder / s["file"], s["tokens"]) for s in entry["shards"]]
        self._starts = np.cumsum([0, *(tokens for _, tokens in self._shards)])
        self._ends_path = folder / ends_name(split)
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"TokenStream({self.split!r}, tokens={self.tokens}, documents={self.documents})"

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap would be the data itself.
        return {**{k: v for k, v in self.__dict__.items() if k != "ends"}, "_maps": {}}

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each document ends in the stream: uint64 [documents], never decreasing."""
        return _map(self._ends_path, END_DTYPE, self.documents)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` as int64 [stop - start].

        Raises IndexError unless 0 <= start <= stop <= tokens.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(
                f"{self.split} tokens {start}:{stop} were asked for; start and stop must be in "
                f"order and within 0:{self.tokens}"
            )
        out = np.empty(stop - start, np.int64)
        at = start
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while at < stop:
            first = int(self._starts[index])
            end = min(stop, int(self._starts[index + 1]))
            out[at - start : end - start] = self._shard(index)[at - first : end - first]
            at = end
            index += 1
        return out

    def _shard(self, index: int) -> np.ndarray:
        if index not in self._maps:
            path, tokens = self._shards[index]
            self._maps[index] = _map(path, self._dtype, tokens)
        return self._maps[index]


class Corpus:
    """A prepared corpus, opened for reading by `open_corpus`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.path = folder
        self.manifest = manifest
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        dtype = np.dtype(manifest["dtype"])
        splits = manifest["splits"]
        self.train = TokenStream(folder, "train", splits["train"], dtype)
        self.validation = TokenStream(folder, "validation", splits["validation"], dtype)

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, {self.train!r}, {self.validation!r})"

    @property
    def fingerprint(self) -> str:
        """sha256 of the manifest's content, hence of every token and of the tokenizer."""
        text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the corpus was made with.

        Raises FileNotFoundError if its file is gone, ValueError if it is another one.
        """
        from .tokenizer import FILE_NAME, TextTokenizer

        path = self.path / FILE_NAME
        expected = self.manifest["tokenizer"]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: put it back, or {_AGAIN}")
        try:
            tokenizer = TextTokenizer(path.read_text(encoding="utf-8"), expected["name"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}; put it back, or {_AGAIN}") from error
        if tokenizer.sha256 != expected["sha256"]:
            raise ValueError(
                f"{path} is not the tokenizer that the tokens were made with: sha256 "
                f"{tokenizer.sha256}, expected {expected['sha256']}; put it back, or {_AGAIN}"
            )
        return tokenizer

    def files(self) -> list[tuple[Path, int, str]]:
        """Every data file: path, bytes that it must have, sha256."""
        itemsize = np.dtype(self.manifest["dtype"]).itemsize
        found = []
        for split in SPLITS:
            entry = self.manifest["splits"][split]
            for shard in entry["shards"]:
                path = self.path / shard["file"]
                found.append((path, shard["tokens"] * itemsize, shard["sha256"]))
            size = entry["documents"] * END_DTYPE.itemsize
            found.append((self.path / ends_name(split), size, entry["documents_sha256"]))
        skipped = self.manifest["skipped"]
        found.append((self.path / skipped["file"], skipped["size"], skipped["sha256"]))
        return found

    def check(self) -> None:
        """What can be checked without reading the tokens: files, sizes, tokenizer, counts.

        Raises FileNotFoundError or ValueError, naming the file, what was found and expected.
        """
        tokenizer = self.tokenizer()
        found = self.vocab_size, self.manifest["dtype"]
        if found != (tokenizer.vocab_size, tokenizer.dtype.str):
            raise ValueError(
                f"{self.path / MANIFEST_FILE} has vocab_size {found[0]} and dtype {found[1]!r}, "
                f"expected {tokenizer.vocab_size} and {tokenizer.dtype.str!r} of its tokenizer: "
                f"{_AGAIN}"
            )
        for path, size, _ in self.files():
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing ({size:,} bytes expected): put it back, or {_AGAIN}"
                )
            if path.stat().st_size != size:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, expected {size:,}: {_AGAIN}"
                )
        for stream in (self.train, self.validation):
            last = int(stream.ends[-1]) if stream.documents else 0
            counted = sum(s["tokens"] for s in self.manifest["splits"][stream.split]["shards"])
            if not last == stream.tokens == counted:
                raise ValueError(
                    f"{self.path / ends_name(stream.split)} ends at token {last:,} and the shards "
                    f"have {counted:,}, expected {stream.tokens:,}: {_AGAIN}"
                )

    def verify(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Reads every file again and compares its hash with the manifest's.

        progress: called with the file's name, the bytes done and the bytes in all.
        Raises ValueError naming every file that differs; FileNotFoundError if one is missing.
        """
        self.check()
        files = self.files()
        total = sum(size for _, size, _ in files)
        done = 0
        wrong = []
        for path, _, expected in files:

            def advance(count: int, name: str = path.name) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(name, done, total)

            found = hash_file(path, advance=advance).hexdigest()
            if found != expected:
                wrong.append(f"{path}: sha256 {found}, expected {expected}")
        if wrong:
            raise ValueError("\n".join([*wrong, f"the content was changed: {_AGAIN}"]))


def open_corpus(path: str | Path) -> Corpus:
    """Opens a prepared corpus and checks that it is whole, without reading its tokens.

    Raises FileNotFoundError if there is no corpus or one of its files is missing, and ValueError if
    it is of another format or a file does not match the manifest.
    """
    folder = Path(path)
    file = folder / MANIFEST_FILE
    if not file.is_file():
        hint = "make a corpus with `trellis data prepare SOURCE --out DIR`"
        for unfinished in (folder, Path(f"{folder}.partial")):
            if (unfinished / PROGRESS_FILE).is_file():
                hint = f"{unfinished} is unfinished: run its `trellis data prepare` again to go on"
        raise FileNotFoundError(f"{folder} is not a corpus: there is no {file.name}; {hint}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a manifest of a corpus ({error!r}): {_AGAIN}") from error
    if found != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{file} is of format {found[0]!r}, version {found[1]!r}; this library reads "
            f"{FORMAT!r}, version {FORMAT_VERSION}: use the version of trellis that wrote it "
            f"({manifest.get('library_version')}), or {_AGAIN}"
        )
    try:
        check_layout(manifest, _MANIFEST_LAYOUT)
        corpus = Corpus(folder, manifest)
    except (ValueError, TypeError) as error:  # TypeError: a dtype that there is not
        raise ValueError(f"{file} is damaged: {error}; {_AGAIN}") from error
    corpus.check()
    return corpus


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,))
