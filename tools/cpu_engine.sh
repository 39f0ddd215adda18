#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment that the demo and the tests run in: vLLM's CPU engine and this package, editable.
#   tools/cpu_engine.sh VENV [test]      "test" adds the test tools
# Does nothing when the environment is already what the files it is made from ask for.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extra=${2:-}

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  echo "Python 3.11 is needed and was not found; install it, or name it: make PYTHON=/path/to/python3.11 ..." >&2
  exit 2
fi

# What the environment is made from; a change makes it anew.
stamp=$(cat requirements/cpu-engine.txt requirements/test.txt requirements/vllm-alias/pyproject.toml pyproject.toml tools/cpu_engine.sh \
  | sha256sum | cut -d' ' -f1)
made=$venv/.made-$stamp
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if [ ! -e "$made" ]; then
  echo "setting up $venv (about two minutes the first time)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # torch first and by itself: what comes after must find it, not choose another build.
  pip install -qq "$(grep '^torch==' requirements/cpu-engine.txt)"
  pip install -qq -r requirements/cpu-engine.txt
  # The index's builds of these are for CUDA and don't import beside a CPU torch.
  pip uninstall -qq -y torchvision torchaudio torchcodec
  pip install -qq --no-deps --no-build-isolation ./requirements/vllm-alias
  pip install -qq --no-build-isolation -e .
  touch "$made"
fi
if [ "$extra" = test ] && [ ! -e "$made-test" ]; then
  pip install -qq --no-build-isolation --constraint requirements/test.txt -e '.[test]'
  touch "$made-test"
fi
