#!/usr/bin/env bash
# Installs a wheel into a fresh environment and uses it there: the ops and mixers without
# transformers first, then the language model.
set -euo pipefail
wheel=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for file in index.html app.js style.css; do
    "${PYTHON:-python3.11}" -m zipfile -l "$wheel" | grep -q "trellis/serving/page/$file"
done
cd "$work" # away from the sources
"${PYTHON:-python3.11}" -m venv env
env/bin/python -m pip install --quiet "$wheel"
env/bin/python "$here/use_ops.py"
env/bin/python -m pip install --quiet "$wheel[models]"
env/bin/python "$here/use_models.py"
