# SPDX-License-Identifier: Apache-2.0
"""Which layers was this drafter trained on? The only arbiter is a measurement.

The drafter is run teacher-forced on text that the target itself wrote, with the boundaries as vLLM would read the ids
and shifted by one in all the ways that are in use, and its first token is compared with the target's. ``trials`` lays
the experiment out and decides (pure); ``texts`` has the target write on the torch reference, ``engine`` on vLLM;
``measure`` runs the drafter, on the torch reference; ``picture`` draws.

The target runs once; what is kept of it are the residual streams that some trial reads. It can't know about a fault
of what hands states to a drafter: there is none here. ``bench`` and ``verify`` look at that.
"""
