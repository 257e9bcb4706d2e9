# Two commands do everything on a fresh machine:  make run  and  make test.
SHELL := /bin/bash

VENV ?= .venv
# The first interpreter that really runs and is new enough.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
override PYTHON := $(patsubst 3.%,python3.%,$(PYTHON))
EXTRAS ?= metaworld,libero,maniskill,calvin,robotwin,dev
# A build of torch by its name on download.pytorch.org (cpu, cu130, ...) for `make wheelhouse`; pip's choice if empty.
CUDA ?=
WHEELHOUSE ?= wheelhouse
# Arguments for what is run: make run ARGS="seed=1", make test ARGS="-k determinism".
ARGS ?=

# Processes that tests are shared among; a file stays in one of them, so that each simulator is warmed up once.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores : 4)))

SYSTEM_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6
INSTALL_SYSTEM_PACKAGES := apt-get update && apt-get install -y --no-install-recommends $(SYSTEM_PACKAGES)

# Offline packs of simulator assets, where a folder next to the checkout has them.
ifneq ($(wildcard ../shared/assets),)
export VLA_TORCHRL_ASSETS ?= $(abspath ../shared/assets)
endif

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
DOCS_STAMP := $(VENV)/.set-up-docs
MKDOCS := NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs

.DEFAULT_GOAL := help
.PHONY: help setup run learn test test-e2e test-all test-storm test-cluster gpu-check lint hooks docs docs-serve doctor wheelhouse container clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP)  ## virtual environment, packages and rendering libraries (the other commands do it by themselves)

run: $(STAMP)  ## the main job: PPO fine-tunes a small VLA policy on Meta-World (ARGS="seed=1" to change a setting)
	$(RUN) recipes/ppo.py experiment=metaworld_ppo_small $(ARGS)

LEARNT := import json, sys; rate = json.load(open("runs/ppo/latest/run.json"))["metrics"]["eval/success_once"]; \
    sys.exit(None if rate >= 0.85 else f"learn: {rate:.1%} of the held-out episodes are solved, at least 85% should be")

learn: run  ## the main job, which must solve 85 % of its held-out episodes
	$(RUN) -c '$(LEARNT)'

# Some of them: make test ARGS="-k gym". One after the other, as in a debugger: make test WORKERS=0.
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart=2

test: $(STAMP)  ## units and simulators, 20 to 40 minutes on two cores (ARGS="-k gym" for some of them)
	$(PYTEST) $(ARGS)

test-e2e: $(STAMP)  ## whole runs: recipes, resuming, several processes, packages from outside
	$(PYTEST) tests/e2e tests/plugin extras/from_rlinf/tests $(ARGS)

test-all: $(STAMP)  ## test and test-e2e
	$(PYTEST) tests extras/from_rlinf/tests --ignore=tests/cluster --ignore=tests/storm $(ARGS)

test-storm: $(STAMP)  ## faults by the hundred: kills, damaged files, failing simulators, wrong settings; an hour
	$(RUN) -m pytest -s tests/storm $(ARGS)

# SLURM lives in namespaces of its own while the tests run (tests/cluster/slurm_cluster.sh). Only here is it installed.
test-cluster: $(STAMP)  ## jobs on a SLURM of two nodes of its own (as root; installs slurm-wlm and munge where they lack)
	@PATH="$$PATH:/usr/sbin"; if command -v slurmctld >/dev/null && command -v munged >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "Installing SLURM: apt-get install slurm-wlm munge"; \
	    apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; \
	fi
	$(RUN) -m pytest tests/cluster $(ARGS)

gpu-check: $(STAMP)  ## does the GPU compute what the CPU does? a table and gpu.json (TINY=1: the same on the CPU, in toy sizes)
	$(RUN) benchmarks/gpu_check.py --output gpu.json $(if $(TINY),--tiny) $(ARGS)

lint: $(STAMP)  ## style, spelling, doors between the rooms, sizes, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m codespell_lib
	$(VENV)/bin/lint-imports
	$(RUN) scripts/check_sizes.py
	$(RUN) -m mypy

hooks: $(STAMP)  ## git runs the checks of `make lint` at every commit, on what changed
	$(RUN) -m pre_commit install

