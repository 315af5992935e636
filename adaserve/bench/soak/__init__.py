"""A real server under random mixes of everything for a long time, with invariants checked while it runs."""
