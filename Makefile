# Every target sets up what it lacks; the second time that costs nothing.
.DEFAULT_GOAL := help

BIN := .venv/bin
# Each server that a test starts imports vLLM and torch: without cached bytecode, twice as long.
export PYTHONDONTWRITEBYTECODE :=
ENGINES := tests/engine
SERVERS := tests/serving
DEVICES := tests/ttnn tests/elastic
SOAK := tests/soak
REST := packages $(filter-out $(patsubst %,%/,$(ENGINES) $(SERVERS) $(DEVICES) $(SOAK)) %/__pycache__/, $(wildcard tests/*/))
STAGES := $(if $(ARGS),test-chosen,test-engines test-servers test-rest test-devices) test-wheels

.PHONY: help setup serve test test-chosen $(STAGES) soak check lint types imports rules fix bench wheels pins upgrade

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## uv, CPython 3.12 and the environment in .venv
	@tools/bootstrap.sh

serve: setup ## a real language model behind an OpenAI server on 127.0.0.1:8000
	@exec $(BIN)/python examples/serve_smollm2.py $(ARGS)

test: setup ## every test in the shared environment, and those of each member alone from its wheel
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target $(STAGES)

# For two cores, the longest first. One thread each: more would wait for one another.
test-engines: setup
	@OMP_NUM_THREADS=1 tools/stage.sh engines $(BIN)/pytest --durations=10 $(ENGINES)

test-servers: setup
	@OMP_NUM_THREADS=1 tools/stage.sh servers $(BIN)/pytest --durations=10 $(SERVERS)

test-devices: setup
	@OMP_NUM_THREADS=1 tools/stage.sh "devices and scaling" $(BIN)/pytest --durations=10 $(DEVICES)

test-rest: setup
	@OMP_NUM_THREADS=1 tools/stage.sh "everything else" $(BIN)/pytest --durations=10 $(REST)

test-chosen: setup
	@OMP_NUM_THREADS=1 tools/stage.sh chosen $(BIN)/pytest --ignore=$(SOAK) $(ARGS)

test-wheels: setup
	@OMP_NUM_THREADS=1 tools/stage.sh "wheels alone" $(BIN)/python tools/wheels.py test

soak: setup ## hours: a million tokens on every kind of engine, ten thousand streams over HTTP, 100 scalings
	@ELASTIC_CYCLES=100 OMP_NUM_THREADS=1 tools/stage.sh "soak of scaling" $(BIN)/pytest --timeout=0 tests/elastic/test_life.py -k leak $(ARGS)
	@OMP_NUM_THREADS=1 tools/stage.sh "soak over HTTP" $(BIN)/pytest --timeout=0 $(SOAK) $(ARGS)
	@SOAK_EXAMPLES=600 OMP_NUM_THREADS=1 tools/stage.sh soak $(BIN)/pytest --timeout=0 tests/engine/test_any_schedule.py $(ARGS)

check: setup ## lint, types, import contracts, public names and house rules
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target lint types imports rules

lint: setup ## ruff: rules and format
	@tools/stage.sh lint $(BIN)/ruff check --quiet --output-format=concise
	@tools/stage.sh format $(BIN)/ruff format --check --quiet

types: setup ## mypy: everything strictly, then the tests of each member
	@tools/stage.sh types $(BIN)/mypy --no-error-summary
	@for tests in packages/*/tests; do \
		MYPYPATH=$${tests%/tests} tools/stage.sh "types of $$tests" $(BIN)/mypy --no-error-summary $$tests || exit 1; \
	done

imports: setup ## import-linter: who may know whom
	@tools/stage.sh imports $(BIN)/lint-imports --no-logo

rules: setup ## public names, imports, pins and house rules
	@tools/stage.sh rules $(BIN)/pytest -q tests/workspace packages/*/tests/test_public_names.py

fix: setup ## let ruff mend and format what it can
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format --quiet

bench: setup ## every benchmark in its quick form
	@for file in benchmarks/[!_]*.py; do tools/stage.sh $$file $(BIN)/python $$file --quick || exit 1; done

wheels: setup ## the wheels and source distributions of all members, in dist/
	@$(BIN)/python tools/wheels.py build

pins: setup ## write what a changed dependency brought in to the pins
	@$(BIN)/python tools/pins.py

upgrade: setup ## move every pin to the newest version allowed
	@$(BIN)/python tools/pins.py --upgrade
