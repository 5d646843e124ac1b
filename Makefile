# make serve [MODEL=folder-or-hub-id] [PORT=8000] [ARGS='--max-model-len 4096']
# make env [PYTHON=python3.12] · model · test · test-fast · lint · bench · wheel · clean

SMOLLM2 := .models/SmolLM2-135M-Instruct
GEMMA   := .models/gemma-3-270m
MODEL   ?= $(SMOLLM2)
PORT    ?= 8000
ARGS    ?=
export ARGS
PYTHON  ?=
BIN     := .venv/bin

.PHONY: env model model-gemma serve test test-fast lint bench wheel clean
.DEFAULT_GOAL := serve

env:
	@PYTHON="$(PYTHON)" $(or $(PYTHON),python3) scripts/install_env.py

model: env
	@test -d $(SMOLLM2) || $(BIN)/python scripts/fetch_model.py $(notdir $(SMOLLM2))

model-gemma: env
	@test -d $(GEMMA) || $(BIN)/python scripts/fetch_model.py $(notdir $(GEMMA))

serve: env $(if $(filter $(SMOLLM2),$(MODEL)),model)
	@exec $(BIN)/python scripts/serve.py --model "$(MODEL)" --port $(PORT)

# One thread for small tensors: more would only wait for one another. Engines choose their own.
# Tests of a file share what they start, so a file stays in one worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: env model model-gemma
	@$(BIN)/python scripts/tiny_models.py > /dev/null
	@$(PYTEST) --durations 30

# No server is started: under two minutes.
test-fast: env model
	@$(PYTEST) -m "not server and not slow and not gpu"

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy scripts $(wildcard benchmarks/*.py examples/*.py)
	@$(BIN)/lint-imports

# Each writes its table to benchmarks/results/. WHAT=parity runs that part of serving.py alone.
bench: env model
	@$(BIN)/python benchmarks/serving.py $(WHAT)
ifndef WHAT
	@$(BIN)/python benchmarks/curves.py
	@$(BIN)/python benchmarks/startup.py
	@$(BIN)/python benchmarks/transform.py
	@$(BIN)/python benchmarks/plan_benchmark.py --output benchmarks/results/plan.md
	@$(BIN)/python benchmarks/ring_benchmark.py --out benchmarks/results/ring.md
	@$(BIN)/python benchmarks/manager_benchmark.py --out benchmarks/results/manager.md
endif

wheel: env
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation

# What is expensive to bring back stays: .venv and .models.
clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find mstar_plugin integrations models tests -name __pycache__ -type d -prune -exec rm -rf {} +
