# SPDX-License-Identifier: Apache-2.0
"""For all tests: one thread for torch.

The reference runs tiny matrices, for which a second thread costs more than it brings, and much more than that on a busy
machine, where it waits spinning.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
