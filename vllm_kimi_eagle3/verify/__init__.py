# SPDX-License-Identifier: Apache-2.0
"""What the drafter of a live engine is given, compared row by row with what it should be given.

* ``capture``: in the workers, record every call of the drafter;
* ``drive``: in the process of the engine, run requests that join and leave, and collect the records;
* ``oracle``: what the rows should be, from the checkpoints or from the engine's own prefill;
* ``compare``: records and oracle to situations, errors and problems;
* ``report``: the outcome as text, JSON and one HTML file.
"""
