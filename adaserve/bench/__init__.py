"""Everything that measures or demonstrates; nothing here is needed to serve.

============  =======================================================================================
commands      ``cli`` (``adaserve bench ...``), ``options`` (what several of them take), ``display`` and
              ``markdown`` (bars and tables), ``jsonl`` (files that outlive a crash)
servers       ``servers`` (starts one for a measurement), ``client`` (asks it), ``busy`` (who else uses
              this machine), ``prompts`` and ``repetition`` (what it is asked)
on servers    ``demo`` with ``turns``, ``latency``, ``learn/``, ``fleet/``, ``soak/`` (finds faults),
              ``sweep/`` (compares systems; the largest part, with a map of its own), ``gpu_check/``
without one   ``kernels``, ``context/``, ``heads`` with ``walks``, ``selection``, ``profile`` and ``fit``
simulated     ``simulate/`` (the commands ``adaserve simulate ...``), ``study`` (grids of simulations),
              ``figure5``
============  =======================================================================================

Load tests, their results folders and the look of figures are ``adaserve.loadgen``'s.
"""
