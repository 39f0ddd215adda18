# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread for torch.

The reference runs tiny matrices, for which a second thread costs more than it brings, and much more than that on a busy
machine, where it waits spinning.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: a test that found a new one would fail a change that has nothing to do with it. New
# ones are looked for by `HYPOTHESIS_PROFILE=search pytest tests/layers` and by `make fuzz`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
