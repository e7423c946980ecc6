# The commands of the README and the steps that they run. All of them work on a bare Debian 12.

BUILD ?= build
# nproc counts no more than OMP_NUM_THREADS, which says nothing about a build.
JOBS  ?= $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
RANKS ?= 2
SEEDS ?= 1000
FROM  ?= 0
SCHEDULES ?= 100000
FIRST ?= 1
MINUTES ?= 30
SEED  ?= 1

.PHONY: demo fortran test quick everything build programs dependencies format tidy benchmark sanitizers wheel \
  apart cuda_compiles streams fuzz network faults operations soak lifetimes check_faults debian13 arm64 \
  abi litmus clean

# Trains a small GPT-2 on RANKS local ranks with a sharded optimizer.
demo: programs
	env -u OPENBLAS_CORETYPE $(BUILD)/bin/tessera train -n $(RANKS) configs/demo.yaml

# A solver in Fortran that trains, on 4 ranks of mpirun: docs/c.md.
fortran: dependencies
	cmake --preset release -B $(BUILD) -DTESSERA_BUILD_EXAMPLES=ON
	cmake --build $(BUILD) -j $(JOBS) --target advection
	env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 \
	  mpirun --oversubscribe -n 4 $(BUILD)/bin/advection

test: build
	scripts/run_tests.sh $(BUILD)

# The tests that need a second or two each: what is pure, and one parity case of each wrapper.
quick: build
	scripts/run_tests.sh $(BUILD) -L quick

# All tests and all campaigns, for some hours.
everything: test tidy apart sanitizers cuda_compiles streams fuzz network operations soak lifetimes \
  check_faults debian13 arm64 abi

build: dependencies
	cmake --preset release -B $(BUILD) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON
	cmake --build $(BUILD) -j $(JOBS)

# The library, tessera and tessera-train. A build folder that `make build` has made keeps its tests.
programs:
	scripts/install_dependencies.sh build
	[ -f $(BUILD)/build.ninja ] || cmake --preset release -B $(BUILD) \
	  -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF
	cmake --build $(BUILD) -j $(JOBS) --target tessera_cli tessera_train_cli

dependencies:
	scripts/install_dependencies.sh

# Formats all C++ sources with clang-format 14.
format: dependencies
	python3 tests/style/format_test.py . --fix

# Static analysis of all sources, for some minutes. The test `tidy` does it without the folders that use libtorch.
tidy: dependencies
	[ -f $(BUILD)/build.ninja ] || cmake --preset release -B $(BUILD)
	python3 tests/style/tidy.py $(BUILD) all

# Compiles each source alone, as the preset dev does: together, one has the includes of another.
apart: dependencies
	cmake --preset dev
	cmake --build build-dev -j $(JOBS)

# Compares the ABI of libtessera with that of the last tag v*, or with FROM=COMMIT.
abi: dependencies
	scripts/check_abi.sh $(filter-out 0,$(FROM))

# Compares with PyTorch on this machine: prints tables of ratios, writes benchmark-out/*.json.
benchmark: dependencies
	benchmarks/run.sh $(BUILD)

# Runs the quick tests under the address sanitizer and under the thread sanitizer.
sanitizers: dependencies
	scripts/run_sanitizers.sh

# Builds and tests the same sources against the newest PyTorch of PyPI.
wheel: dependencies
	scripts/test_with_wheel.sh

# Compiles what needs CUDA against the headers of a wheel with CUDA; says why where there is none.
cuda_compiles:
	scripts/check_cuda_compiles.sh $(TORCH) || [ $$? -eq 77 ]

# Removes each wait, event and record of use of a device's streams, one at a time: tests must notice.
streams: build
	python3 scripts/mutate_streams.py $(BUILD)

# Trains SEEDS random models in random ways and compares with plain libtorch: docs/fuzzing.md.
fuzz: build
	OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 MKL_CBWR=COMPATIBLE $(BUILD)/bin/training_fuzz \
	  --seeds $(SEEDS) --from $(FROM) --jobs $(JOBS)

# Runs SCHEDULES seeded schedules of a simulated network between ranks: docs/fuzzing.md.
network: build
	$(BUILD)/bin/network_sim $(SCHEDULES) $(FIRST)

# Tries every fault of docs/faults.md with real processes and writes the page again.
faults: build
	python3 tests/faults/run.py $(BUILD) --write docs/faults.md

# Tries every fault and compares with the page.
check_faults: build
	python3 tests/faults/run.py $(BUILD) --check docs/faults.md

# Makes each file operation fail, of all writers and readers, then random ones of trainings for MINUTES.
operations: build
	python3 tests/faults/file_operations.py $(BUILD) --minutes $(MINUTES) --seed $(SEED)

# Disturbs trainings at random for MINUTES and compares them with undisturbed ones.
soak: build
	python3 tests/faults/soak.py $(BUILD) --minutes $(MINUTES) --seed $(SEED)

# Ends programs with every object in every lifetime, over every backend.
lifetimes: build
	python3 tests/integration/lifetimes_test.py $(BUILD) all

# Runs all tests in a chroot of Debian 13, makes its packages there, and tries them.
debian13: dependencies
	CHROOT=$(BUILD)-debian13/root scripts/test_debian13.sh
	CHROOT=$(BUILD)-debian13/root SUITE=trixie QUICK=1 scripts/test_packages.sh $(BUILD)

# Compiles for aarch64, and runs the quick tests and the demo under qemu: docs/getting.md.
arm64: dependencies
	scripts/test_arm64.sh

# Tries the protocols of docs/liveness.md under C++'s memory model. It is a test of `make test` too.
litmus:
	python3 tests/litmus/protocols_test.py .

clean:
	rm -rf $(BUILD) build-* demo-out benchmark-out
