# make demo: see the whole thing work.  make test: lint, types, all tests.  make bench: measure the claims.
# make soak: half an hour of faults, after those of disks at every write, of images, of islands, also of one that means
# ill, and of an object store, and a newcomer's first week.
# make docs: build the site of docs/ into build/site, without a network; a broken link ends it.
# Each makes the environment it needs. uv, where it is installed, does most of that, faster than pip; without a GPU it
# takes PyTorch's build for the CPU, if it can reach PyTorch's own index. pip adds what is missing. It would compile on
# one core; compileall uses all of them.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PACKAGES := --constraint constraints.txt --editable '.[dev]'
UV := uv pip install --python $(BIN)/python $(PACKAGES)
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: env demo test types tests docs chaos bench soak
env: $(READY)

$(READY): pyproject.toml study/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("ddm-ray needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; name another with: make PYTHON=python3.11 ..." % v)'
	@echo "Making the environment in .venv, once: some minutes, and 7 GB, or 3 GB where uv finds no GPU."
	@$(PYTHON) -m venv .venv
	@{ $(UV) --torch-backend auto || $(UV); } >.venv/install.log 2>&1 || true
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(PACKAGES) --editable ./study 2>>.venv/install.log \
		|| { tail -n 20 .venv/install.log; exit 1; }
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >>.venv/install.log || true
	@touch $@

demo: $(READY)
	@$(BIN)/ddm demo

test: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(MAKE) --no-print-directory --jobs 2 types tests

types: $(READY)
	@$(BIN)/mypy

tests: $(READY)
	@$(BIN)/pytest -n 4

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# SLICE=3/10 for a tenth of its tests, without the tests that draw all faults.
chaos: $(READY)
	@$(BIN)/pytest -n 2 -m chaos $(if $(SLICE),--slice $(SLICE) -k 'not [every')

bench: $(READY)
	@$(BIN)/python benchmarks/sampling.py $(BENCH)
	@$(BIN)/python benchmarks/data.py $(BENCH)
	@$(BIN)/python benchmarks/train.py $(BENCH)
	@$(BIN)/python benchmarks/storage_requests.py $(BENCH)

soak: $(READY) chaos
	@$(BIN)/pytest tests/train/ray --in-bucket -m "integration or chaos"
	@$(BIN)/python benchmarks/storage_faults.py
	@$(BIN)/python benchmarks/storage_faults.py --each-put
	@$(BIN)/python benchmarks/storage_cuts.py
	@$(BIN)/python benchmarks/first_week.py
	@$(BIN)/python benchmarks/overtaken.py
	@$(BIN)/python benchmarks/island_chaos.py
	@$(BIN)/python benchmarks/soak.py $(SOAK)
