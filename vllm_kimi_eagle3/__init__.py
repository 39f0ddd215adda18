# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 speculative decoding that is right for Kimi-K2.x and DeepSeek-V3 on vLLM.

Importing this package imports neither torch nor vLLM: vLLM itself imports it in every process it starts, and the
``layers`` and ``doctor`` commands have to run where neither is installed.
"""

__version__ = "0.1.0"
