# SPDX-License-Identifier: Apache-2.0
"""The fixes as patches to vLLM's source, for those who build vLLM themselves.

``diff`` parses and applies unified diffs, strictly; ``series`` finds the patches of a release; ``tree`` reads and
replaces files without ever leaving a folder; ``plan`` says what a tree needs and applies it, all or nothing. Standard
library only, and nothing here imports vLLM.
"""
