"""The server's part of drafts that learn: what it records, and how better drafts are swapped in."""
