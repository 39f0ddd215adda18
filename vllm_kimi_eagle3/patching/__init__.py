# SPDX-License-Identifier: Apache-2.0
"""Applying fixes to an installed vLLM, and knowing which one it is. Torch-free."""
