# Every target does its own set-up: on a fresh machine `make quickstart` or `make test` is the only command needed.
PYTHON ?= python3
# Test processes. Tiny models gain nothing from a second thread, a second process halves the time.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

NOTEBOOKS := notebooks-output

.PHONY: help quickstart test test-slow check docs test-gpu notebooks format clean

help:
	@echo "make quickstart  install into .venv, then fine-tune a small model on real text and compare with TRL (offline, CPU)"
	@echo "make test        install into .venv, then run the tests but the slow ones, minutes"
	@echo "make test-slow   the tests marked 'slow': whole commands, notebooks, compilers, wheels, as many minutes again"
	@echo "make check       lint, format and type check, and make docs"
	@echo "make docs        build the pages as a site in site/, without network"
	@echo "make test-gpu    the tests marked 'cuda', with the current python3, nothing installed"
	@echo "make notebooks   install into .venv, then run the notebooks and store them with their outputs"

# The stamp is newer than everything that decides what is installed; a second call re-uses the environment.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	# torch by its exact version first: left to the resolver, a newer build with the CUDA packages could be taken.
	$(BIN)/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs,notebooks,plots,qlora]'
	@touch $(STAMP)

# All weights: a random model has learned nothing that an adapter could build on. No network, and OpenMP threads that wait
# without spinning: on a busy machine they would slow each other down.
QUICKSTART = --config quickstart.yaml --use_peft False --learning_rate 3e-3
quickstart: export HF_HUB_OFFLINE = 1
quickstart: export OMP_WAIT_POLICY = PASSIVE
quickstart: $(STAMP)
	@$(BIN)/fastpack-trl init quickstart --force
	@$(BIN)/fastpack-trl sft $(QUICKSTART) --output_dir quickstart-output/trained
	@$(BIN)/fastpack-trl bench $(QUICKSTART) --steps 4 --warmup 2 --plot quickstart-output/bench.png $(ARGS)

# Files stay whole: their tests share models.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not cuda and not slow" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not cuda" $(ARGS)

check: $(STAMP) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every broken link, anchor or page that is in no menu ends it.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

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
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
