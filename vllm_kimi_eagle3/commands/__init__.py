# SPDX-License-Identifier: Apache-2.0
"""The subcommands of ``vllm-kimi-eagle3``: one module each, with ``add_parser(subparsers)`` and ``run(args)``."""
