# SPDX-License-Identifier: Apache-2.0
"""Measure a server's speculation, and name what is wrong with it.

``verdict`` decides from evidence (pure); ``client`` talks to a server, ``metrics`` reads its counters, ``measure`` runs
prompts and adds up, ``serve`` starts an engine, ``report`` makes the HTML file. Standard library only, but for the
report.
"""
