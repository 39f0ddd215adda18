# SPDX-License-Identifier: Apache-2.0
"""What the fuzzer kept, played without it: a result or one readable sentence, whatever the bytes."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tools import fuzz_parsers
from vllm_kimi_eagle3.layers import PlanError, alignment


def test_every_kept_input_ends_well() -> None:
    corpus = fuzz_parsers.read_corpus()
    parsers = Counter(fuzz_parsers.PARSERS[data[0] % len(fuzz_parsers.PARSERS)] for data in corpus if data)
    assert set(parsers) == set(fuzz_parsers.PARSERS)
    accepted: Counter[str] = Counter()
    for data in corpus:
        started = time.process_time()
        fuzz_parsers.one_input(data)
        assert time.process_time() - started < 1, data[:100]
        if data:
            parser = fuzz_parsers.PARSERS[data[0] % len(fuzz_parsers.PARSERS)]
            try:
                parser(data[1:])
                accepted[parser.__name__] += 1
            except PlanError:
                continue
    # Not only refusals: a corpus that nothing accepts would test the first line of each parser.
    assert all(accepted[parser.__name__] for parser in fuzz_parsers.PARSERS), accepted


def test_the_harness_finds_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    good = b'\x03{"format":1,"key":"' + b"ab" * 32 + b'","num_layers":10,"boundaries":[2,5,7],"rule":null}'
    fuzz_parsers.one_input(good)

    def unreadable(*_: object) -> None:
        raise PlanError("two\nlines")

    monkeypatch.setattr(alignment, "parse", unreadable)
    with pytest.raises(fuzz_parsers.Finding, match="nobody can read"):
        fuzz_parsers.one_input(good)
    monkeypatch.setattr(alignment, "parse", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuzz_parsers.one_input(good)
