# SPDX-License-Identifier: Apache-2.0
"""One module per defect: what is wrong, how to see it in the source, and the smallest change that mends it."""
