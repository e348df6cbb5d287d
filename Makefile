# make run    trains an agent on Pendulum-v1, from start to picture (about two minutes)
# make check  lint, types and the fast tests, while you work (about a minute)
# make test   lint, types, every test, and twenty wrong TD3s that the tests must catch (about eight minutes)
# All install what they need into .venv first, from nothing but Python 3.11 or newer.

# EXTRAS are those of pyproject.toml; JOBS is the number of test processes.
PYTHON ?= python3
EXTRAS ?= mujoco,pixels,dev
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready-$(EXTRAS)
# A process that runs out of tests takes some of another one's.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: run check test wrong setup lint clean

run: setup
	$(BIN)/t3d train Pendulum-v1 --eval-every 1000

check: setup lint
	$(PYTEST) -m "not slow"

test: setup lint
	$(PYTEST)
	$(BIN)/python tests/wrong_td3s.py

wrong: setup
	$(BIN)/python tests/wrong_td3s.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

# PIP_CONSTRAINT reaches the isolated build of the package too, which a -c option does not.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "T3D needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $(READY)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
