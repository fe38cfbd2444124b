# make demo: see the whole thing work.  make test: lint, types, all tests.  make bench: measure the claims.
# make soak: half an hour of faults, after those of disks at every write, of images, of islands, also of one that means
# ill, and of an object store, and a newcomer's first week.
# Each makes the environment it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: env demo test types tests bench soak
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

bench: $(READY)
	@$(BIN)/python benchmarks/sampling.py $(BENCH)
	@$(BIN)/python benchmarks/data.py $(BENCH)
	@$(BIN)/python benchmarks/train.py $(BENCH)
	@$(BIN)/python benchmarks/storage_requests.py $(BENCH)

soak: $(READY)
	@$(BIN)/pytest tests/data/test_disk_faults.py tests/train/test_rank_faults.py -k "write or power" --every-call
	@$(BIN)/pytest tests/data/test_bombs.py --every-call
	@$(BIN)/pytest tests/islands --every-call
	@$(BIN)/pytest tests/test_slurm.py --every-call
	@$(BIN)/pytest tests/train/ray --in-bucket
	@$(BIN)/pytest tests/jobs/test_hostile_island.py tests/jobs/test_claim_races.py --every-call
	@$(BIN)/pytest tests/serve/http/test_any_request.py --every-call
	@$(BIN)/pytest tests/study --every-call
	@$(BIN)/python benchmarks/storage_faults.py
	@$(BIN)/python benchmarks/storage_faults.py --each-put
	@$(BIN)/python benchmarks/storage_cuts.py
	@$(BIN)/python benchmarks/first_week.py
	@$(BIN)/python benchmarks/overtaken.py
	@$(BIN)/python benchmarks/island_chaos.py
	@$(BIN)/python benchmarks/soak.py $(SOAK)
