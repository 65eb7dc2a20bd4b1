# `make demo` and `make test` are all that a newcomer needs; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-ray
BIN = $(VENV)/bin
# How many test processes run at once: three for two cores, as tests wait a third of their time.
# `nproc` would count what OMP_NUM_THREADS says, which is about threads of one process.
CORES = $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
JOBS ?= $(shell expr $(CORES) \* 3 / 2)

PROTO = $(wildcard proto/miniray/v1/*.proto)

.PHONY: help demo test test-all test-ray test-ray-chosen lint format bench clean
help:
	@echo "make demo      train on 1,797 handwritten digits with two workers"
	@echo "make test      the tests, in about eight minutes on two cores"
	@echo "make test-all  the slow tests too"
	@echo "make test-ray  the tests of the public API with Ray as the engine (installs Ray)"
	@echo "make test-ray-chosen  forty of them"
	@echo "make lint      ruff, mypy"
	@echo "make format    ruff's fixes and formatting"
	@echo "make bench     miniray beside Ray on the same machine (installs Ray)"
	@echo "make clean     remove environments and caches"

# The environment is made again when what is installed, or the protocol, changes. A current pip
# resolves in half the time of the one that Python brings, and compiling apart uses all cores;
# what packages bring along as their own tests is compiled by nobody.
WHAT = pyproject.toml setup.py constraints.txt $(PROTO)
INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-compile --editable
COMPILE_LIBRARIES = $(BIN)/python -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' $(VENV)/lib || true

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(BIN)/.installed: $(WHAT) | $(BIN)/python
	$(INSTALL) '.[train,examples]'
	$(COMPILE_LIBRARIES)
	@touch $@

# The tests check types too.
$(BIN)/.lint: $(WHAT) | $(BIN)/python
	$(INSTALL) '.[train,examples,test,lint]'
	$(COMPILE_LIBRARIES)
	@touch $(BIN)/.installed $@

# What only the slow tests need: other frameworks, and libraries that callbacks write to.
$(BIN)/.slow: $(BIN)/.lint
	$(INSTALL) '.[slow]'
	$(COMPILE_LIBRARIES)
	@touch $@

demo: $(BIN)/.installed
	$(BIN)/python examples/train_digits.py

# The tests start some thousand interpreters: where Python is told to write no bytecode, each of
# them would compile the package again, for half a second.
COMPILE = $(BIN)/python -m compileall -q -j 0 miniray train

# Each test process collects all tests, for five seconds, and for sixteen if it has to compile them
# as pytest does. So they are compiled once before, in two halves at the same time.
COLLECT = $(BIN)/python -m pytest --quiet --quiet --collect-only
$(BIN)/.collected: export PYTHONDONTWRITEBYTECODE =
$(BIN)/.collected: $(BIN)/.lint $(shell find tests -name '*.py')
	$(COMPILE)
	$(COLLECT) tests/unit > /dev/null & $(COLLECT) tests/cluster > /dev/null; wait
	@touch $@

# In the order of their names the files of small tests come last, and no core waits for a long one.
test: $(BIN)/.lint $(BIN)/.collected
	$(COMPILE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: $(BIN)/.slow $(BIN)/.collected
	$(COMPILE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'slow or not slow'

# The tests of the public API with Ray as the engine.
RAY_VENV ?= .venv-engine
RAY_FILES = actors async_actors tasks get_wait_put waiting generators named_actors nesting refs_in_results errors \
	errors_of_values cancel placement_groups actor_pool queue mp_pool train_reports train_runs
$(RAY_VENV)/bin/.installed: $(WHAT)
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-compile \
		--editable '.[ray,test,train,examples]' 'ray[default]==2.60.0'
	$(RAY_VENV)/bin/python -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' $(RAY_VENV)/lib || true
	@touch $@

test-ray: $(RAY_VENV)/bin/.installed
	$(RAY_VENV)/bin/python -m pytest --engine=ray \
		$(RAY_FILES:%=tests/cluster/test_%.py) tests/cluster/test_ray_engine.py tests/cluster/test_examples.py

# Forty of them, from each part some: three minutes.
test-ray-chosen: $(RAY_VENV)/bin/.installed
	$(RAY_VENV)/bin/python -m pytest --engine=ray @tests/engines/ray_chosen.txt

lint: $(BIN)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(BIN)/.lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(BENCH_VENV)/bin/.installed:
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		'ray[default,train]==2.60.0' torch
	@touch $@

bench: $(BIN)/.installed $(BENCH_VENV)/bin/.installed
	$(BIN)/python benchmarks/micro.py --against ray --ray-python $(BENCH_VENV)/bin/python
	$(BIN)/python benchmarks/train_step.py --against ray --ray-python $(BENCH_VENV)/bin/python

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(RAY_VENV) build dist *.egg-info miniray/_proto
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
