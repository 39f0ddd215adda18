# SPDX-License-Identifier: Apache-2.0
"""What the drafter should have been given: from the checkpoints, or from the engine's own prefill.

``CheckpointOracle`` computes it with :mod:`vllm_kimi_eagle3.reference`, which shares no code with the engine: it sees
wrong layers, a wrong order, a missing residual, a wrong norm, rows of another step or request. ``PrefillOracle`` needs
no second copy of the model: it lets the same engine prefill the same tokens again, alone. It sees what goes wrong
between prefill and decode and among requests; it cannot see what is wrong in both, such as a wrong layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vllm_kimi_eagle3.reference import Cache, Drafter, Target
from vllm_kimi_eagle3.reference.ops import Media, shifted
from vllm_kimi_eagle3.verify.capture import Call
from vllm_kimi_eagle3.verify.drive import CaptureError, Driver, Request

EVERY_BYTES = 256 << 20
"""Most memory for the states of all boundaries."""


CACHE_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What vLLM's names of a KV cache's dtype round to; "auto" is the engine's dtype."""


def cache_dtype(name: str, dtype: str) -> torch.dtype | None:
    """What a KV cache rounds to in an engine of ``dtype``, both by vLLM's names; None: nothing.

    Raises:
        ValueError: the reference does not model that cache.
    """
    if name not in ("auto", *CACHE_DTYPES):
        raise ValueError(
            f"a KV cache of {name} is not modelled by the reference, but auto, {', '.join(CACHE_DTYPES)} are"
        )
    return None if name == dtype else CACHE_DTYPES.get(name)


class Oracle(Protocol):
    """The expected features of a token sequence, and where it can tell, the expected drafts."""

    def features(self, tokens: Sequence[int]) -> Tensor:
        """(T, n * H), what the drafter should be given for these tokens, float32."""
        ...

    def rounded(self, tokens: Sequence[int]) -> Tensor | None:
        """As ``features``, in the dtypes of engine and cache: its distance is what rounding costs. None: unknown."""
        ...

    def drafts(self, features: Tensor, tokens: Sequence[int], calls: Sequence[Call]) -> list[list[int]] | None:
        """What each call should have proposed, given (T, n * H) features of ``tokens``. None: unknown."""
        ...

    def every(self, tokens: Sequence[int]) -> Tensor | None:
        """(T', L + 1, H), the states of all boundaries for the first T' tokens, to tell what wrong rows are."""
        ...


class CheckpointOracle:
    """The reference in plain torch, on the CPU.

    Args:
        target: the target's folder.
        drafter: the drafter's folder; None to leave drafts unchecked.
        boundaries: which boundaries the drafter is to be given.
        dtype: the engine's.
        lazy: hold one layer at a time, and read the weights again for each sequence.
        cache_dtype: what the engine's KV cache is stored in; None for ``dtype``.
        latent_cache: whether the engine's KV cache holds MLA's latents.
        drafter_media: what the drafter is to see where a prompt has a picture: ``placeholder``, ``embedding`` or
            ``last-token``; see ``fixes.drafter_media``.

    Raises:
        ValueError, FileNotFoundError: the checkpoints cannot be read, or are not modelled; see ``reference``.
    """

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None,
        boundaries: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        lazy: bool = False,
        cache_dtype: torch.dtype | None = None,
        latent_cache: bool = True,
        drafter_media: str = "placeholder",
    ) -> None:
        self.boundaries = tuple(boundaries)
        self.drafter_media = drafter_media
        self.media: Media = {}
        self.rounded_media: Media = {}
        self.target = Target.load(target, lazy=lazy)
        self.drafter = None if drafter is None else Drafter.load(drafter, self.target)
        self._same_dtype = None
        if dtype != torch.float32 or cache_dtype is not None:
            self._same_dtype = Target.load(
                target, dtype=dtype, lazy=lazy, cache_dtype=cache_dtype, latent_cache=latent_cache
            )

    def about(self, media: Media, rounded: Media | None = None) -> CheckpointOracle:
        """The same oracle for one prompt with pictures: ``media`` by place in it, ``rounded`` in the engine's dtype."""
        view = copy.copy(self)
        view.media, view.rounded_media = media, media if rounded is None else rounded
        return view

    def embeds(self) -> Media:
        """By place in the prompt, what the drafter is to be given instead of the placeholder's embedding."""
        if self.drafter_media == "placeholder" or self.drafter is None:
            return {}
        if self.drafter_media == "embedding":
            return self.media
        last = self.drafter.embed([int(self.drafter.config["vocab_size"]) - 1])[0]
        return dict.fromkeys(self.media, last)

    def features(self, tokens: Sequence[int]) -> Tensor:
        """See ``Oracle``."""
        return self.target.features(tokens, self.boundaries, self.media)

    def rounded(self, tokens: Sequence[int]) -> Tensor | None:
        """See ``Oracle``."""
        if self._same_dtype is None:
            return None
        return self._same_dtype.features(tokens, self.boundaries, self.rounded_media).float()

    def every(self, tokens: Sequence[int]) -> Tensor | None:
        """See ``Oracle``; as many tokens as ``EVERY_BYTES`` hold."""
        count = self.target.num_layers + 1
        room = EVERY_BYTES // (4 * count * int(self.target.config["hidden_size"]))
        features = self.target.features(tokens[: max(1, room)], range(count), self.media)
        return features.unflatten(1, (count, -1))

    @torch.inference_mode()
    def drafts(self, features: Tensor, tokens: Sequence[int], calls: Sequence[Call]) -> list[list[int]] | None:
        """See ``Oracle``. The drafter's cache before a call holds all rows before it, whoever computed them."""
        if self.drafter is None:
            return None
        cache = Cache()
        hidden = self.drafter.combine_hidden_states(features[: len(tokens) - 1])
        if len(tokens) > 1:
            self.drafter.forward(tokens[1:], hidden, cache, shifted(self.embeds(), 1))
        proposed: list[list[int]] = []
        for call in calls:
            at = call.positions[-1]
            session = self.drafter.start()
            session.cache = copy.copy(cache)
            session.cache.truncate(at)
            # Where a chunk of a prompt ends before a picture, the next token is a picture's.
            seen = shifted(self.embeds(), at + 1)
            row = features[at : at + 1]
            proposed.append(session.propose(row, call.ids[-1:], at, len(call.drafts), seen).token_ids)
        return proposed


class PrefillOracle:
    """The same engine's own prefill of the same tokens, one sequence at a time, nothing cached."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def features(self, tokens: Sequence[int]) -> Tensor:
        """See ``Oracle``.

        Raises:
            CaptureError: the engine did not prefill every token.
        """
        self.driver.engine.reset_prefix_cache()
        (served,) = self.driver.run([Request(list(tokens), 1)])
        positions = [position for call in served.calls for position in call.positions]
        if positions != list(range(len(tokens))):
            raise CaptureError(f"the engine's own prefill of {len(tokens)} tokens gave rows {positions[:8]} and so on")
        return torch.cat([call.rows for call in served.calls]).float()

    def rounded(self, tokens: Sequence[int]) -> Tensor | None:
        """Unknown: there is no second precision."""
        return None

    def drafts(self, features: Tensor, tokens: Sequence[int], calls: Sequence[Call]) -> list[list[int]] | None:
        """Unknown: there is no second drafter."""
        return None

    def every(self, tokens: Sequence[int]) -> Tensor | None:
        """Unknown: the engine shows the boundaries that it captures, and no others."""
        return None
