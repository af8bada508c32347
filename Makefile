# Every target sets up what it needs in .venv; a second call starts at once.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
PACKAGES := $(VENV)/.packages
STAMP  := $(VENV)/.installed
CURRENT := $(shell sed -n 's/^version: //p' charts/ddpjob-operator/Chart.yaml)
# Where images are pushed to, such as ghcr.io/ddpjob; empty is the local Docker.
REGISTRY ?=
IMAGES := $(if $(REGISTRY),$(REGISTRY)/)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-layer test-slow test-faults test-queues soak soak-cluster mutants test-frameworks test-gpu test-xla lint bench images docs dist dry-run locks release clean generate crd

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(RUNTIME) ## train a job of two nodes on this machine: no cluster, no Docker, no data
	$(BIN)/ddpjob run --local examples/digits.yaml

test: $(STAMP) ## the tests; with Docker and kind those on a cluster too; then what each layer took
	nice $(BIN)/pytest -n 4 --no-loadscope-reorder

test-fast: $(STAMP) ## the tests of seconds: no torch, no API server, no cluster
	$(BIN)/pytest -n 4 --no-loadscope-reorder tests/unit tests/wiring

test-layer: $(STAMP) ## LAYER=apiserver: the tests of one folder of tests/; WORKERS=3 side by side
	$(BIN)/pytest $(if $(WORKERS),-n $(WORKERS)) tests/$(or $(LAYER),$(error name a folder of tests/: make test-layer LAYER=unit))

test-slow: $(STAMP) ## tests that `make test` covers in part by faster ones
	$(BIN)/pytest -m slow

test-faults: $(STAMP) ## the slow faults on a kind cluster: nodes, processes, quotas, webhooks, deadlines
	$(BIN)/pytest tests/cluster -m faults

test-queues: $(STAMP) ## jobs in queues of a real Kueue, and gangs of Volcano and coscheduling, on a kind cluster; INSTALL_KUEUE=PROGRAM (_VOLCANO, _COSCHEDULING) installs it
	$(BIN)/pytest tests/cluster/test_queues.py tests/cluster/test_gang_schedulers.py -m 'not faults'

soak: $(STAMP) ## 100,000 histories of each property of the operator's decisions: 50 minutes
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest tests/unit/test_properties.py --timeout=0 -n 2

MINUTES ?= 30
soak-cluster: $(STAMP) ## random faults on a kind cluster for MINUTES=30, and a report
	$(BIN)/python -m tests.cluster.soak --minutes $(MINUTES)

MUTANTS := .venv-mutants
MUTATED := build/mutants
mutants: $(MUTANTS)/.installed ## small wrong changes of the decisions: the unit tests must notice 95 % of them; half an hour on two cores
	@rm -rf $(MUTATED) && mkdir -p $(MUTATED)
	@cp --parents -r operator/ddpjob tests/unit tests/mutants.toml pyproject.toml charts examples docs $(MUTATED)
	@cd $(MUTATED) && PATH="$(CURDIR)/$(MUTANTS)/bin:$$PATH" PYTHONPATH=operator python ../../tests/mutants.py

test-gpu: $(STAMP) ## the device layer, NCCL and the speed of ResNet-50, on a machine with an NVIDIA GPU (TORCH=torch)
	$(BIN)/pytest tests/gpu
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node gpu -m bench.gpu_speed

FRAMEWORKS := .venv-frameworks
test-frameworks: $(FRAMEWORKS)/.installed ## the examples with transformers, Lightning, Accelerate and DeepSpeed, killed, stopped and resumed, and the page of trackers; in an environment of its own
	nice $(FRAMEWORKS)/bin/python -m pytest tests/frameworks

# They are needed for nothing else, and each has dozens of dependencies. DeepSpeed is a source package, whose
# set-up imports torch.
$(FRAMEWORKS)/.installed: operator/pyproject.toml trainer/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	@echo "Setting up $(FRAMEWORKS): torch, the frameworks and the trackers; a few minutes."
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check 'transformers>=5,<6' 'accelerate>=1.10,<2' 'lightning>=2.5,<3' 'wandb>=0.25,<1' 'mlflow>=3.5,<4' 'tensorboard>=2.20,<3' 'setuptools<81' wheel
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation 'deepspeed>=0.19,<0.20'
	@$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -e 'operator[local]' -e trainer -r requirements-dev.txt
	@touch $@

XLA := .venv-xla
test-xla: $(XLA)/.installed ## the device layer on the real torch_xla and torch 2.9, in an environment of its own (7 GB)
	$(XLA)/bin/python -m pytest tests/xla tests/trainer/test_ranks.py

# torch_xla's last release belongs to torch 2.9.
$(XLA)/.installed: trainer/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv --clear $(XLA)
	@echo "Setting up $(XLA): torch 2.9 with CUDA, on which torch_xla is built, then torch_xla; some minutes."
	@$(XLA)/bin/pip install --quiet --disable-pip-version-check torch==2.9.0 torch_xla==2.9.0
	@$(XLA)/bin/pip install --quiet --disable-pip-version-check -e operator -e trainer -r requirements-dev.txt
	@touch $@

