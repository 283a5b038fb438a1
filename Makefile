# Every target does its own set-up: on a fresh machine `make quickstart` or `make test` is the only command needed.
PYTHON ?= python3
# Test processes. Tiny models gain nothing from a second thread, a second process halves the time.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

NOTEBOOKS := notebooks-output

.PHONY: help quickstart test test-slow check test-gpu notebooks format clean

help:
	@echo "make quickstart  install into .venv, then fine-tune a small model on real text and compare with TRL (offline, CPU)"
	@echo "make test        install into .venv, then run the tests but the slow ones, minutes"
	@echo "make test-slow   the tests marked 'slow': whole commands, notebooks, compilers, wheels, as many minutes again"
	@echo "make check       lint, format and type check"
	@echo "make test-gpu    the tests marked 'cuda', with the current python3, nothing installed"
	@echo "make notebooks   install into .venv, then run the notebooks and store them with their outputs"

# The stamp is newer than everything that decides what is installed; a second call re-uses the environment.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	# torch by its exact version first: left to the resolver, a newer build with the CUDA packages could be taken.
	$(BIN)/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,notebooks,plots,qlora]'
	@touch $(STAMP)

# No network, and OpenMP threads that wait without spinning: on a busy machine they would slow each other down.
quickstart: export HF_HUB_OFFLINE = 1
quickstart: export OMP_WAIT_POLICY = PASSIVE
quickstart: $(STAMP)
	@$(BIN)/fastpack-trl init quickstart --force
	@$(BIN)/fastpack-trl sft --config quickstart.yaml
	@$(BIN)/fastpack-trl bench --config quickstart.yaml --steps 4 --warmup 2 --plot quickstart-output/bench.png $(ARGS)

# Files stay whole: their tests share models.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not cuda and not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not cuda" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu:
	$(PYTHON) -m pytest -m cuda $(ARGS)

# The commands in the notebooks' shell cells are those of .venv.
notebooks: $(STAMP)
	mkdir -p $(NOTEBOOKS)
	cp notebooks/*.ipynb $(NOTEBOOKS)/
	cd $(NOTEBOOKS) && PATH="$(CURDIR)/$(BIN):$$PATH" jupyter-execute --inplace *.ipynb
	$(BIN)/python tests/support/stored_notebooks.py $(NOTEBOOKS) notebooks

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
