"""``adaserve bench sweep``: policies x loads x shares x SLO scales x seeds on the real server."""
