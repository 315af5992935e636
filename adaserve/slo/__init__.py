"""What a request asks for and what it got.

=========  ==========================================================================================
asked      ``classes`` (SLOs, and the operator's file), ``resolve`` (where a request may state one)
measured   ``run_summary`` (TTFT, TPOT, attainment, goodput), ``validity`` (of a load test)
traces     ``trace``, ``trace_formats`` (files), ``replay_lengths`` (where a replayed answer ends)
scheduler  ``ledger`` (each request) with ``delivered_tpot``, ``lengths`` and ``request_log``
counted    ``events`` and ``forecast_types`` (what is told), ``stats``, ``prometheus``
live page  ``snapshot`` (of all ranks), ``page``
=========  ==========================================================================================
"""
