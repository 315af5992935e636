"""Open-loop load tests: requests with SLOs leave at planned times, however slow the server is.

========  ============================================================================================
plan      ``config`` (YAML, checked with ``setting_types``), ``arrivals``, ``prompts``, ``schedule``
          (all requests of a run, before any is sent), ``preflight`` with ``plain_http`` (what has to be
          known of the server)
send      ``bench`` starts Locust on ``locustfile``; ``locust_hooks``, ``locust_run`` (one process, master
          or worker), ``dispatch`` (each at its time), ``stream`` and ``protocol`` (one request)
record    ``recorder``, ``server_metrics``, ``web_tab``; ``results`` (the folder that is written)
report    ``run_folder`` (reads it), ``report`` with ``figures``; ``server_comparison`` and
          ``comparison_table`` (client against server)
commands  ``cli``, ``options`` (what they make of a configuration), ``errors``
========  ============================================================================================
"""
