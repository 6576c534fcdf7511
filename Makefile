# Everything starts here: `make demo`, `make test`. Both set up .venv by themselves, once.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)

# PyPI's torch brings the CUDA packages; machines without NVIDIA's driver take torch's CPU build (TORCH_INDEX= turns it off)
TORCH_INDEX ?= $(shell command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)
PIP = .venv/bin/python -m pip install --quiet --retries 1 --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: setup demo test docs docs-serve examples faults slurm chaos lint clean

setup: .venv/.ready

# what ingot needs to run; the tests and linters come on top of it
.venv/.runtime: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ingot needs Python 3.11, 3.12 or 3.13 on the PATH (or: make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing ingot and the pinned versions of constraints.txt into .venv (a minute or two, once)"
	@$(PIP) --editable .
	@touch $@

.venv/.ready: .venv/.runtime
	@echo "installing the tools for developing ingot into .venv (once)"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: .venv/.runtime
	.venv/bin/ingot demo $(ARGS)

# tests that share an expensive fixture run in one worker (groups in tests/conftest.py); in order, the longest first
test: setup
	.venv/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

docs: .venv/.docs-ready
	.venv/bin/python tools/docs/build.py

docs-serve: docs
	@echo "http://127.0.0.1:8000 (Ctrl-C ends)"
	@.venv/bin/python -m http.server --bind 127.0.0.1 --directory build/docs/html 8000

.venv/.docs-ready: .venv/.ready
	@$(PIP) --editable '.[dev,docs]'
	@touch $@

examples: setup
	.venv/bin/python -m pytest -n 2 tests/examples -m slow -k small_form_runs

faults: setup
	.venv/bin/python -m pytest tests/faults tests/checkpoint/test_kill.py tests/checkpoint/test_saver.py \
		tests/checkpoint/test_hostile.py tests/parallel/test_reshard.py tests/train/test_resume.py -m "slow or not slow"

slurm: setup
	INGOT_CHAOS_FAULTS=6 .venv/bin/python -m pytest tests/launch tests/examples/test_examples.py::test_on_slurm_the_small_form_is_two_nodes_of_a_job \
		-m "slow or not slow"

# random faults of a seed and of those after it; rows go to benchmarks/results/chaos.json
chaos: setup
	PYTHONPATH=tests:tests/launch .venv/bin/python -m chaos --faults $(or $(FAULTS),6) --seed $(or $(SEED),1)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python tools/check_structure.py
	.venv/bin/python tools/check_prose.py

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
