PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLA_VENV := .venv-fla
FLA_STAMP := $(FLA_VENV)/.installed
FORECAST_VENV := .venv-forecast
FORECAST_STAMP := $(FORECAST_VENV)/.installed
# The same torch for every environment that this file makes, also for those that pip builds in.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: setup demo test test-parity test-forecast test-triton test-gpu test-gpu-sanitize test-slow test-serve test-sanitize lint format typecheck wheel bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

# Two processes of one thread each: most tests are too small to share among threads.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadscope

# Every mixer against independent implementations; nothing may skip. flash-linear-attention has an
# environment of its own: where it is installed, transformers takes its GPU kernels, on a CPU too.
test-parity: setup $(FLA_STAMP)
	TRELLIS_NO_SKIPS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity -m "not fla"
	TRELLIS_NO_SKIPS=1 OMP_NUM_THREADS=1 $(FLA_VENV)/bin/python -m pytest tests/parity -m fla

$(FLA_STAMP): pyproject.toml constraints.txt Makefile
	test -x $(FLA_VENV)/bin/python || $(PYTHON) -m venv $(FLA_VENV)
	$(FLA_VENV)/bin/python -m pip install --quiet -e '.[parity]'
	touch $(FLA_STAMP)

# The forecaster inside neuralforecast, which has an environment of its own: it brings ray and
# lightning. The first line fails where neuralforecast is missing, so that nothing skips.
test-forecast: $(FORECAST_STAMP)
	$(FORECAST_VENV)/bin/python -c "import neuralforecast"
	OMP_NUM_THREADS=1 $(FORECAST_VENV)/bin/python -m pytest tests/forecasting/test_neural.py

$(FORECAST_STAMP): pyproject.toml constraints.txt Makefile
	test -x $(FORECAST_VENV)/bin/python || $(PYTHON) -m venv $(FORECAST_VENV)
	$(FORECAST_VENV)/bin/python -m pip install --quiet -e '.[test-forecast]'
	touch $(FORECAST_STAMP)

# The memory's GPU kernels without a GPU: in Triton's interpreter, and compiled for three
# architectures. The interpreter is for all of a process or for none.
test-triton: $(FLA_STAMP)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(FLA_VENV)/bin/python -m pytest tests/triton/test_interpreter.py \
		tests/triton/test_fla.py tests/triton/test_cross_entropy.py
	OMP_NUM_THREADS=1 $(FLA_VENV)/bin/python -m pytest tests/triton/test_registers.py

# On a machine with a GPU, with its own torch: see docs/gpu.md. The second runs a part of it under
# NVIDIA's compute-sanitizer.
GPU_PYTHON ?= python
test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu

test-gpu-sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
	$(GPU_PYTHON) -m pytest tests/gpu -k "fp32 or packs"

# What takes longer, such as the wheel in a clean environment.
test-slow: setup
	$(BIN)/python -m pytest -m slow

# `trellis serve` whole: crashes, a full disk, 64 clients, drawn requests, and its page in a browser.
# Nothing may skip: it needs chromium and chromedriver, and root to mount a small file system.
test-serve: setup
	TRELLIS_NO_SKIPS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serving

# The kernel's tests with the compiler's address and undefined-behaviour sanitizers.
test-sanitize: setup
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 TRELLIS_NATIVE_TARGET=sanitize OMP_NUM_THREADS=2 \
	$(BIN)/python -m pytest tests/ops/memory/test_backends.py tests/ops/memory/test_chaining.py \
		tests/ops/memory/test_edges.py tests/ops/test_norms.py tests/ops/test_gates.py \
		tests/ops/test_cross_entropy.py tests/ops/test_convolution.py tests/models/test_decoder.py \
		tests/ops/native/test_shapes.py -k "not all_equal and not compile and not other_targets"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: setup
	$(BIN)/mypy

# Builds the wheel, then installs and uses it in a fresh environment.
wheel: setup
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .
	PYTHON=$(PYTHON) bash tests/wheel/check.sh dist/*.whl

bench: setup
	$(BIN)/trellis bench ops --out runs/bench
	$(BIN)/trellis bench chunked
	$(BIN)/trellis bench training recipes/books.toml
	$(BIN)/trellis bench stream --figure docs/figures/stream.png

clean:
	rm -rf $(VENV) $(FLA_VENV) $(FORECAST_VENV) dist build
