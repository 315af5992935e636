"""Everything that measures or demonstrates; nothing here is needed to serve.

============  =======================================================================================
commands      ``cli`` (``adaserve bench ...``), ``options`` (what several of them take), ``display`` and
              ``markdown`` (bars and tables), ``jsonl`` (files that outlive a crash)
servers       ``start_server`` (for a measurement), ``client`` (asks it), ``host_contention`` (who
              else uses this machine), ``prompts`` and ``repetition`` (what it is asked)
on servers    ``demo`` with ``interleaved``, ``latency``, ``learn/``, ``fleet/``, ``soak/`` (finds faults),
              ``sweep/`` (compares systems; the largest part, with a map of its own), ``gpu_check/``
without one   ``kernels``, ``context/``, ``heads`` with ``offline_drafting``, ``policy_cost``, ``profile``,
              ``fit``
simulated     ``simulate/`` (the commands ``adaserve simulate ...``), ``figure5``
============  =======================================================================================

Load tests, their results folders and the look of figures are ``adaserve.loadgen``'s.
"""
