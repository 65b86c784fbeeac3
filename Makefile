# Everything happens in .venv; `make install` runs again only when what it depends on changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := report,examples,hf,docs,dev

# Four emulated devices of unequal speed; smaller shares on a machine with one core.
NUM_CORES := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))' 2>/dev/null || echo 1)
FLEET ?= $(if $(filter 1,$(NUM_CORES)),emulated:0.4$(comma)0.2$(comma)0.1$(comma)0.05,emulated:0.8$(comma)0.4$(comma)0.2$(comma)0.1)
TRAIN_ARGS ?= --steps 80 --global-batch-size 128 --eval-samples 512
comma := ,

.PHONY: help install train test test-all lint format types imports docs bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install geartrain with all extras

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

train: install  ## train a small language model on an unequal (emulated) fleet
	$(BIN)/geartrain run --fleet $(FLEET) examples/train_gpt.py $(TRAIN_ARGS)

test: install  ## run the tests that belong to every change
	$(BIN)/python -m pytest -m 'not slow'

test-all: install  ## run every test, slow ones too
	$(BIN)/python -m pytest

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## ruff: mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## mypy --strict
	$(BIN)/mypy

imports: install  ## the layers between the rooms
	$(BIN)/lint-imports --no-cache

docs: install  ## build the documentation; any warning is an error
	$(BIN)/sphinx-build -E -q -W --keep-going -n -b html docs docs/_build/html

bench: install  ## measure against DDP on an emulated fleet; ends within 5 minutes
	$(BIN)/geartrain bench macro

clean:  ## remove .venv, caches and built docs; runs/ stays
	rm -rf $(VENV) docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
