# make demo: see the whole thing work.  make test: lint, types, all tests.  make bench: measure the claims.
# make soak: half an hour of faults, after those of disks at every write, of images, of islands, also of one that means
# ill, and of an object store, and a newcomer's first week.
# make docs: build the site of docs/ into build/site, without a network; a broken link ends it.
# Each makes the environment it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: env demo test types tests docs chaos bench soak
env: $(READY)

$(READY): pyproject.toml study/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit("ddm-ray needs Python 3.11, $(PYTHON) is %d.%d; name another with: make PYTHON=python3.11 ..." % v)'
	@echo "Making the environment in .venv: about 7 GB, some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable ./study 2>.venv/install.log \
		|| { tail -n 20 .venv/install.log; exit 1; }
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
	@$(BIN)/pytest -n 3

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# SLICE=3/10 for a tenth of its files, without the tests that draw all faults, which take an hour each; BY=600 to begin
# no test after ten minutes.
chaos: $(READY)
	@$(BIN)/pytest -n 2 -m chaos $(if $(SLICE),--slice $(SLICE) -k 'not [every') $(if $(BY),--seconds $(BY))

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
