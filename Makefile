# Everything runs in .venv, which the first target that needs it builds from this folder's files.
PYTHON ?= python3
BIN := .venv/bin
# PyTorch's large buffers go back to the system after each step by default, and cost a third of it to fetch again.
KEEP_MEMORY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000

.PHONY: demo test test-runs test-reproduction test-slow quality bench clean

demo: .venv/demo  ## EfficientNet-Lite0 on MNIST-5k by five methods, on the CPU
	$(KEEP_MEMORY) $(BIN)/python -m entame_hf.cli demo --overwrite

test: .venv/test  ## The tests that need neither a GPU nor much time
	$(BIN)/python -m pytest -n auto --dist worksteal

test-runs: .venv/test  ## The tests of whole runs: several processes, the command, the Hub
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'runs and not slow and not gpu'

test-reproduction: .venv/test  ## The tests of suites, result rows and reports
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'reproduction and not slow and not gpu'

test-slow: .venv/slow  ## The tests that take longer
	$(KEEP_MEMORY) $(BIN)/python -m pytest -m slow

quality: .venv/dev  ## Format, lint, types and the order of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/demo  ## What ENTAME costs here; the step's overhead needs a GPU
	$(BIN)/python scripts/benchmark.py import
	$(BIN)/python scripts/benchmark.py apply
	$(BIN)/python scripts/benchmark.py save
	$(KEEP_MEMORY) $(BIN)/python scripts/benchmark.py cpu_layout

data/fashion-mnist:  ## 10,000 photographs of clothes, with apt: what suites take beside the images of Python packages
	mkdir -p $@.deb
	cd $@.deb && apt-get download dataset-fashion-mnist && dpkg-deb --extract *.deb . && \
		cd usr/share/datasets/fashion-mnist && sha256sum --check --quiet $(CURDIR)/scripts/reproduction/fashion_mnist.sha256
	mkdir $@ && cp $@.deb/usr/share/datasets/fashion-mnist/t10k-* $@.deb/usr/share/doc/dataset-fashion-mnist/copyright $@
	rm -r $@.deb

# One stamp an extra: it is as new as the requirements it was installed from.
.venv/%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

clean:  ## Remove what the targets above made
	rm -rf .venv out data build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
