# Every target but help and clean makes .venv and installs into it first, once.
# ARGS goes on to the command that a target runs: make train ARGS="--help"

PY := .venv/bin/python
STAMP := .venv/installed
BENCH_STAMP := .venv/installed-bench

.PHONY: help train figures compare bench test test-all test-jax lint docs dist clean
.DELETE_ON_ERROR:

help:
	@echo "make train      train on 5 000 real digits, judge, picture, export (examples/train.py)"
	@echo "make figures    draw the figures of the papers again (examples/figures.py)"
	@echo "make compare    all heads on the same images, over several seeds (examples/compare.py)"
	@echo "make bench      time and memory of the heads beside others (benchmarks/head_step.py)"
	@echo "make test       the daily tests: all but the long ones"
	@echo "make test-all   every test"
	@echo "make test-jax   the core tests on Keras' JAX backend"
	@echo "make lint       check style and formatting with ruff"
	@echo "make docs       the documentation site, into site/"
	@echo "make dist       build the wheel and the sdist into dist/"
	@echo "make clean      remove all that these made, .venv too"
	@echo
	@echo 'ARGS="..." is passed on, as in: make test ARGS="-k arcface"'
	@echo "PYTHON=... names the Python that .venv is made with"

train: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(PY) examples/train.py $(ARGS)

figures: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(PY) examples/figures.py $(ARGS)

compare: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=$${TF_CPP_MIN_LOG_LEVEL:-2} $(PY) examples/compare.py $(ARGS)

bench: $(BENCH_STAMP)
	$(PY) benchmarks/head_step.py $(ARGS)

# Two processes, each with a TensorFlow of its own.
# In the order of the names: the longest files are not the last ones.
PYTEST := $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not long" $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

# What runs on either backend.
CORE := $(patsubst %,tests/test_%.py,golden conformance properties numerics margins scales schedules \
	nontarget losses labels subcenters class_changes imprinting sphereface2 triplet verification retrieval)

test-jax: $(STAMP)
	KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(PYTEST) --dist load $(CORE) $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# The variable: without it the theme advertises its successor, in colour, on each build.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

dist: $(STAMP)
	rm -rf dist
	$(PY) -m build --quiet

clean:
	rm -rf .venv dist build site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# TensorFlow 2.21 has no wheels for other Pythons. A name on PATH may be an empty shim and a
# system Python may lack its venv module, so each candidate is run.
in_range := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
candidates = $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python)
first_usable = $(shell for python in $(candidates); do "$$python" -c \
	'import venv, ensurepip; $(in_range)' >/dev/null 2>&1 && echo "$$python" && break; done)
base_python = $(or $(first_usable),$(error keras_margin needs Python 3.11 to 3.13 with venv: install \
	them (for example: apt install python3 python3-venv) or run make PYTHON=/path/to/python))
venv_works = $(shell [ ! -e $(STAMP).part ] && $(PY) -c 'import pip; $(in_range)' >/dev/null 2>&1 \
	&& echo yes)

# The stamp holds the folder that the editable install points to: a moved checkout installs again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# A stamp that is still .part tells of an interrupted install, which pip takes for a whole one.
$(STAMP): setup.cfg pyproject.toml
	$(if $(venv_works),,"$(base_python)" -m venv --clear .venv)
	@echo "Installing keras_margin and what it needs into .venv (about two minutes)"
	@printf '%s\n' '$(CURDIR)' > $@.part
	@$(PY) -m pip install -qq --disable-pip-version-check --editable ".[dev]"
	@mv $@.part $@

# Without torch the benchmark runs too: its rows say that it is not installed.
$(BENCH_STAMP): $(STAMP)
	@echo "Installing what the benchmarks compare with into .venv"
	@$(PY) -m pip install -qq --disable-pip-version-check --editable ".[bench]" && touch $@ \
	|| echo "That failed: other people's heads are left out where they need torch"
