# Two commands do everything, set-up included: `make run` and `make test`. PYTHON chooses another Python (>= 3.11).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.run-ready
DEV := $(VENV)/.dev-ready
DOCS := $(VENV)/.docs-ready
PEERS := .venv-peers/.ready
RLLIB := .venv-rllib/.ready
SBX := .venv-sbx/.ready

.PHONY: help run test system faults check format docs dist learn bench since pictures lock clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

run: $(READY) ## train PPO on CartPole-v1 until its last 100 episodes return 475
	$(BIN)/flowrl run ppo --env CartPole-v1 --until 'return_mean>=475' --steps 500_000

test: $(DEV) ## the tests but those of `make check` and of whole systems, two at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not system' --ignore tests/test_project.py

system: $(DEV) ## the tests of whole systems: processes that are killed and stopped, clusters, signals
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m system

faults: $(DEV) ## simulate 1,000 schedules of faults for each of ppo, impala and apex
	$(BIN)/python tests/faults/run_schedules.py

check: $(DEV) ## format, lint, types, layers, words, sizes, docstrings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_project.py

format: $(DEV) ## put the code into the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS) ## build the documentation into docs/_build/html; warnings are errors
	$(BIN)/python docs/gallery.py
	$(BIN)/python -m sphinx -W --keep-going -q -j 3 docs docs/_build/html
	@echo 'the first page: docs/_build/html/index.html'

dist: $(DEV) ## build the sdist and the wheel into dist/, and run the wheel in an empty environment
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --quiet --outdir dist .
	rm -rf build/dist-env
	$(PYTHON) -m venv build/dist-env
	build/dist-env/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.lock dist/*.whl
	cd build && dist-env/bin/flowrl env && dist-env/bin/flowrl run ppo --env CartPole-v1 --steps 5_000 --out dist-run && dist-env/bin/flowrl eval dist-run

learn: $(DEV) ## train every stock graph (or GRAPHS="dqn sac") over seeds and write docs/learning*.md
	$(BIN)/python bench/learn.py $(GRAPHS)
	$(BIN)/python bench/learn_rainbow.py $(GRAPHS)
	$(BIN)/python bench/learn_agents.py $(GRAPHS)
	$(BIN)/python bench/learn_offline.py $(GRAPHS)
	$(BIN)/python bench/self_play.py

bench: $(DEV) $(PEERS) $(RLLIB) $(SBX) ## measure beside hand-written loops and other libraries, and write docs/benchmarks/
	$(BIN)/python bench/bench.py
	$(BIN)/python bench/bench_ray.py
	$(BIN)/python bench/slow_steps.py
	$(BIN)/python bench/xla.py
	$(BIN)/python bench/replay.py
	$(BIN)/python bench/what_if.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/events.py
	$(BIN)/python bench/page.py
	$(BIN)/python bench/starting.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/tuning.py
	$(BIN)/python bench/agents.py
	$(BIN)/python bench/beside_sbx.py
	$(BIN)/python bench/threads.py
	$(BIN)/python bench/evolution.py
	$(BIN)/python bench/offline.py

COMMIT ?= HEAD~10
since: $(DEV) ## measure in turn with an earlier COMMIT=... and write docs/benchmarks/since.md
	$(BIN)/python bench/since.py $(COMMIT)

pictures: $(DEV) ## draw the pictures of README.md and the documentation again
	$(BIN)/python bench/pictures.py

lock: ## choose the newest versions that fit and write the locks
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --fork-strategy fewest --no-annotate --no-header --quiet --group dev -o requirements-dev.lock pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --fork-strategy fewest --no-annotate --no-header --quiet --group build -c requirements-dev.lock -o requirements.lock pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --fork-strategy fewest --no-annotate --no-header --quiet --group docs -c requirements-dev.lock -o requirements-docs.lock pyproject.toml

clean: ## remove the environment and all caches
	rm -rf $(VENV) .venv-peers .venv-rllib .venv-sbx build dist docs/_build docs/gallery *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'flowrl needs Python >= 3.11; name one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'this Python has no venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@# as a folder on the path: else Python takes a clone called flowrl for the package where it is started beside it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

$(DEV): $(READY) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@

$(DOCS): $(DEV) requirements-docs.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	@# else every notebook's kernel warns that it talks over TCP
	@mkdir -p $(VENV)/etc/ipython
	@echo 'c.IPKernelApp.log_level = "ERROR"' > $(VENV)/etc/ipython/ipython_kernel_config.py
	@touch $@

$(PEERS):
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check stable-baselines3==2.9.2 cpprb==11.0.0 torch==2.14.1
	@touch $@

# It pins Gymnasium, so it has an environment of its own.
$(RLLIB):
	$(PYTHON) -m venv .venv-rllib
	.venv-rllib/bin/python -m pip install --quiet --disable-pip-version-check 'ray[rllib]==2.60.0' torch==2.13.0
	@touch $@

# The JAX is that of flowrl, so that it is the libraries that are compared.
$(SBX):
	$(PYTHON) -m venv .venv-sbx
	.venv-sbx/bin/python -m pip install --quiet --disable-pip-version-check sbx-rl==0.28.0 jax==0.10.2 torch==2.14.1
	@touch $@
