"""Small sources and corpora for the tests of this folder."""

import hashlib
import json
import tarfile

from trellis.data import prepare_corpus

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
