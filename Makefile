# Every target sets up what it lacks; the second time that costs nothing.
.DEFAULT_GOAL := help
.PHONY: help setup serve test check bench wheels pins upgrade

BIN := .venv/bin

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## uv, CPython 3.12 and the environment in .venv
	@tools/bootstrap.sh

serve: setup ## a real language model behind an OpenAI server on 127.0.0.1:8000
	@exec $(BIN)/python examples/serve_smollm2.py $(ARGS)

test: setup ## each member alone from its wheel, then every test in the shared environment
	@tools/stage.sh "wheels alone" $(BIN)/python tools/wheels.py test
	@tools/stage.sh "all tests" $(BIN)/pytest --durations=10 $(ARGS)

check: setup ## lint, format, types, import contracts, public names and house rules
	@tools/stage.sh lint $(BIN)/ruff check --quiet
	@tools/stage.sh format $(BIN)/ruff format --check --quiet
	@tools/stage.sh types $(BIN)/mypy --no-error-summary
	@for member in packages/*; do tools/stage.sh "types of $$member/tests" $(BIN)/mypy --no-error-summary $$member/tests || exit 1; done
	@tools/stage.sh imports $(BIN)/lint-imports --no-logo
	@tools/stage.sh "names and house rules" $(BIN)/pytest -q tests/workspace packages/*/tests/test_public_names.py

bench: setup ## every benchmark in its quick form
	@for file in benchmarks/[!_]*.py; do tools/stage.sh $$file $(BIN)/python $$file --quick || exit 1; done

wheels: setup ## the wheels and source distributions of all members, in dist/
	@$(BIN)/python tools/wheels.py build

pins: setup ## write what a changed dependency brought in to the pins
	@$(BIN)/python tools/pins.py

upgrade: setup ## move every pin to the newest version allowed
	@$(BIN)/python tools/pins.py --upgrade
