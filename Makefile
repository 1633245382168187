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
