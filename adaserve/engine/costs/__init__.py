"""What iterations cost on this host: measured at a start, learned while serving, kept for the next."""
