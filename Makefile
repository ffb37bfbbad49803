# `make demo` and `make test` set up what they need in .venv and then do their job. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The oldest supported transformers, beside the pinned newest one, for tests/hf.
OLDEST := .venv-oldest-transformers
# One test process per core, each with one thread: faster than one process with as many threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4

.PHONY: demo test test-oldest-transformers check setup clean

demo: $(STAMP)
	$(BIN)/switchhead demo --out demo-run

test: $(STAMP) test-oldest-transformers
	$(PYTEST)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

setup: $(STAMP)

# Installs once, and again when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "switchhead needs Python 3.11 or newer; found $$($(PYTHON) --version). Try make PYTHON=python3.11"; exit 1; }
	@command -v g++ >/dev/null || { echo "switchhead needs g++ (for torch.compile): apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python lacks venv: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): about 3 GB, some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

test-oldest-transformers: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTEST) tests/hf

$(OLDEST)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) transformers==5.17.0 \
		huggingface-hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.19.post1
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) demo-run .pytest_cache .ruff_cache
