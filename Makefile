# Every target sets up what it needs in .venv; a second call starts at once.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench images clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(STAMP) ## train a job of two nodes on this machine: no cluster, no Docker, no data
	$(BIN)/ddpjob run --local examples/digits.yaml

test: $(STAMP) ## every test that this machine can run; with Docker and kind the cluster tests too
	$(BIN)/pytest

test-fast: $(STAMP) ## the tests of seconds: no torch, no API server, no cluster
	$(BIN)/pytest tests/unit tests/wiring

lint: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## the published figures of the operator, on a kind cluster of fake nodes
	$(BIN)/python bench/operator_speed.py

images: ## the operator's and the trainer's image
	docker build -t ddpjob-operator:0.1.0 .
	docker build -t ddpjob-trainer:cpu -f images/cpu/Dockerfile $(if $(PIP_EXTRA_INDEX_URL),--build-arg PIP_EXTRA_INDEX_URL=$(PIP_EXTRA_INDEX_URL)) .

clean: ## remove the environment and the runs
	rm -rf $(VENV) ddpjob-runs

# torch first and by itself, so that no other package's range decides which build comes.
$(STAMP): operator/pyproject.toml trainer/pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; choose one with make PYTHON=python3.12 …")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "Install the venv module (on Debian: apt install python3-venv)."; exit 1; }
	@echo "Setting up $(VENV): torch, then the rest; a few minutes the first time."
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -e 'operator[controller,local]' -e trainer -r requirements-dev.txt
	@touch $@
