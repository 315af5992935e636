"""The live view: what the server counts, the snapshot made of it, and the page that shows it."""
