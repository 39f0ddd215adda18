# SPDX-License-Identifier: Apache-2.0
"""An installed suite for whatever vLLM is in the environment: ``pytest --pyargs vllm_kimi_eagle3.regression``."""
