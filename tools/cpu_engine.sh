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
stamp=$(cat requirements/cpu-engine.txt pyproject.toml tools/cpu_engine.sh | sha256sum | cut -d' ' -f1)
made=$venv/.made-$stamp
if [ ! -e "$made" ]; then
  echo "setting up $venv (about two minutes the first time)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements/cpu-engine.txt hatchling editables
  # The index's builds of these are for CUDA and don't import beside a CPU torch.
  "$venv/bin/pip" uninstall --quiet -y torchvision torchaudio torchcodec
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
  touch "$made"
fi
if [ "$extra" = test ] && [ ! -e "$made-test" ]; then
  "$venv/bin/python" -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"]))' \
    > "$venv/test-requirements.txt"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$venv/test-requirements.txt"
  touch "$made-test"
fi
