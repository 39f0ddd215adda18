# SPDX-License-Identifier: Apache-2.0
"""A batch of several query tokens a request, told as a batch of single rows: pure tensor code, no vLLM.

A decode kernel that runs one program a query row, with that row's own extent and block table, needs no causal mask to
verify several tokens of one request: row ``j`` of ``q`` sees the prefix and the first ``j + 1`` of its own tokens,
which is an extent. Requests may differ in how many tokens they bring.
"""

from __future__ import annotations

import torch


def write_decode_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_extents: torch.Tensor,
    row_blocks: torch.Tensor,
) -> None:
    """Write each query row's extent and block table. No copy to the host, no shape that depends on data.

    A row past the last token (the padding of a CUDA graph) is given the first position of the first request: the
    kernel divides by the sum of a row's weights, so that an extent of 0 would give NaN, and NaN in one row reaches the
    others where a later layer takes a maximum over all rows.

    Args:
        query_start_loc: int, ``[requests + 1]``; where each request's rows begin. Requests of no rows are allowed.
        seq_lens: int, ``[requests]``; tokens in the cache after this step, the request's own new ones included.
        block_table: int, ``[requests, blocks]``.
        row_extents: written, ``[rows]``; how many positions a row sees, itself included.
        row_blocks: written, ``[rows, blocks]``, of ``block_table``'s type.
    """
    rows = torch.arange(row_extents.shape[0], dtype=query_start_loc.dtype, device=query_start_loc.device)
    ends = query_start_loc[1:]
    request = torch.searchsorted(ends, rows, right=True)
    real = request < ends.shape[0]
    request = torch.where(real, request, 0)
    length = seq_lens.index_select(0, request)
    own = length - (ends.index_select(0, request) - 1 - rows)
    row_extents.copy_(torch.where(real, own, length.clamp(max=1)).clamp(min=0))
    torch.index_select(block_table, 0, request, out=row_blocks)
