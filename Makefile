# Everything is set up by itself, inside .venv: `make demo`, `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python tests/install.py
CORES  ?= $(shell getconf _NPROCESSORS_ONLN)
# One more worker than cores: some wait for ranks, servers or a browser. Another would collect all tests once more.
WORKERS = -n $$(( $(CORES) + 1 )) --maxprocesses 8 --dist loadscope --no-loadscope-reorder

SHARE  ?= 0.33

# Some containers forbid bytecode files. Then each of a hundred processes would compile PyTorch's Python files anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-tune test test-all lint unit chaos cluster-test bench docs clean

demo: $(VENV)/.train          ## train a small model on the text that ships with Python, then sample from it
	$(BIN)/shardwise train examples/demo.toml
	$(BIN)/shardwise generate runs/demo --prompt "def " --max-tokens 300 --temperature 0.7 --top-k 40 --seed 1

demo-tune: $(VENV)/.train     ## teach a tiny model to reverse words: pretrained, shown some, then practising for a reward (GRPO)
	$(BIN)/python examples/reverse/words.py runs/reverse/data
	$(BIN)/shardwise data build runs/reverse/data/text.txt --out runs/reverse/text
	for name in examples words test; do \
	  $(BIN)/shardwise data build --chat runs/reverse/data/$$name.jsonl --out runs/reverse/$$name --samples 0 || exit; done
	for stage in pretrain sft grpo; do \
	  $(BIN)/shardwise train examples/reverse/$$stage.toml --out runs/reverse/$$stage || exit; \
	  $(BIN)/shardwise eval runs/reverse/$$stage --tasks runs/reverse/data/test.jsonl --max-tokens 5 || exit; done

test: | $(BIN)/python         ## everything CI runs: the small tier, with installation
	$(MAKE) --no-print-directory -j2 lint unit

test-all: | $(BIN)/python     ## both tiers, of the large one's cases some, others with every commit; SHARE=1 for all
	$(MAKE) --no-print-directory -j2 lint unit TIERS="--large --share $(SHARE)"

lint: $(VENV)/.dev            ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/oxlint shardwise
	$(BIN)/python tests/report/lint_css.py shardwise/report/page.css shardwise/workbench/workbench.css

unit: $(VENV)/.dev $(VENV)/.kernels  ## the small tier; tests that share what they make stay with one worker
	$(BIN)/pytest $(WORKERS) $(TIERS)

chaos: $(VENV)/.dev           ## 210 faults injected into runs of 2 and 4 ranks, which must end as if nothing had been
	$(BIN)/python tests/chaos/campaign.py

cluster-test: $(VENV)/.dev    ## jobs on a real Slurm of three machines on this one (root, Debian: slurmctld slurmd slurm-client munge)
	$(BIN)/pytest tests/cluster tests/launch --large -rs

bench: $(VENV)/.dev           ## the measured claims, each beside its peer
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/tokenize_speed.py
	$(BIN)/python benchmarks/parallel_overhead.py
	$(BIN)/python benchmarks/search_speed.py
	$(BIN)/python benchmarks/dry_runs.py
	$(BIN)/python benchmarks/checkpoint_cost.py
	$(BIN)/python benchmarks/serving_schedule.py

docs: $(VENV)/.dev            ## the pages as a site, in site/; a link to a page that is not there is an error
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Modules are compiled when they are first imported: few of them are.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(INSTALL) -r requirements-dev.txt -e '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml requirements-dev.txt | $(BIN)/python
	$(INSTALL) -r requirements-dev.txt -e '.[dev]'
	touch $@ $(VENV)/.train

# Triton unpacks to a gigabyte: where PyTorch has not brought it, it is installed beside the linters, which do not need it.
$(VENV)/.kernels: requirements-kernels.txt $(VENV)/.dev
	$(INSTALL) --no-deps -r requirements-kernels.txt
	$(BIN)/python -c "import torch._dynamo, torch.distributed.fsdp, shardwise.train.loop"  # compiled once, not by every worker
	touch $@
