# make setup   environment in .venv            make demo   a small real training run, start to end
# make test    the test suite                  make lint   ruff and mypy
# make bench   speed against TRL               make clean-env, make clean-demo   start afresh
#
# PYTHON=... chooses the interpreter; TORCH_INDEX_URL=... an index with CPU builds of torch; PYTEST_ARGS=... goes to pytest,
# DEMO_ARGS=... (settings such as train.steps=5) to the demo's run.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := .demo
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: setup demo test lint bench clean-env clean-demo
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): requirements/cpu.lock requirements/demo.lock pyproject.toml setup.py scripts/setup_env.sh
	@VENV=$(VENV) scripts/setup_env.sh
	@touch $@

$(DEMO)/.model: scripts/make_demo_model.py requirements/demo.lock | $(READY)
	@$(BIN)/python scripts/make_demo_model.py --out $(DEMO)/model
	@touch $@

$(DEMO)/.data: scripts/make_demo_data.py | $(READY)
	@$(BIN)/python scripts/make_demo_data.py --out $(DEMO)
	@touch $@

$(DEMO)/.prepared-%: $(DEMO)/.data $(DEMO)/.model
	@$(BIN)/msrl data prep --input $(DEMO)/add20.$*.parquet --kind prompts --tokenizer $(DEMO)/model --out $(DEMO)/prepared/$*
	@touch $@

demo: $(READY) $(DEMO)/.prepared-train $(DEMO)/.prepared-test
	@$(BIN)/python scripts/demo.py --data $(DEMO)/prepared $(DEMO_ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(READY) $(DEMO)/.model $(DEMO)/.data
	@$(BIN)/python scripts/bench_dapo.py --model $(DEMO)/model --data $(DEMO)/add20.train.parquet

clean-env:
	@rm -rf $(VENV)

clean-demo:
	@rm -rf $(DEMO)
