#!/usr/bin/env python3
"""Files of another PyTorch than the one that Tessera is built with, in both directions: the tests of
torch_files_test.py and weights_test.py that exchange files, with the Python that the environment variable
TESSERA_OTHER_PYTHON names. Skipped without it.

    TESSERA_OTHER_PYTHON=VENV/bin/python3 other_python_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import os, pathlib, subprocess, sys

SOURCE, BUILD = (pathlib.Path(word).resolve() for word in sys.argv[1:])
HERE = pathlib.Path(__file__).resolve().parent
PYTHON = os.environ.get("TESSERA_OTHER_PYTHON")
if not PYTHON:
    print("skipped: TESSERA_OTHER_PYTHON names no Python; expected one that has another PyTorch, and NumPy")
    sys.exit(77)

versions = "import torch, numpy; print('PyTorch', torch.__version__, 'NumPy', numpy.__version__)"
subprocess.run([PYTHON, "-c", versions], check=True)
TESTS = (("torch_files_test.py", BUILD, "RoundTrip"),
         ("weights_test.py", SOURCE, BUILD, "OptimizerState", "Trainer.test_torch_files_in_and_out",
          "CommandLine.test_dtypes_keep_their_names"))
failed = [test for test, *words in TESTS if subprocess.run([PYTHON, HERE / test, *words]).returncode != 0]
if failed:
    sys.exit(f"failed with {PYTHON}: {', '.join(failed)}")
