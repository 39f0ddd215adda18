# SPDX-License-Identifier: Apache-2.0
"""The patch engine: fixes as data, probes over source, replacements that can be undone. Torch-free."""
