"""The cost of iterations on this host: measured at startup, learned while serving, kept for the next
start."""
