"""The server's end of drafts that learn: what it records, and how better drafts come in."""
