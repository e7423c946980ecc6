# The two commands of the README, and the steps that they are made of. Everything works on a bare Debian 12.

BUILD ?= build
JOBS  ?= $(shell nproc)
RANKS ?= 2

.PHONY: demo test build dependencies benchmark sanitizers wheel clean

# Trains a small GPT-2 on RANKS local ranks with a sharded optimizer.
demo: build
	env -u OPENBLAS_CORETYPE $(BUILD)/bin/tessera train -n $(RANKS) configs/demo.yaml

test: build
	scripts/run_tests.sh $(BUILD)

build: dependencies
	cmake --preset release -B $(BUILD)
	cmake --build $(BUILD) -j $(JOBS)

dependencies:
	scripts/install_dependencies.sh

# Against PyTorch on this machine: prints tables of ratios and writes benchmark-out/*.json.
benchmark: dependencies
	benchmarks/run.sh $(BUILD)

# The fast tests under the address and the thread sanitizer.
sanitizers: dependencies
	scripts/run_sanitizers.sh

# The same sources against the newest PyTorch of PyPI.
wheel: dependencies
	scripts/test_with_wheel.sh

clean:
	rm -rf $(BUILD) build-* demo-out benchmark-out
