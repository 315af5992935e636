"""``adaserve bench sweep``: systems compared on a real server, block by block (docs/evaluation.md).

=========  ==========================================================================================
what runs  ``plan`` (points, cases, order), ``systems`` (names), ``tuning`` (lengths of those that have one)
traffic    ``workload`` (arrivals, classes, lengths), ``kinds``, ``prompts``, ``ttft`` (SLOs); ``requests``
           makes the blocks of all that
running    ``cli``, ``commands``, ``runner`` (all blocks), ``servers``, ``measure`` (one block),
           ``eta`` (time left), ``store`` (the folder)
results    ``aggregate`` and ``intervals`` (figures), ``report`` and ``figures`` (pages of a folder),
           ``results_table`` (a column of results/README.md)
simulator  ``simulated`` (replays and compares), ``host_model`` (what it has to know of the host)
=========  ==========================================================================================
"""
