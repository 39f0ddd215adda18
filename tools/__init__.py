# SPDX-License-Identifier: Apache-2.0
"""What maintainers run."""