docs: $(DOCS_STAMP)  ## the documentation as a site in site/; a broken link is an error
	$(MKDOCS) build --strict $(ARGS)

docs-serve: $(DOCS_STAMP)  ## the documentation on http://127.0.0.1:8000, built again when a page changes
	$(MKDOCS) serve --no-strict --dev-addr 127.0.0.1:8000 $(ARGS)

doctor: $(STAMP)  ## which environments there are, and what this machine lacks for them
	$(RUN) -m vla_envs

# As set-up installs, step by step; what is published as source alone is built here. The build of torch is fixed in the
# copy of the constraints, so that neither this nor the installation takes another. An offline machine installs with
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make setup (docs/how-to/offline.md).
GATHER = $(WHEELHOUSE)/.venv/bin/python -m pip wheel --quiet --disable-pip-version-check \
    --wheel-dir $(WHEELHOUSE) --find-links $(WHEELHOUSE) -c $(WHEELHOUSE)/constraints.txt

wheelhouse:  ## a folder of everything that a machine without a network installs (PYTHON=3.11 CUDA=cpu, EXTRAS=...)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed. Type: make wheelhouse PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(WHEELHOUSE)/.venv
	sed -E 's/^(torch==.*)/\1$(addprefix +,$(CUDA))/' constraints.txt > $(WHEELHOUSE)/constraints.txt
	$(GATHER) $(if $(CUDA),--no-deps --extra-index-url https://download.pytorch.org/whl/$(CUDA)) torch
	$(GATHER) '.[$(EXTRAS)]' pip setuptools wheel
	$(if $(findstring libero,$(EXTRAS)),$(GATHER) --no-deps hf-libero)
	rm -r $(WHEELHOUSE)/.venv
	@echo "$(WHEELHOUSE) has $$(ls $(WHEELHOUSE)/*.whl | wc -l) wheels, $$(du -sh $(WHEELHOUSE) | cut -f1); what simulators need beside: docs/how-to/offline.md"

container:  ## an image of what set-up installs, for Docker and Apptainer (PIP_EXTRA_INDEX_URL, EXTRAS=...)
	docker build --build-arg PIP_EXTRA_INDEX_URL --build-arg EXTRAS=$(EXTRAS:,dev=) --tag vla-torchrl .

clean:  ## remove the virtual environment
	rm -rf $(VENV)

# Made again where it has no pip: it was killed in the making. What is there stays.
MAKE_VENV = $(RUN) -m pip show --quiet pip 2>/dev/null || $(PYTHON) -m venv $(VENV)

# torch goes first and alone: its version is exact, so nothing that follows can pull a second build of it.
# hf-libero goes last and without what it asks for, which would pull torchvision.
# ManiSkill and RoboTwin draw with Vulkan: where no GPU brings a driver, one is fetched into ~/.cache (docs/install.md).
# The last step renders one frame; only if that fails are system libraries needed.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || \
	    { echo "Python 3.11 or later is needed. Type: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(MAKE_VENV)
	@echo "Installing some 4 GB of packages into $(VENV): a few minutes in which nothing is printed"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(if $(findstring libero,$(EXTRAS)),$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps hf-libero)
	$(if $(or $(findstring maniskill,$(EXTRAS)),$(findstring robotwin,$(EXTRAS))),@$(RUN) scripts/install_vulkan_driver.py || true)
	@if $(RUN) -m vla_envs >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "Some simulator cannot draw yet, installing: $(SYSTEM_PACKAGES)"; \
	    $(INSTALL_SYSTEM_PACKAGES); $(RUN) -m vla_envs || true; \
	else \
	    $(RUN) -m vla_envs || true; \
	    echo "Offscreen rendering needs system libraries. On Debian or Ubuntu type:"; \
	    echo "  sudo sh -c '$(INSTALL_SYSTEM_PACKAGES)'"; \
	fi
	@touch $@

# The site is built from the sources without importing them, so it needs neither torch nor this package installed; with
# them (make setup) notebooks are run, some minutes, and shown with what they put out; NOTEBOOKS=text make docs does not.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    | $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -r /dev/stdin
	@touch $@
