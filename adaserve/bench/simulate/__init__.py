"""``adaserve simulate``: policies, loads and fleets without a GPU."""