# cosmic-ray has a database and a web server among its dependencies, so it has its own environment.
$(MUTANTS)/.installed: operator/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv --clear $(MUTANTS)
	@$(MUTANTS)/bin/pip install --quiet --disable-pip-version-check 'cosmic-ray>=8.7,<9' -e operator -r requirements-dev.txt
	@touch $@

generate: $(STAMP) ## write what follows from other files: the CRD, parts of the pages, the client's types, examples, golden files
	$(BIN)/python release/generate.py
	UPDATE_GOLDEN=1 $(BIN)/pytest -q tests/unit/test_render.py tests/unit/test_chart.py -k golden

crd: $(STAMP) ## write the CRD from the declarations of its fields
	$(BIN)/python release/generate.py charts/ddpjob-operator/files/crd.yaml

lint: $(PACKAGES) ## ruff, mypy --strict, and checks of the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github

bench: $(STAMP) ## the published figures: of the operator on a kind cluster of fake nodes, then of ten starts and recoveries on kind
	$(BIN)/python -m bench.operator_speed
	$(BIN)/python -m bench.recovery --trials 10

LABELS = --label org.opencontainers.image.version=$(CURRENT) \
  --label org.opencontainers.image.revision=$(shell git rev-parse HEAD) \
  --label org.opencontainers.image.source=https://github.com/ddpjob/ddpjob \
  --label org.opencontainers.image.licenses=Apache-2.0
INDEX = $(if $(PIP_EXTRA_INDEX_URL),--build-arg PIP_EXTRA_INDEX_URL=$(PIP_EXTRA_INDEX_URL))
BUILD ?= docker build

images: ## the operator's and the trainer's image; REGISTRY= names another registry
	$(BUILD) $(LABELS) -t $(IMAGES)ddpjob-operator:$(CURRENT) .
	$(BUILD) $(LABELS) -t $(IMAGES)ddpjob-trainer:cpu -f images/cpu/Dockerfile $(INDEX) .

SITE := .venv-site
docs: $(SITE)/.installed ## the documentation as a site in build/site; fails for a broken link
	@$(SITE)/bin/python docs/site/build.py

# Zensical and its theme are needed for nothing else.
$(SITE)/.installed: operator/pyproject.toml
	$(PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/pip install --quiet --disable-pip-version-check 'zensical>=0.0.70,<=0.0.72' -e 'operator[local]'
	@touch $@

RELEASE := .venv-release
dist: $(RELEASE)/.installed ## wheels, chart, bill of materials and digests of this version, checked, in dist/
	rm -rf dist && mkdir dist
	$(RELEASE)/bin/pip wheel --quiet --no-deps --wheel-dir dist ./operator ./trainer
	cp -r charts/ddpjob-operator dist/chart
	sed -i 's#^  registry: ""#  registry: "$(REGISTRY)"#' dist/chart/values.yaml
	helm package dist/chart --destination dist
	rm -r dist/chart
	$(PYTHON) -m venv --clear dist/.venv
	dist/.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r operator/requirements.lock
	dist/.venv/bin/pip install --quiet --disable-pip-version-check --no-deps dist/ddpjob-*.whl
	$(RELEASE)/bin/cyclonedx-py environment dist/.venv --output-reproducible --of JSON -o dist/ddpjob-$(CURRENT).cdx.json
	dist/.venv/bin/python release/check.py dist
	rm -rf dist/.venv

dry-run: dist docs ## all that a release has but the images: built and checked, and nothing is pushed

locks: $(RELEASE)/.installed ## the versions and hashes of the images' packages, as of today
	$(RELEASE)/bin/python release/locks.py

$(RELEASE)/.installed: requirements-release.txt
	$(PYTHON) -m venv --clear $(RELEASE)
	@$(RELEASE)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

release: $(STAMP) ## VERSION=1.2.3: set the version everywhere, then make dry-run and images
	$(PYTHON) release/version.py $(or $(VERSION),$(error give the new version: make release VERSION=1.2.3))
	$(MAKE) dry-run images

clean: ## remove the environment and the runs
	rm -rf $(VENV) $(FRAMEWORKS) $(XLA) $(MUTANTS) $(SITE) $(RELEASE) ddpjob-runs build dist

# torch first and by itself, so that no other package's range decides which build comes.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; choose one with make PYTHON=python3.12 …")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "Install the venv module (on Debian: apt install python3-venv)."; exit 1; }
	@echo "Setting up $(VENV): torch, then $(1)."
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
endef

# What a job on this machine needs, and `ddpjob plot`, proposed at its end.
$(RUNTIME): operator/pyproject.toml trainer/pyproject.toml
	$(call environment,what runs a job here; a minute or two the first time)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e 'operator[local]' -e trainer
	@touch $@

# A pip that is as old as Python's own needs twice the CPU time to choose all of these.
$(PACKAGES): operator/pyproject.toml trainer/pyproject.toml requirements-dev.txt
	$(call environment,the rest; a few minutes the first time)
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip || :
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e 'operator[controller,local,ui]' -e 'trainer[tensorboard]' -r requirements-dev.txt
	@touch $(RUNTIME) $@

# A quarter of the modules are ever imported. Those are compiled, once for all the processes of a job
# and of the tests.
$(STAMP): $(PACKAGES)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch._dynamo, pytest; pytest.main(["--collect-only", "-qq"])' > /dev/null 2>&1 || :
	@touch $@
